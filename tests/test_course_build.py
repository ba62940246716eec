"""The committed notebooks are what their sources say, hold no answers, and give the engine's signatures."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from minillm.course import build, checker, learn, source
from minillm.course.exercise import all_stages

ROOT = Path(__file__).parent.parent
STAGES = [stage for stage in all_stages().values() if stage.package]
EXERCISES = [ex for stage in STAGES for ex in stage.exercises()]
ENGINE = [p for p in (ROOT / "minillm").rglob("*.py") if "course" not in p.parts]


def stage_id(stage):
    return stage.number


def exercise_id(ex):
    return ex.id


@pytest.mark.parametrize("stage", STAGES, ids=stage_id)
def test_committed_notebooks_match_their_sources(stage):
    assert build.build([stage.number], check=True, root=ROOT) == [], "run: minillm build " + stage.number


def test_no_notebook_without_a_stage():
    for kind in build.KINDS:
        assert {p.name for p in (ROOT / kind).glob("*.ipynb")} == {stage.file_name for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES, ids=stage_id)
def test_the_exercise_notebook_does_not_hold_the_answers(stage):
    assert build.leaks(stage) == []


@pytest.mark.parametrize("stage", STAGES, ids=stage_id)
def test_a_stage_is_complete(stage):
    assert 3 <= len(stage.exercises()) <= 8 and 10 <= stage.minutes <= 45
    cells = build.lesson(stage).cells
    text = "\n".join(c.source for c in cells)
    assert 20 <= len(cells) <= 50, len(cells)
    assert cells[0].source.startswith(f"# {stage.number} ")
    assert text.count("quiz(") >= 3 and "predict(" in text and "compare(" in text and "show_source(" in text
    assert re.search(r"\b(stepper|slider_plot|Stepper)\(", text), "a lesson has a widget"
    assert f"exercises/{stage.file_name}" in text, "a lesson leads to its exercises"
    for word in ("get wrong", "vLLM", "SGLang", "llama.cpp"):
        assert word in text


@pytest.mark.parametrize("stage", STAGES, ids=stage_id)
def test_lessons_show_a_picture_where_there_is_a_widget(stage):
    notebook = nbformat.read(ROOT / "notebooks" / stage.file_name, as_version=4)
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    widgets = [o for o in outputs if re.match(r"<(Stepper|SliderPlot) ", o.get("data", {}).get("text/plain", ""))]
    assert widgets and all("image/png" in o.data for o in widgets)
    assert not any("widget-view" in key for o in outputs for key in o.get("data", {}))


@pytest.mark.parametrize("ex", EXERCISES, ids=exercise_id)
def test_stub_has_the_engines_signature_and_nothing_more(ex):
    if ":" not in ex.symbol:
        stub = run(source.stub_code(ex))[ex.name]
        assert callable(stub) or checker._unanswered(stub)  # a function says so when it is called, see the next test
        return
    stub, solution = (ast.parse(text(ex)) for text in (source.stub_code, source.solution_code))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [[n.name for n in ast.walk(tree) if isinstance(n, kinds)] for tree in (stub, solution)]
    assert set(names[0]) <= set(names[1]) and names[0][0] == ex.name
    for node in ast.walk(stub):
        if isinstance(node, ast.FunctionDef):
            twin = next(n for n in ast.walk(solution) if isinstance(n, ast.FunctionDef) and n.name == node.name)
            assert ast.dump(node.args) == ast.dump(twin.args) and ast.get_docstring(node) == ast.get_docstring(twin)
            assert ast.unparse(node.returns or ast.Constant(0)) == ast.unparse(twin.returns or ast.Constant(0))
    assert ast.get_docstring(stub.body[0]), "a stub says what is wanted"
    assert 1 <= len(source.solution_lines(ex)) <= 30


@pytest.mark.parametrize("ex", EXERCISES, ids=exercise_id)
def test_stub_is_todo_solution_passes_and_strict_fails(ex, monkeypatch):
    monkeypatch.delenv("MINILLM_STRICT", raising=False)
    setup = "\n".join(source.imports_for(ex))
    stub, solution = (run(f"{setup}\n{text(ex)}")[ex.name] for text in (source.stub_code, source.solution_code))
    assert learn.check(ex.id, stub).status == "TODO"
    assert learn.check(ex.id, solution).passed, "as a notebook defines it, without MINILLM_ALLOW_REF"
    monkeypatch.setenv("MINILLM_STRICT", "1")
    with pytest.raises(AssertionError):
        learn.check(ex.id, stub)


def run(code):
    space = {"__name__": "__main__"}
    exec(compile(code, "<cell>", "exec"), space)
    return space


def test_every_marker_has_an_exercise_and_the_other_way_round():
    marked = {id for path in ENGINE for id, _, _ in source.regions(path.read_text(encoding="utf-8"))}
    written = {stage.number for stage in STAGES}
    declared = {ex.id for ex in EXERCISES if ":" in ex.symbol}
    in_engine = {ex.id for ex in EXERCISES if ":" in ex.symbol and ".course." not in ex.symbol}
    assert {id for id in marked if id[:2] in written} == in_engine <= declared


@pytest.mark.parametrize("ex", EXERCISES, ids=exercise_id)
def test_hints_lead_on(ex):
    assert len({h.strip() for h in ex.hints}) == 3 and all(len(h.strip()) > 15 for h in ex.hints)
    assert re.search(r"vLLM|SGLang|llama\.cpp", ex.explanation), "what is it called elsewhere?"
