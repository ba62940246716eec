"""What a learner calls in a notebook: check, hint, explain, plug_in, predict, quiz, progress. State: one small file."""

from __future__ import annotations

import contextlib
import functools
import html
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import checker, source
from .exercise import Exercise, all_stages, get_exercise, get_stage


class Progress:
    """exercises: {id: {passed, hints}}, predictions: {key: {guess, unit}}, in a JSON file.

    The file is MINILLM_PROGRESS, or progress.json in the cache folder. It is written whole or not at all; a file that
    cannot be read is set aside as *.broken and a new one begun.
    """

    def __init__(self) -> None:
        name = os.environ.get("MINILLM_PROGRESS")
        if name:
            self.path = Path(name)
        else:
            from ..hub import cache_dir

            self.path = Path(cache_dir()) / "progress.json"
        self.data: dict[str, dict[str, Any]] = {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or not all(isinstance(v, dict) for v in data.values()):
                raise ValueError("not the shape of a progress file")
            self.data = data
        except FileNotFoundError:
            pass
        except (ValueError, OSError):
            with contextlib.suppress(OSError):
                os.replace(self.path, self.path.with_name(self.path.name + ".broken"))
                print(f"The progress file could not be read. It is kept as {self.path.name}.broken; a new one begins.")

    def of(self, kind: str, key: str) -> dict[str, Any]:
        part = self.data.setdefault(kind, {})
        if not isinstance(part.get(key), dict):
            part[key] = {}
        entry: dict[str, Any] = part[key]
        return entry

    def save(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                json.dump(self.data, file, indent=1, sort_keys=True)
            os.replace(file.name, self.path)
        except OSError as error:
            print(f"Your progress could not be saved: {error.strerror}.")


def _strict() -> bool:
    return os.environ.get("MINILLM_STRICT") == "1"


def _say(markdown: str) -> None:
    """Formatted text in a notebook, plain text elsewhere."""
    try:
        from IPython import get_ipython
    except ImportError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        print(markdown)
        return
    from IPython.display import display

    display({"text/markdown": markdown, "text/plain": markdown}, raw=True)


def check(id: str, answer: Any) -> checker.CheckResult:
    """Check your answer to exercise `id`. Prints PASS, TODO or FAIL; with MINILLM_STRICT=1 the last two raise."""
    __tracebackhide__ = True  # IPython: in strict mode show the learner's cell, not this function
    ex = get_exercise(id)
    result = checker.run_check(ex, answer)
    if result.passed:
        state = Progress()
        if not state.of("exercises", id).get("passed"):
            state.of("exercises", id)["passed"] = True
            state.save()
    results = os.environ.get("MINILLM_RESULTS")
    if results:
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps([id, result.status, result.message]) + "\n")
    if _strict() and not result.passed:
        raise AssertionError(result.message)
    print(result.message)
    return result


def hint(id: str, number: int | None = None) -> None:
    """Show the next hint of exercise `id`, or hint `number` (1 to 3)."""
    ex = get_exercise(id)
    state = Progress()
    entry = state.of("exercises", id)
    used = entry.get("hints", 0)
    if number is None:
        number = min(used + 1, 3)
    if number not in (1, 2, 3):
        print("Each exercise has hints 1, 2 and 3.")
        return
    if number > used:
        entry["hints"] = number
        state.save()
    _say(f"**Hint {number} of 3.** {inspect.cleandoc(ex.hints[number - 1])}")
    if number == 3:
        print(f'That was the last hint. To read the reasons before you pass: explain("{id}", anyway=True)')


def explain(id: str, anyway: bool = False) -> None:
    """Why the answer is right and what else would be. After passing; `anyway=True` shows it before."""
    ex = get_exercise(id)
    if anyway or Progress().of("exercises", id).get("passed"):
        _say(inspect.cleandoc(ex.explanation))
    else:
        print(f'The explanation opens when check("{id}", ...) passes. To read it now: explain("{id}", anyway=True)')


@contextlib.contextmanager
def attempt() -> Iterator[None]:
    """For the scratch cell: an exercise that is not written yet is a line of text, not an error."""
    try:
        yield
    except NotImplementedError as error:
        print(f"(not written yet: {error})")


@contextlib.contextmanager
def swap(id: str, answer: Any) -> Iterator[None]:
    """Inside the block, the engine runs your code in place of its own. Afterwards its own is back, always."""
    owner, name = get_exercise(id).owner()
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, staticmethod(answer) if isinstance(before, staticmethod) else answer)
    try:
        yield
    finally:
        setattr(owner, name, before)


