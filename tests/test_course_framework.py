"""The course's framework on a toy stage: what a learner can do wrong, and what check, hint and plug_in say."""

import json
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from toy_course import toy

from minillm.course import build, checker, commands, learn, source
from minillm.course.exercise import Exercise, Mutant, all_stages, get_exercise, get_stage

__all__ = ["toy"]


def ceil_div(a, b):
    return -(-a // b)


@pytest.fixture
def answer_file(tmp_path):
    """Write a learner's answer as a file of its own, as a notebook cell is, and return what it defines."""

    def write(code, name):
        path = tmp_path / "cell.py"
        path.write_text(code)
        space = {"__name__": "__main__"}
        exec(compile(code, str(path), "exec"), space)
        return space[name]

    return write


# ---- PASS, TODO, FAIL


def test_pass_is_one_line(toy, capsys):
    result = learn.check("90.1", ceil_div)
    assert result.passed and result.status == "PASS" and result.cases == 4
    assert capsys.readouterr().out == "PASS 90.1 pages_needed (4 cases)\n"


def test_unwritten_is_todo(toy, capsys):
    def stub(num_items, page_size):
        raise NotImplementedError("exercise 90.1")

    for id, answer in (("90.1", stub), ("90.1", None), ("90.4", {"a": None, "b": None}), ("90.4", ...)):
        result = learn.check(id, answer)
        assert result.status == "TODO" and not result.passed
        assert capsys.readouterr().out == f'TODO {id} not attempted yet: hint("{id}")\n'
    assert learn.check("90.4", {"a": None, "b": False}).status == "TODO"
    assert capsys.readouterr().out == 'TODO 90.4 1 of 2 given; still None: a. hint("90.4")\n'


def test_wrong_answer_shows_call_got_expected_cause_and_next_hint(toy, capsys):
    result = learn.check("90.1", lambda n, size: n // size)
    assert result.mistake == "floor"
    assert capsys.readouterr().out == (
        "FAIL 90.1 pages_needed (case 1)\n"
        "  call      pages_needed(9, 4)\n"
        "  case      one item more than two full pages\n"
        "  got       2\n"
        "  expected  3\n"
        "  likely    You round down: the last, partial page is lost.\n"
        '  next      hint("90.1")\n'
    )


def test_unknown_mistake_gets_no_invented_cause(toy, capsys):
    result = learn.check("90.1", lambda n, size: 77)
    assert result.mistake is None and "likely" not in capsys.readouterr().out


def test_the_same_answer_gives_the_same_text(toy, capsys):
    for wrong in (lambda n, size: object(), lambda n, size: torch.rand(3), lambda n, size: random.random()):
        first = learn.check("90.1", wrong).message
        assert learn.check("90.1", wrong).message == first and " at 0x" not in first


def test_a_forgotten_return_is_named(toy):
    def forgets(num_items, page_size):
        ceil_div(num_items, page_size)

    assert "is a `return` missing?" in learn.check("90.1", forgets).message


def test_the_call_instead_of_the_function(toy):
    result = learn.check("90.1", ceil_div(9, 4))
    assert result.status == "FAIL" and 'check("90.1", pages_needed)' in result.message


def test_exception_shows_the_learners_last_line_and_no_frames(toy, answer_file):
    pages_needed = answer_file("def pages_needed(n, size):\n    rest = n / 0\n    return rest\n", "pages_needed")
    result = learn.check("90.1", pages_needed)
    assert "  raised    ZeroDivisionError: division by zero\n" in result.message
    assert "  your line rest = n / 0   (line 2)\n" in result.message.replace("your line    ", "your line ")
    assert "checker.py" not in result.message and "Traceback" not in result.message


def test_wrong_signature(toy):
    assert "TypeError" in learn.check("90.1", lambda n: n).message


def test_infinite_loop_is_stopped(toy, monkeypatch):
    monkeypatch.setattr(checker, "LIMIT_S", 0.3)

    def loops(n, size):
        while True:
            pass

    def loops_and_swallows(n, size):
        while True:
            try:
                while True:
                    pass
            except Exception:
                pass

    start = time.perf_counter()
    for wrong in (loops, loops_and_swallows):
        assert "still running after 0.3 s" in learn.check("90.1", wrong).message
    assert time.perf_counter() - start < 30  # it ended at all; not a speed test


def test_a_slow_machine_gets_time_to_name_the_mistake(toy):
    def slow(n, size):
        time.sleep(1.05)  # more than the second that a call has at least
        return n // size

    assert learn.check("90.1", slow).mistake == "floor"


def test_a_bare_except_does_not_keep_the_loop_alive():
    tries = [0]
    with pytest.raises(checker.Timeout), checker.time_limit(0.1):
        while True:
            try:
                while True:
                    pass
            except:  # noqa: E722
                tries[0] += 1
                if tries[0] > 1:
                    raise
    assert tries[0] == 2


def test_endless_recursion(toy):
    def again(n, size):
        return again(n, size)

    assert "RecursionError: the function calls itself and never stops" in learn.check("90.1", again).message


def test_inputs_must_not_be_modified(toy):
    result = learn.check("90.2", lambda x, factors: x.mul_(factors[:, None]))
    assert "argument x was tensor(" in result.message and result.mistake == "in_place"


def test_the_cost_limit_counts_new_memory_only():
    x = torch.ones(4, 1)
    with checker.largest_tensor() as peak:
        x.expand(4, 1000).transpose(0, 1)
    assert peak == [0]
    with checker.largest_tensor() as peak:
        x.expand(4, 1000).contiguous()
    assert peak == [4000]


def test_random_states_are_put_back(toy):
    def noisy(n, size):
        torch.manual_seed(5)
        return -(-n // size) + 0 * int(torch.rand(1) + np.random.rand() + random.random())

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    want = torch.rand(2).tolist(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert learn.check("90.1", noisy).passed
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == want


def test_the_packages_own_code_is_refused(toy, monkeypatch):
    import functools

    engine = source.importlib.import_module("minillm.course.stages.s90_toy.engine")
    for own in (
        engine.pages_needed,
        functools.partial(engine.pages_needed),
        functools.wraps(engine.pages_needed)(lambda n, size: 3),
    ):
        result = learn.check("90.1", own)
        assert result.status == "REFUSED" and not result.passed and "minillm's own code" in result.message
    monkeypatch.setenv("MINILLM_ALLOW_REF", "1")
    assert learn.check("90.1", engine.pages_needed).passed


def test_strict_mode_raises_on_todo_fail_and_refusal(toy, monkeypatch):
    monkeypatch.setenv("MINILLM_STRICT", "1")
    assert learn.check("90.1", ceil_div).passed
    for wrong in (None, lambda n, size: 0, get_exercise("90.1").reference()):
        with pytest.raises(AssertionError, match=r"90\.1"):
            learn.check("90.1", wrong)


def test_every_mutant_is_refused_with_its_own_message(toy, monkeypatch):
    monkeypatch.setenv("MINILLM_ALLOW_REF", "1")
    for ex in toy.exercises():
        assert learn.check(ex.id, ex.variant).passed and learn.check(ex.id, ex.reference()).passed
        for mutant in ex.mutants:
            result = learn.check(ex.id, mutant.obj)
            assert (result.status, result.mistake) == ("FAIL", mutant.name)
            assert mutant.message in result.message


def test_a_check_that_looks_at_nothing_is_an_error(toy):
    ex = get_exercise("90.1")
    empty = Exercise(**{**{k: getattr(ex, k) for k in ex.__dataclass_fields__}, "check": lambda t, answer: None})
    with pytest.raises(ValueError, match="looked at nothing"):
        checker.run_check(empty, ceil_div)


# ---- the tester's own methods


def outcome(check, answer=ceil_div):
    t = checker.Tester(answer, "f", 5.0, trace=True)
    check(t)
    return [kind for kind, _ in t.outcomes], t.failure


def test_raises():
    def refuses(x):
        raise ValueError("must be positive")

    assert outcome(lambda t: t.raises(ValueError, refuses, 1, match="positive"))[0] == ["ok"]
    assert outcome(lambda t: t.raises(ValueError, refuses, 1, match="even"))[0] == ["raised"]
    assert outcome(lambda t: t.raises(KeyError, refuses, 1))[0] == ["raised"]
    assert outcome(lambda t: t.raises(ValueError, abs, 1))[0] == ["not raised"]


def test_in_place_functions():
    def fill(x, value):
        x.fill_(value)

    want = torch.full((2,), 7.0)
    assert outcome(lambda t: t.case(fill, torch.zeros(2), 7, expected=None, after={0: want}))[0] == ["ok"]
    assert outcome(lambda t: t.case(fill, torch.zeros(2), 8, expected=None, after={0: want}))[0] == ["value"]
    assert outcome(lambda t: t.case(fill, torch.zeros(2), 7, expected=None))[0] == ["modified"]


def test_unchanged_sees_inside_objects():
    class Box:
        def __init__(self):
            self.inner = {"x": [torch.zeros(2)]}

    box = Box()

    def touch(t):
        with t.unchanged(box, what="the box"):
            box.inner["x"][0][1] = 1

    assert outcome(touch)[0] == ["modified"]


@pytest.mark.parametrize(
    ("got", "want", "text"),
    [
        (True, 1, "type is bool"),
        (3.0, 3, "type is float"),
        (1, 1.0, None),
        (np.int64(3), 3, None),
        (0.1 + 0.2, 0.3, None),
        (0.3001, 0.3, "value"),
        (float("nan"), float("nan"), None),
        ((1, 2), [1, 2], "type is tuple"),
        ([1, 2, 3], [1, 2], "3 elements, not 2"),
        ([1, [2, 5]], [1, [2, 4]], "element 1: element 1: the value differs"),
        ({"a": 1}, {"b": 1}, "key 'a' is not expected"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shape is [2, 3], not [3, 2]"),
        (torch.zeros(2, dtype=torch.float64), torch.zeros(2), "dtype"),
        (torch.tensor([1.0, 1.0001]), torch.ones(2), "element [1]"),
        (torch.tensor([1.0, 1.000001]), torch.ones(2), None),
        (torch.tensor([1.0, 1.01]).bfloat16(), torch.ones(2).bfloat16(), None),
        (torch.empty(0), torch.zeros(2), "shape is [0]"),
        (torch.tensor(3), 3, "type is tensor, not int"),
        (torch.tensor(float("nan")), torch.tensor(1.0), "it is nan"),
    ],
)  # fmt: skip
def test_difference(got, want, text):
    found = checker.difference(got, want)
    assert found is None if text is None else text in found


# ---- hint, explain, progress, predict, quiz


def test_hints_come_one_at_a_time_and_are_remembered(toy, capsys):
    for expected in ("Hint 1 of 3.** Draw it.", "Hint 2 of 3.** The last", "Hint 3 of 3", "Hint 3 of 3"):
        learn.hint("90.1")
        out = capsys.readouterr().out
        assert expected in out and ("3 of 3" in out) == ('explain("90.1", anyway=True)' in out)
    learn.hint("90.2", 2)
    assert "Broadcast." in capsys.readouterr().out
    learn.progress("90")
    assert "90.1  open  Pages  (hints used: 3)" in capsys.readouterr().out
    learn.progress()
    out = capsys.readouterr().out
    assert "90 Toy                            0/4     5" in out and "19 Bug museum" in out


def test_explain_opens_after_passing(toy, capsys):
    learn.explain("90.1")
    assert "opens when" in capsys.readouterr().out
    learn.explain("90.1", anyway=True)
    assert "cdiv" in capsys.readouterr().out
    learn.check("90.1", ceil_div)
    capsys.readouterr()
    learn.explain("90.1")
    assert "cdiv" in capsys.readouterr().out
    learn.reset("90")
    learn.explain("90.1")
    assert "opens when" in capsys.readouterr().out


def test_a_corrupt_progress_file_is_set_aside(toy, tmp_path, capsys):
    for broken in ("{", "[1]", '{"exercises": 3}', "\x00\xff"):
        (tmp_path / "progress.json").write_text(broken)
        assert learn.check("90.1", ceil_div).passed
        assert (tmp_path / "progress.json.broken").read_text() == broken
        assert json.loads((tmp_path / "progress.json").read_text()) == {"exercises": {"90.1": {"passed": True}}}
    assert "could not be read" in capsys.readouterr().out


def test_progress_that_cannot_be_saved_is_no_crash(toy, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "file" / "progress.json"))
    assert learn.check("90.1", ceil_div).passed
    assert "could not be saved" in capsys.readouterr().out


def test_predict_and_compare(toy, capsys):
    learn.predict("speed", None, "tokens/s")
    learn.predict("speed", None, "tokens/s", "How fast?")
    learn.compare("speed", 50.0)
    learn.predict("speed", 100, "tokens/s")
    learn.compare("speed", 50.0)
    assert capsys.readouterr().out.splitlines() == [
        "Your guess for speed in tokens/s? Write a number in place of None and run this again.",
        "How fast? Write a number in place of None and run this again.",
        "measured 50 (you wrote no guess)",
        "Noted: 100 tokens/s. Go on and measure.",
        "your guess 100 tokens/s, measured 50 tokens/s: a factor of 2.00 apart",
    ]


def test_quiz_reads_as_text_and_answers_live(toy):
    quiz = learn.quiz("Two?", ["yes", "<no>"], 0, ["1 + 1.", "Count again."])
    bundle = quiz._repr_mimebundle_()
    assert bundle["text/plain"] == "Two?\n  a) yes\n  b) <no>" and "&lt;no&gt;" in bundle["text/html"]
    _, radio, said = quiz._keep.children
    radio.index = 1
    assert said.value == "Not quite. Count again."
    with pytest.raises(ValueError, match="one feedback per option"):
        learn.quiz("Two?", ["yes", "no"], 0, ["1 + 1."])


def test_unknown_ids_name_the_known_ones(toy):
    with pytest.raises(ValueError, match=r"90\.1, 90\.2"):
        learn.check("90.9", ceil_div)
    with pytest.raises(ValueError, match=r"Stages written so far: .*90"):
        learn.hint("77.1")


def test_importing_the_course_loads_no_stage():
    code = "import sys, minillm.course; print([m for m in sys.modules if '.stages.s' in m or m == 'matplotlib'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# ---- plug_in


def test_plug_in_runs_the_engine_on_the_learners_code_and_puts_its_own_back(toy, capsys):
    ex = get_exercise("90.1")
    owner, name = ex.owner()
    own = getattr(owner, name)
    calls = []

    def mine(n, size):
        calls.append(n)
        return ceil_div(n, size)

    learn.plug_in("90.1", mine)
    assert capsys.readouterr().out == "total pages with your code: 5\n" and calls[-2:] == [9, 8]
    learn.plug_in("90.1", lambda n, size: 0)
    assert "waits until" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt), learn.swap("90.1", mine):
        assert getattr(owner, name) is mine
        raise KeyboardInterrupt
    assert getattr(owner, name) is own


def test_plug_in_survives_code_that_breaks_the_engine(toy, answer_file, capsys, monkeypatch):
    code = "later = False\ndef pages_needed(n, size):\n    if later: raise KeyError('lost')\n    return -(-n // size)\n"
    breaks = answer_file(code, "pages_needed")
    ex = get_exercise("90.1")
    own = ex.reference()
    plug = ex.plug_in

    def broken(answer, swap):
        answer.__globals__["later"] = True
        try:
            plug(answer, swap)
        finally:
            answer.__globals__["later"] = False

    object.__setattr__(ex, "plug_in", broken)
    try:
        learn.plug_in("90.1", breaks)
        out = capsys.readouterr().out
        assert "raised  KeyError: 'lost'" in out and "if later: raise KeyError('lost')   (line 3)" in out
        assert ex.reference() is own
        monkeypatch.setenv("MINILLM_STRICT", "1")
        with pytest.raises(AssertionError, match="lost"):
            learn.plug_in("90.1", breaks)
    finally:
        object.__setattr__(ex, "plug_in", plug)


def test_default_plug_in_compares_tokens_of_the_real_engine(toy, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))  # no model there: a tiny random one
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))
    learn._parts.cache_clear()
    learn.plug_in("90.2", lambda x, factors: (x.T * factors).T)
    out = capsys.readouterr().out
    assert "tiny random one" in out and "your code was not needed in this run" in out and "tokens equal: yes" in out
    learn._parts.cache_clear()


