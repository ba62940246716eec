"""Builds the three notebooks of each stage from lesson.py, exercises.py and the engine's source. One command: build().

Notebooks carry fixed cell ids, no times, no widget state. What is built can be checked against what is committed.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import source
from .exercise import Exercise, Mutant, Stage, all_stages, get_stage

KINDS = ("notebooks", "exercises", "solutions")
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
CELL_TIMEOUT_S = 300
VIEW = "application/vnd.jupyter.widget-view+json"
Cell = tuple[str, str, list[str]]  # type, text, tags


def find_root(start: Path | None = None) -> Path:
    """The folder that holds exercises/ (or notebooks/, or the course's source), from `start` upwards."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "exercises").is_dir() or (folder / "minillm" / "course").is_dir():
            return folder
    raise FileNotFoundError(f"No folder named exercises/ in {here} or above it. Change into the course's folder first.")


# ---- cells


def _notebook(stage: Stage, kind: str, cells: Iterable[Cell]) -> Any:
    import nbformat

    made = []
    for i, (cell_type, text, tags) in enumerate(cells):
        make = nbformat.v4.new_code_cell if cell_type == "code" else nbformat.v4.new_markdown_cell
        id = f"{kind[:-1]}-{stage.number}-{i:03d}"
        made.append(make(text.strip("\n"), id=id, metadata={"tags": tags} if tags else {}))
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=made, metadata=metadata)


def lesson(stage: Stage) -> Any:
    import jupytext

    read = jupytext.reads((stage.folder() / "lesson.py").read_text(encoding="utf-8"), fmt="py:percent")
    cells = [(c.cell_type, c.source, list(c.metadata.get("tags", []))) for c in read.cells]
    return _notebook(stage, "notebooks", cells)


def _intro(stage: Stage, kind: str) -> str:
    rows = "\n".join(f"| {ex.id} | {ex.title} | {_stars(ex)} | {ex.minutes} |" for ex in stage.exercises())
    if kind == "exercises":
        how = f"""
            First read [the lesson](../notebooks/{stage.file_name}). For each exercise: put your code in place of
            `raise NotImplementedError` (or your answers in place of `None`), try it in the scratch cell, then run the
            check. The check says what is wrong and what the likely mistake is. Stuck? Open the hints one at a time.
            When a check passes, `plug_in` runs the real engine on *your* code.
            [Solutions](../solutions/{stage.file_name}), with reasons, are there when you want them."""
    else:
        how = f"""
            What the engine itself does, why it is right, what else would be, and the wrong answers that people
            really give. Try [the exercises](../exercises/{stage.file_name}) first."""
    title = f"# {stage.number} {stage.title}: {kind}"
    return f"{title}\n\n{inspect.cleandoc(how)}\n\n| | | difficulty | minutes |\n|---|---|---|---|\n{rows}"


def _stars(ex: Exercise) -> str:
    return "★" * ex.difficulty + "☆" * (3 - ex.difficulty)


def _statement(ex: Exercise, hints: bool) -> str:
    minutes = f"{ex.minutes} minute{'s' * (ex.minutes > 1)}"
    text = f"## {ex.id} {ex.title}\n\n*{minutes} · {_stars(ex)}*\n\n{inspect.cleandoc(ex.statement)}"
    for i, hint in enumerate(ex.hints if hints else (), 1):
        text += f"\n\n<details><summary>Hint {i}</summary>\n\n{inspect.cleandoc(hint)}\n\n</details>"
    return text


def _scratch(ex: Exercise) -> str:
    body = textwrap.indent(textwrap.dedent(ex.scratch).strip(), "    ")
    if not body:
        return "# Scratch: try things here."
    return f"# Scratch: try things here.\nwith attempt():\n{body}"