def plug_in(id: str, answer: Any) -> None:
    """Run the real engine on your code, once it passes its check, and compare with the engine's own."""
    ex = get_exercise(id)
    if not checker.run_check(ex, answer).passed:
        print(f'plug_in waits until check("{id}", {ex.name}) passes.')
        return
    if os.environ.get("MINILLM_RESULTS"):  # `minillm check` only collects results
        return
    try:
        if ex.plug_in is not None:
            ex.plug_in(answer, functools.partial(swap, id, answer))
        else:
            generate_both(ex, answer)
    except Exception as error:
        where = "".join(f"\n  {a}  {b}" for a, b in checker.Tester(answer, ex.name, 1.0)._line(error))
        text = f"plug_in {id}: the engine stopped on your code\n  raised  {type(error).__name__}: {error}{where}"
        if _strict():
            raise AssertionError(text) from error
        print(text)


def generate_both(ex: Exercise, answer: Any, prompt: str = "The capital of France is", max_tokens: int = 12) -> None:
    """Generate with the engine's own code and with the answer swapped in, print both, and compare the tokens."""
    own = _generate(prompt, max_tokens)
    counted, calls = answer, [0]
    if inspect.isfunction(answer):

        @functools.wraps(answer)
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return answer(*args, **kwargs)

    with swap(ex.id, counted):
        yours = _generate(prompt, max_tokens)
    own_label, your_label = "the engine's own", f"with your {ex.name}"
    width = max(len(own_label), len(your_label))
    print(f"{own_label:<{width}}  {own[1]}")
    print(f"{your_label:<{width}}  {yours[1]}")
    if counted is not answer:
        print(f"your code was called {calls[0]} times" if calls[0] else "your code was not needed in this run")
    print(f"tokens equal: {'yes' if own[0] == yours[0] else 'NO'}")
    if own[0] != yours[0]:
        raise AssertionError("the tokens differ")


def _generate(prompt: str, max_tokens: int) -> tuple[list[int], str]:
    from ..request import SamplingParams

    llm = make_llm()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    out = llm.generate(prompt if llm.tokenizer else [1, 2, 3, 4, 5], params)[0].outputs[0]
    return list(out.token_ids), prompt + out.text if llm.tokenizer else f"token ids {list(out.token_ids)}"


def make_llm(**options: Any) -> Any:
    """A new engine around the course's model, which is loaded once. Where it was not fetched: a tiny random model."""
    from ..llm import LLM

    return LLM.from_parts(*_parts(), **options)


@functools.lru_cache(maxsize=1)
def _parts() -> tuple[Any, Any, Any]:
    from .. import hub
    from ..config import ModelConfig
    from ..llm import LLM
    from ..model import Transformer
    from ..weights import random_state_dict

    name = "smollm2-135m"
    if (hub.cache_dir() / name / hub.KNOWN[name].filename).exists():
        llm = LLM(name, num_kv_blocks=4)
        return llm.config, llm.model, llm.tokenizer
    print("(the model is not here, so this runs on a tiny random one: `minillm fetch` gets the real one)")
    config = ModelConfig("llama", 97, 48, 96, 2, 6, 2, 8, max_position_embeddings=256)
    return config, Transformer.from_state(config, random_state_dict(config)), None


def predict(key: str, guess: float | None, unit: str = "", question: str = "") -> None:
    """Store your guess, before you measure. None prints an invitation: the question, or one made of key and unit."""
    state = Progress()
    if guess is None:
        of = f"{key} in {unit}" if unit else key
        print(f"{question or f'Your guess for {of}?'} Write a number in place of None and run this again.")
        return
    state.of("predictions", key).update(guess=float(guess), unit=unit)
    state.save()
    print(f"Noted: {float(guess):.4g} {unit}".rstrip() + ". Go on and measure.")


