"""Every check of every stage: refuses each of its wrong answers with that answer's own message, accepts right ones."""

import pytest

from minillm.course import learn, source
from minillm.course.exercise import Exercise, Mutant, all_stages

EXERCISES = [ex for stage in all_stages().values() for ex in stage.exercises()]
MUTANTS = [(ex, mutant) for ex in EXERCISES for mutant in ex.mutants]


def id_of(value: object) -> str | None:
    return {Exercise: lambda: value.id, Mutant: lambda: value.name}.get(type(value), lambda: None)()


@pytest.fixture(autouse=True)
def course_as_tests_need_it(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setenv("MINILLM_ALLOW_REF", "1")  # mutants and references are minillm's own code
    monkeypatch.delenv("MINILLM_STRICT", raising=False)


def test_there_is_something_to_test():
    assert EXERCISES and len(MUTANTS) >= 3 * len(EXERCISES)


@pytest.mark.parametrize(("ex", "mutant"), MUTANTS, ids=id_of)
def test_a_wrong_answer_is_refused_with_its_own_message(ex, mutant):
    result = learn.check(ex.id, mutant.obj)
    assert result.status == "FAIL", f"{ex.id}: the check accepts the wrong answer {mutant.name!r}"
    assert result.mistake == mutant.name, f"{ex.id}: {mutant.name!r} is taken for {result.mistake!r}:\n{result.message}"
    assert mutant.message in result.message and f'hint("{ex.id}")' in result.message
    assert learn.check(ex.id, mutant.obj).message == result.message, "the text is not the same the second time"


@pytest.mark.parametrize("ex", EXERCISES, ids=id_of)
def test_right_answers_pass(ex):
    for what, answer in (("the engine's own", ex.reference()), ("the variant", ex.variant)):
        result = learn.check(ex.id, answer)
        assert result.passed, f"{what}:\n{result.message}"
    if callable(ex.variant):
        assert source.inspect.unwrap(ex.variant) is not source.inspect.unwrap(ex.reference())


@pytest.mark.parametrize("ex", EXERCISES, ids=id_of)
def test_the_engines_own_code_and_unwritten_code_do_not_pass(ex, monkeypatch):
    monkeypatch.delenv("MINILLM_ALLOW_REF")
    if callable(ex.reference()):
        assert learn.check(ex.id, ex.reference()).status == "REFUSED"
    assert learn.check(ex.id, None).status == "TODO"


@pytest.mark.parametrize("ex", EXERCISES, ids=id_of)
def test_wrong_answers_say_where_they_were_seen(ex):
    assert len({m.message for m in ex.mutants}) == len(ex.mutants)
    assert all(m.seen.strip() and len(m.message) >= 15 for m in ex.mutants)
