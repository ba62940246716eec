"""A lesson in real JupyterLab in real Chromium: run all cells, move the widgets as a reader does, see no error."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

from minillm.course.build import KERNEL

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="NOT RUN: the browser test needs Chromium (apt-get install chromium)"),
    pytest.mark.timeout(600),
]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
]

SMALL = {
    "stepper": """
from minillm.course.widgets import stepper
steps = stepper(lambda ax, i: ax.bar(range(3), [k <= i for k in range(3)]), 3, ["first", "second", "third"])
steps""",
    "slider": """
from minillm.course.widgets import slider_plot
def draw(ax, block_size, tokens):
    ax.bar([0], [-(-tokens // block_size)])
slider_plot(draw, block_size=[1, 2, 4], tokens=[9, 99])""",
    "quiz": """
from minillm.course import quiz
quiz("Is 2 even?", ["yes", "no"], 0, ["It is 2 x 1.", "Halve it."])""",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab on a copy of the notebooks: it saves by itself, and must not touch the repository."""
    home, folder = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("course")
    for name in ("notebooks", "exercises"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name)
    cells = [nbformat.v4.new_code_cell(code.strip(), id=name) for name, code in SMALL.items()]
    small = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})  # without: JupyterLab asks which
    nbformat.write(small, folder / "small.ipynb")
    settings = {
        "config/labconfig/page_config.json": {
            "disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}
        },
        # all cells are in the page, also those out of sight
        "settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
    }
    for name, value in settings.items():
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(json.dumps(value))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "MINILLM_PROGRESS": str(home / "progress.json"),
    }
    options = {
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.root_dir": folder,
        "ServerApp.password": "",
        "IdentityProvider.token": "",
        "LabApp.expose_app_in_browser": True,
        "LabApp.extension_manager": "readonly",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    with open(home / "log", "w") as log:
        server = subprocess.Popen(
            command + [f"--{key}={value}" for key, value in options.items()], env=env, stdout=log, stderr=log
        )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=5).read()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, (home / "log").read_text()
                time.sleep(0.3)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield chromium
        chromium.close()


RUN_ALL = """async () => {
    const notebook = window.jupyterapp.shell.currentWidget;
    await notebook.sessionContext.ready;
    await window.jupyterapp.commands.execute('notebook:run-all-cells');
    const errors = [];
    for (const cell of notebook.content.model.cells)
        for (const output of cell.toJSON().outputs ?? [])
            if (output.output_type === 'error') errors.push(output.ename + ': ' + output.evalue);
    return errors;
}"""


TYPE_AND_RUN = """async ([id, text]) => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    const cell = notebook.widgets.find(one => one.model.id === id);
    cell.model.sharedModel.setSource(text);
    for (const step of [0, 1]) {  // the answer, and the scratch cell and check behind it
        notebook.activeCellIndex = notebook.widgets.indexOf(cell) + 2 * step;
        await window.jupyterapp.commands.execute('notebook:run-cell');
    }
    return notebook.widgets[notebook.widgets.indexOf(cell) + 2].model.toJSON().outputs;
}"""


@pytest.fixture
def open_notebook(browser, lab):
    pages = []

    def go(path):
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        faults = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        pages.append((page, faults))
        page.goto(f"{lab}/doc/tree/{path}?reset")
        page.wait_for_function("window.jupyterapp?.shell?.currentWidget?.context?.isReady")
        page.set_default_timeout(400_000)
        assert page.evaluate(RUN_ALL) == []
        page.set_default_timeout(30_000)
        return page

    yield go
    for page, faults in pages:
        page.close()
        assert faults == []


def move_widgets(page):
    """Move every stepper by mouse and by keyboard, and every slider by keyboard; the page follows. Returns how many."""
    from playwright.sync_api import expect

    expect.set_options(timeout=30_000)
    steppers = page.locator(".mini-stepper")
    for k in range(steppers.count()):
        box = steppers.nth(k)
        label = box.locator(".mini-label")
        expect(label).to_contain_text("step 1 of")
        first = box.locator("svg").first.inner_html()
        box.locator(".mini-next").click()
        expect(label).to_contain_text("step 2 of")
        assert box.locator("svg").first.inner_html() != first
        box.locator(".mini-range").focus()
        page.keyboard.press("ArrowLeft")
        expect(label).to_contain_text("step 1 of")
        page.keyboard.press("ArrowRight")
        expect(label).to_contain_text("step 2 of")
    handles = page.locator(".mini-slider-plot .noUi-handle")
    for k in range(handles.count()):
        handle = handles.nth(k)
        picture = handle.locator("xpath=ancestor::*[contains(@class, 'mini-slider-plot')]//img")
        before = picture.get_attribute("src")
        at_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
        handle.focus()
        page.keyboard.press("ArrowLeft" if at_end else "ArrowRight")
        expect(picture).not_to_have_attribute("src", before)
    return steppers.count(), handles.count()


def test_stepper_slider_and_quiz(open_notebook, tmp_path):
    from playwright.sync_api import expect

    page = open_notebook("small.ipynb")
    expect(page.locator(".mini-stepper svg").first).to_be_visible()
    assert move_widgets(page) == (1, 2)
    expect(page.get_by_text("step 2 of 3: second")).to_be_visible()
    expect(page.get_by_text("block size = 2, tokens = 99")).to_be_visible()
    page.get_by_label("no", exact=True).check()
    expect(page.get_by_text("Not quite. Halve it.")).to_be_visible()
    page.get_by_label("yes", exact=True).check()
    expect(page.get_by_text("Right. It is 2 x 1.")).to_be_visible()
    page.screenshot(path=tmp_path / "small.png")
    assert (tmp_path / "small.png").stat().st_size > 10_000


def test_a_lesson(open_notebook, tmp_path):
    lesson = sorted(p.name for p in (ROOT / "notebooks").glob("*.ipynb"))[0]
    page = open_notebook(f"notebooks/{lesson}")
    assert sum(move_widgets(page)) >= 1, "a lesson has a widget"
    page.screenshot(path=tmp_path / "lesson.png")


def test_an_exercise(open_notebook, tmp_path):
    """A wrong answer, typed into the notebook, is refused with its name; the right one passes."""
    page = open_notebook("exercises/06_batching.ipynb")
    head = "def padding(chunk_lens, num_seats):\n    prompts = [n for n in chunk_lens if n > 1]\n"
    short = "sum(max(prompts) - n for n in prompts)"

    def answer(body):
        outputs = page.evaluate(TYPE_AND_RUN, ["exercise-06-009", f"{head}    return {body}"])
        return json.dumps(outputs)

    wrong = answer(f"{short}  # the dead seats are forgotten")
    assert "FAIL" in wrong and "likely" in wrong and "PASS" not in wrong
    page.screenshot(path=tmp_path / "wrong.png")
    right = answer(f"({short} if prompts else 0) + num_seats - len(chunk_lens)")
    assert "PASS" in right and "FAIL" not in right