# ---- source and declaration


def test_stub_and_solution_come_from_the_marked_source(toy):
    shelf = get_exercise("90.3")
    stub = source.stub_code(shelf)
    assert stub.count('raise NotImplementedError("exercise 90.3")') == 2 and "pop" not in stub
    assert "# exercise" not in source.solution_code(shelf) and "pop(0)" in source.solution_code(shelf)
    assert source.imports_for(shelf)[0] == "from dataclasses import dataclass"
    with pytest.raises(ValueError, match="do not pair up"):
        source.regions("# end exercise 01.1")
    with pytest.raises(ValueError, match="no end marker"):
        source.regions("# exercise 01.1\npass")


def test_show_source_leaves_out_what_the_learner_writes(toy, capsys):
    learn.show_source(get_exercise("90.1").reference())
    out = capsys.readouterr().out
    assert "you write this in exercise 90.1" in out and "math.ceil" not in out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hints": ("a", "b")}, "three hints"),
        ({"hints": ("a", "b", " ")}, "three hints"),
        ({"mutants": ()}, "three mutants"),
        ({"id": "1"}, "is not like"),
        ({"symbol": "x"}, "bare name with stub"),
        ({"explanation": " "}, "explanation is empty"),
        ({"difficulty": 4}, "difficulty"),
    ],
)  # fmt: skip
def test_a_bad_declaration_is_refused(toy, change, text):
    ex = get_exercise("90.1")
    with pytest.raises(ValueError, match=text):
        Exercise(**{**{k: getattr(ex, k) for k in ex.__dataclass_fields__}, **change})