def _why(ex: Exercise) -> str:
    rows = "\n".join(f"| {_cell(m.message)} | {_cell(m.seen)} |" for m in ex.mutants)
    code = ""
    if (inspect.isfunction(ex.variant) and ex.variant.__name__ != "<lambda>") or inspect.isclass(ex.variant):
        code = f"\n\n**Another right answer**\n\n```python\n{source.get_code(ex.variant)}\n```"
    return (
        f"**Why**\n\n{inspect.cleandoc(ex.explanation)}{code}\n\n"
        f"**Wrong answers that the check names**\n\n| what it says | where it was seen |\n|---|---|\n{rows}"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _setup(stage: Stage) -> str:
    lines = {line for ex in stage.exercises() for line in source.imports_for(ex)}
    order = sorted(lines, key=lambda line: ("minillm" in line, line.startswith("from"), line))
    return "\n".join([*order, "from minillm.course import attempt, check, explain, hint, plug_in, progress"])


def _begin(stage: Stage, kind: str) -> list[Cell]:
    return [("markdown", _intro(stage, kind), []), ("code", _setup(stage), [])]


def _can_plug(ex: Exercise) -> bool:
    return ":" in ex.symbol or ex.plug_in is not None


def exercises(stage: Stage) -> Any:
    cells = _begin(stage, "exercises")
    for ex in stage.exercises():
        cells += [
            ("markdown", _statement(ex, hints=True), []),
            ("code", source.stub_code(ex), ["answer"]),
            ("code", _scratch(ex), []),
            ("code", f'check("{ex.id}", {ex.name})', ["check"]),
            *[("code", f'plug_in("{ex.id}", {ex.name})', [])] * _can_plug(ex),
            ("code", f'explain("{ex.id}")', []),
        ]
    return _notebook(stage, "exercises", [*cells, ("code", f'progress("{stage.number}")', [])])


def solutions(stage: Stage) -> Any:
    cells = _begin(stage, "solutions")
    for ex in stage.exercises():
        cells += [
            ("markdown", _statement(ex, hints=False), []),
            ("code", source.solution_code(ex), ["answer"]),
            ("code", f'check("{ex.id}", {ex.name})', ["check"]),
            # what the engine prints depends on the model and the machine, so it is run but not compared
            *[("code", f'plug_in("{ex.id}", {ex.name})', ["nbval-ignore-output"])] * _can_plug(ex),
            ("markdown", _why(ex), []),
        ]
    return _notebook(stage, "solutions", cells)


MAKERS: dict[str, Callable[[Stage], Any]] = {"notebooks": lesson, "exercises": exercises, "solutions": solutions}


# ---- running, writing, comparing


def execute(notebook: Any, folder: Path, env: dict[str, str] | None = None, allow_errors: bool = False) -> Any:
    """Run all cells in `folder`, with a progress file of its own unless `env` names one. Changes the notebook."""
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as scratch:
        extra = {"MINILLM_PROGRESS": str(Path(scratch) / "progress.json"), "MINILLM_STRICT": "0", **(env or {})}
        before = {key: os.environ.get(key) for key in extra}
        os.environ.update(extra)
        try:
            NotebookClient(
                notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", record_timing=False, store_widget_state=False,
                allow_errors=allow_errors, resources={"metadata": {"path": str(folder)}},
            ).execute(stderr=subprocess.DEVNULL)  # fmt: skip
        finally:
            for key, value in before.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value
    tidy(notebook)
    return notebook


def tidy(notebook: Any) -> None:
    """Take away what differs from run to run: widget state, times, the kernel's version; join split stream outputs."""
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
        joined: list[Any] = []
        for output in cell.get("outputs", []):
            output.get("metadata", {}).clear()
            output.get("data", {}).pop(VIEW, None)  # it points to a kernel that is gone
            if joined and output.output_type == "stream" == joined[-1].output_type and output.name == joined[-1].name:
                joined[-1].text += output.text
            elif output.output_type != "stream" or output.name != "stderr":  # progress bars and warnings
                joined.append(output)
        if "outputs" in cell:
            cell.outputs = joined


def _skeleton(notebook: Any) -> str:
    """Sources and metadata as text, without outputs."""
    plain = json.loads(json.dumps(notebook))
    for cell in plain["cells"]:
        cell.pop("outputs", None)
        cell.pop("execution_count", None)
        cell["source"] = "".join(cell["source"])
    return json.dumps(plain, indent=1, sort_keys=True)


def problems(path: Path, fresh: Any) -> list[str]:
    """What is wrong with a committed notebook: not as its source says, not run, errors, widget state, times."""
    import nbformat

    if not path.exists():
        return ["it is missing"]
    there = nbformat.read(path, as_version=4)
    found = []
    if _skeleton(there) != _skeleton(fresh):
        old, new = ([c.source for c in n.cells] for n in (there, fresh))
        first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        found.append(f"it differs from its source (first in cell {first})")
    for i, cell in enumerate(there.cells):
        if cell.cell_type == "code":
            if cell.execution_count is None and cell.source.strip():
                found.append(f"cell {i} was not run")
            if any(o.output_type == "error" for o in cell.outputs):
                found.append(f"cell {i} holds an error")
    return found


def build(numbers: Iterable[str] = (), check: bool = False, root: Path | None = None, say: Any = print) -> list[str]:
    """Build stages (none named: exercises and solutions of all, and lessons that differ from their source).

    check: write nothing. Returns one line per problem; empty means that all is well.
    """
    import nbformat

    root = root or find_root()
    named = list(numbers)
    stages = [get_stage(n) for n in named] or [s for s in all_stages().values() if s.package]
    wrong = []
    for stage in stages:
        for kind in KINDS:
            path = root / kind / stage.file_name
            fresh = MAKERS[kind](stage)
            found = problems(path, fresh)
            if check:
                wrong += [f"{kind}/{path.name}: {text}" for text in found]
                continue
            if kind == "notebooks" and not named and not found:
                continue
            say(f"building {kind}/{path.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            execute(fresh, path.parent)
            nbformat.validate(fresh)
            path.write_text(nbformat.writes(fresh).rstrip("\n") + "\n", encoding="utf-8")
    if not check:
        for stage in stages:
            wrong += [f"{stage.number}: {line}" for line in leaks(stage)]
    readme = root / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        new = with_table(text)
        if check and new != text:
            wrong.append("README.md: the table of stages is not up to date")
        elif new != text:
            readme.write_text(new, encoding="utf-8")
    return wrong


def leaks(stage: Stage) -> list[str]:
    """Solution lines (with more than 12 letters and digits) that stand in the stage's exercise notebook."""
    text = "\n".join(cell.source for cell in exercises(stage).cells)
    lines = {line.strip() for line in text.splitlines()}
    found = []
    for ex in stage.exercises():
        for line in source.solution_lines(ex):
            code = line.partition("  #")[0].strip()
            if len(re.sub(r"\W", "", code)) > 12 and (code in text if " " in code else code in lines):
                found.append(f"exercise {ex.id}: the notebook shows the solution's line {code!r}")
    return found


# ---- the README's table


def with_table(text: str) -> str:
    """README text with the part between the two `<!-- stages -->` lines made anew."""
    parts = text.split("<!-- stages -->")
    if len(parts) != 3:
        raise ValueError("README.md needs two lines '<!-- stages -->', around the table of stages.")
    return f"{parts[0]}<!-- stages -->\n{table()}\n<!-- stages -->{parts[2]}"


def table() -> str:
    """The stages as markdown: links, checks, mutants, minutes; planned ones say so."""
    rows = ["| | stage | afterwards you can | | exercises | wrong answers named | minutes |", "|---" * 7 + "|"]
    checks = mutants = 0
    for stage in all_stages().values():
        if not stage.package:
            rows.append(f"| {stage.number} | {stage.title} | {stage.ability} | planned | | | |")
            continue
        own = stage.exercises()
        named: list[Mutant] = [m for ex in own for m in ex.mutants]
        checks, mutants = checks + len(own), mutants + len(named)
        links = " ".join(f"[{k.removesuffix('s')}]({folder}/{stage.file_name})" for k, folder in zip(
            ("lesson", "exercises", "solutions"), KINDS, strict=True))  # fmt: skip
        minutes = f"{stage.minutes} + {sum(ex.minutes for ex in own)}"
        rows.append(
            f"| {stage.number} | {stage.title} | {stage.ability} | {links} | {len(own)} | {len(named)} | {minutes} |"
        )
    score = f"{checks} checks refuse {mutants} documented wrong answers, each with a message that names the mistake."
    return "\n".join([*rows, "", f"{score} Minutes: lesson + exercises."])