def compare(key: str, measured: float, unit: str = "") -> None:
    """Show the measurement beside your guess."""
    entry = Progress().data.get("predictions", {}).get(key, {})
    unit = unit or entry.get("unit", "")
    text = f"measured {measured:.4g} {unit}".rstrip()
    guess = entry.get("guess")
    if guess is None:
        print(f"{text} (you wrote no guess)")
        return
    low, high = sorted((abs(guess), abs(measured)))
    off = "the signs differ" if guess * measured < 0 else f"a factor of {high / low:.2f} apart" if low else "far apart"
    print(f"your guess {guess:.4g} {unit}".rstrip() + f", {text}: " + ("spot on" if guess == measured else off))


class _Quiz:
    def __init__(self, question: str, options: Sequence[str], answer: int, feedback: Sequence[str]) -> None:
        if len(options) != len(feedback) or not 0 <= answer < len(options):
            raise ValueError("quiz: give one feedback per option, and as answer the number of an option (from 0).")
        self.question, self.options, self.answer, self.feedback = question, list(options), answer, list(feedback)

    def verdict(self, i: int) -> str:
        return ("Right. " if i == self.answer else "Not quite. ") + self.feedback[i]

    def __repr__(self) -> str:
        rows = [f"  {chr(97 + i)}) {text}" for i, text in enumerate(self.options)]
        return "\n".join([self.question, *rows])

    def _html(self) -> str:
        rows = "".join(
            f"<details><summary>{html.escape(text)}</summary>{html.escape(self.verdict(i))}</details>"
            for i, text in enumerate(self.options)
        )
        return f"<b>{html.escape(self.question)}</b>{rows}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self._html()}
        try:
            import ipywidgets as widgets
        except ImportError:
            return bundle
        radio = widgets.RadioButtons(options=[(t, i) for i, t in enumerate(self.options)], value=None)
        radio.layout.width = "auto"
        said = widgets.HTML()
        radio.observe(lambda change: setattr(said, "value", html.escape(self.verdict(change["new"]))), names="value")
        box = widgets.VBox([widgets.HTML(f"<b>{html.escape(self.question)}</b>"), radio, said])
        self._keep = box  # else it is gone before it is shown
        live = box._repr_mimebundle_()
        live = live[0] if isinstance(live, tuple) else live
        view = "application/vnd.jupyter.widget-view+json"
        return {view: live[view], **bundle} if view in live else bundle


def quiz(question: str, options: Sequence[str], answer: int, feedback: Sequence[str]) -> _Quiz:
    """A quick question. answer: the number of the right option, from 0. Leave it as the last line of its cell."""
    return _Quiz(question, options, answer, feedback)


def progress(stage: str | None = None) -> None:
    """A table of what is done: of every stage, or of the exercises of one."""
    state = Progress().data.get("exercises", {})
    if stage is not None:
        for ex in get_stage(stage).exercises():
            entry = state.get(ex.id, {})
            hints = entry.get("hints", 0)
            done = "done" if entry.get("passed") else "open"
            print(f"{ex.id:<6}{done:<6}{ex.title}{f'  (hints used: {hints})' if hints else ''}")
        return
    print(f"{'stage':<34}{'done':<8}hints used")
    for s in all_stages().values():
        try:
            entries = [state.get(ex.id, {}) for ex in s.exercises()]
        except ModuleNotFoundError as error:  # Triton is for Linux only
            print(f"{s.number} {s.title:<31}needs the package {error.name}")
            continue
        done = f"{sum(bool(e.get('passed')) for e in entries)}/{len(entries)}" if s.package else "planned"
        print(f"{s.number} {s.title:<31}{done:<8}{sum(e.get('hints', 0) for e in entries) or ''}".rstrip())


def reset(id: str) -> None:
    """Forget that exercise `id` (or a whole stage, "02") was passed, and which hints were used."""
    ids = [id] if "." in id else [ex.id for ex in get_stage(id).exercises()]
    state = Progress()
    for each in ids:
        get_exercise(each)
        state.data.get("exercises", {}).pop(each, None)
    state.save()
    print(f"Reset: {', '.join(ids)}. Your notebook is as you left it; `git checkout exercises/` restores the stubs.")


def show_source(obj: Callable[..., Any] | type) -> None:
    """Show the engine's own code. What you write yourself in an exercise is left out."""
    where = f"{obj.__module__.replace('.', '/')}.py"
    code = source.blank(source.get_code(obj), None, "...  # you write this in exercise {id}")
    _say(f"`{where}`\n```python\n{code}\n```")