def test_a_leak_is_found(toy, monkeypatch):
    assert build.leaks(toy) == []
    ex = get_exercise("90.1")
    object.__setattr__(ex, "hints", ("a", "b", "Write `return math.ceil(num_items / page_size)`."))
    try:
        assert "return math.ceil(num_items / page_size)" in build.leaks(toy)[0]
    finally:
        object.__setattr__(ex, "hints", ("Draw it.", "The last page may be half empty.", "Divide and round up."))


def test_stages_in_order_and_planned_ones_listed(toy):
    stages = all_stages()
    assert list(stages) == sorted(stages) and stages["90"].title == "Toy" and len(stages) == 21
    table = build.table()
    assert "| 90 | Toy |" in table and "[lesson](notebooks/90_toy.ipynb)" in table
    assert build.with_table("a\n<!-- stages -->\nold\n<!-- stages -->\nb").startswith("a\n<!-- stages -->\n| |")
    with pytest.raises(ValueError, match="two lines"):
        build.with_table("nothing")


# ---- building and running the notebooks


def test_build_check_and_the_check_command(toy, tmp_path, monkeypatch):
    """One long test, because starting kernels is slow: build, check, answer as a learner, run the command, spoil."""
    import nbformat
    from click.testing import CliRunner

    (tmp_path / "README.md").write_text("<!-- stages -->\n<!-- stages -->\n")
    (tmp_path / "exercises").mkdir()
    assert build.build(["90"], root=tmp_path, say=lambda text: None) == []
    assert build.build(["90"], check=True, root=tmp_path) == []
    texts = {kind: (tmp_path / kind / "90_toy.ipynb").read_text() for kind in build.KINDS}
    assert "widget-view" not in texts["notebooks"] and "iopub" not in texts["notebooks"]
    solved = nbformat.reads(texts["solutions"], as_version=4)
    said = [o.text for c in solved.cells if "check" in c.metadata.get("tags", []) for o in c.outputs]
    assert said == [
        "PASS 90.1 pages_needed (4 cases)\n", "PASS 90.2 scale_rows (1 case)\n",
        "PASS 90.3 Shelf (5 cases)\n", "PASS 90.4 verdicts (2 cases)\n",
    ]  # fmt: skip

    # a learner: one right, one wrong, one untouched, one cell deleted
    mine = nbformat.reads(texts["exercises"], as_version=4)
    cells = {c.source: c for c in mine.cells}
    answers = [c for c in mine.cells if "answer" in c.metadata.get("tags", [])]
    answers[0].source = "def pages_needed(n, size):\n    return -(-n // size)"
    answers[1].source = "def scale_rows(x, factors):\n    return x * factors[: x.shape[1]]"
    mine.cells.remove(cells['check("90.4", verdicts)'])
    nbformat.write(mine, tmp_path / "exercises" / "90_toy.ipynb")
    (tmp_path / "exercises" / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "exercises" / "deep")
    result = CliRunner().invoke(commands.check, ["90"])
    assert result.exit_code == 1 and result.output.splitlines() == [
        "PASS 90.1 pages_needed (4 cases)",
        "FAIL 90.2 scale_rows (case 1): You scaled columns, not rows.",
        'TODO 90.3 not attempted yet: hint("90.3")',
        "NOT RUN 90.4 verdicts: its check cell is missing or stopped",
    ]
    problems = build.build(["90"], check=True, root=tmp_path)
    assert [p for p in problems if "exercises/90_toy.ipynb: it differs from its source" in p]

    # spoiled in other ways
    lesson = nbformat.reads(texts["notebooks"], as_version=4)
    lesson.metadata["widgets"] = {"state": 1}
    code = [c for c in lesson.cells if c.cell_type == "code"]
    code[0].execution_count = None
    code[1].outputs = [nbformat.v4.new_output("error", ename="E", evalue="x", traceback=[])]
    nbformat.write(lesson, tmp_path / "notebooks" / "90_toy.ipynb")
    found = build.problems(tmp_path / "notebooks" / "90_toy.ipynb", build.lesson(toy))
    assert [text.split()[-1] for text in found] == ["source", "run", "error"] or len(found) == 3


def test_the_commands_refuse_what_is_unknown(toy, tmp_path, monkeypatch):
    from click.testing import CliRunner

    for command, args in ((commands.hint, ["90.9"]), (commands.check, ["x"]), (commands.reset, ["90.x"])):
        result = CliRunner().invoke(command, args)
        assert result.exit_code == 2 and "Traceback" not in result.output and "There is no" in result.output
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(commands.check, ["90"]).exit_code == 2
    assert CliRunner().invoke(commands.hint, ["90.1", "3"]).output.startswith("**Hint 3 of 3.**")


def test_mutants_need_distinct_names(toy):
    ex = get_exercise("90.1")
    twice = (Mutant("a", 1, "m", "s"),) * 3
    with pytest.raises(ValueError, match="different names"):
        Exercise(**{**{k: getattr(ex, k) for k in ex.__dataclass_fields__}, "mutants": twice})
    assert get_stage("90").minutes == 1
