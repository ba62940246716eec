"""Runs an exercise's check on an answer and says, in a few fixed lines, what is wrong and why that is likely."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import linecache
import numbers
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .exercise import Exercise

PACKAGE = str(Path(__file__).resolve().parent.parent)
LIMIT_S = float(os.environ.get("MINILLM_CHECK_TIMEOUT", "10"))
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


class Timeout(BaseException):
    """Raised inside the learner's code when it runs too long. BaseException: `except Exception` must not swallow it."""


class _Stop(Exception):
    """The check ends here: the first failure is known."""


class _Todo(Exception):
    """The answer is still the stub."""


@dataclasses.dataclass
class Failure:
    kind: str  # "value", "raised", "modified", "cost", "timeout", "property"
    call: str
    value: Any  # what a mutant must give too, to be called the likely cause
    lines: list[tuple[str, str]]  # what is printed: (label, text)
    note: str = ""
    case: int = 0


@dataclasses.dataclass
class CheckResult:
    """What `check` returns. status: "PASS", "TODO", "FAIL" or "REFUSED"; mistake: the name of the mutant recognised."""

    id: str
    status: str
    message: str
    mistake: str | None = None
    cases: int = 0

    @property
    def passed(self) -> bool:
        return self.status == "PASS"

    def __repr__(self) -> str:
        return f"<{self.status} {self.id}>"

    def _ipython_display_(self) -> None:
        """Show nothing in a notebook: check() has printed already."""


# ---- showing and comparing values


def show(value: Any, limit: int = 160) -> str:
    """A short text for a value: no memory addresses, big tensors by their shape."""
    if _is_tensor(value) and value.numel() > 24:
        text = f"tensor of shape {list(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    elif _is_tensor(value):
        text = f"tensor({_numbers(value.tolist())})" + (f" of shape {list(value.shape)}" if value.numel() == 0 else "")
    elif isinstance(value, float):
        text = f"{value:.10g}"
        text += ".0" * text.lstrip("-").isdigit()
    elif type(value) in (list, tuple):
        inner = ", ".join(show(v, limit) for v in value)
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    elif type(value) is dict:
        text = "{" + ", ".join(f"{show(k)}: {show(v, limit)}" for k, v in value.items()) + "}"
    elif inspect.isroutine(value) or inspect.isclass(value):
        text = value.__name__
    else:
        text = re.sub(r"<(?:[\w.<>]+\.)?(\w+) object at 0x[0-9a-f]+>", r"\1", repr(value))
        text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_numbers, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and hasattr(value, "untyped_storage")


def _kind(value: Any) -> str:
    return "tensor" if _is_tensor(value) else type(value).__name__


def difference(got: Any, want: Any, tol: float | None = None) -> str | None:
    """None if equal; else one sentence that says where `got` differs. tol: absolute and relative; None: by dtype."""
    if _is_tensor(want):
        return _tensor_difference(got, want, tol)
    if isinstance(want, int) and not isinstance(want, bool):
        right_type = isinstance(got, numbers.Integral) and not isinstance(got, bool)
    elif isinstance(want, float):
        right_type = isinstance(got, numbers.Real) and not isinstance(got, bool)
    else:
        right_type = isinstance(got, type(want))
    if not right_type:
        return f"the type is {_kind(got)}, not {_kind(want)}"
    if isinstance(want, float) or (tol is not None and isinstance(want, int)):
        got, want, tol = float(got), float(want), 1e-9 if tol is None else tol
        same = got == want or (got != got and want != want) or abs(got - want) <= tol * max(1.0, abs(want))
        return None if same else "the value differs"
    if isinstance(want, list | tuple):
        if len(got) != len(want):
            return f"it has {len(got)} elements, not {len(want)}"
        return _first((f"element {i}", difference(g, w, tol)) for i, (g, w) in enumerate(zip(got, want, strict=True)))
    if isinstance(want, dict):
        if got.keys() != want.keys():
            odd = sorted(got.keys() ^ want.keys(), key=str)[0]
            return f"the key {show(odd)} is {'missing' if odd in want else 'not expected'}"
        return _first((f"key {show(k)}", difference(got[k], want[k], tol)) for k in want)
    if dataclasses.is_dataclass(want) and not isinstance(want, type):
        names = [f.name for f in dataclasses.fields(want)]
        return _first((name, difference(getattr(got, name), getattr(want, name), tol)) for name in names)
    if type(want).__module__ == "numpy":
        import torch

        return difference(torch.as_tensor(got), torch.as_tensor(want), tol)
    return None if got == want else "the value differs"


def _first(parts: Iterator[tuple[str, str | None]]) -> str | None:
    return next((f"{where}: {text}" for where, text in parts if text), None)


def _tensor_difference(got: Any, want: Any, tol: float | None) -> str | None:
    import torch

    if not _is_tensor(got):
        return f"the type is {_kind(got)}, not tensor"
    if got.shape != want.shape:
        return f"the shape is {list(got.shape)}, not {list(want.shape)}"
    if got.dtype != want.dtype:
        return f"the dtype is {got.dtype}, not {want.dtype}"
    if tol is None:
        tol = TOLERANCE.get(str(want.dtype).removeprefix("torch."), 0.0)
    a, b = got.detach().cpu().double(), want.detach().cpu().double()
    bad = ~torch.isclose(a, b, rtol=tol, atol=tol / 10, equal_nan=True)
    if not bad.any():
        return None
    where = bad.nonzero()[0].tolist()
    at = f"element {where}" if where else "it"
    return (
        f"{at} is {_numbers(a[tuple(where)].item())}, not {_numbers(b[tuple(where)].item())} "
        f"({int(bad.sum())} of {bad.numel()} differ)"
    )


def frozen(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """A copy that can be compared later, to see whether `value` was changed."""
    if _is_tensor(value):
        return value.detach().clone()
    if id(value) in seen:
        return None
    seen += (id(value),)
    if isinstance(value, dict):
        return {k: frozen(v, seen) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(v, seen) for v in value]
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if type(value).__module__ == "numpy":
        return copy.copy(value)
    if hasattr(value, "__dict__") and not callable(value):
        return {k: frozen(v, seen) for k, v in vars(value).items()}
    return value


def _copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError, ValueError):  # generators, locks: they can only be handed on
        return value


# ---- guards


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Timeout when the block runs longer. Without alarms (Windows, other threads) there is no limit."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    active = True

    def ring(number: int, frame: Any) -> None:
        if active:
            raise Timeout

    old_handler = signal.signal(signal.SIGALRM, ring)
    # rings again and again: a bare `except:` in a loop may swallow the first
    old_timer = signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)
    try:
        yield
    finally:
        active = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        signal.setitimer(signal.ITIMER_REAL, *old_timer)


@contextlib.contextmanager
def fixed_random() -> Iterator[None]:
    """Seed the random states with 0 inside, and put them back afterwards."""
    import numpy as np
    import torch

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@contextlib.contextmanager
def largest_tensor() -> Iterator[list[int]]:
    """Yields [n]: the most elements of any tensor whose memory is new, made inside the block."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    peak = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            old = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if _is_tensor(t)}
            out = func(*args, **kwargs)
            for t in tree_flatten(out)[0]:
                if _is_tensor(t) and t.untyped_storage().data_ptr() not in old:
                    peak[0] = max(peak[0], t.untyped_storage().nbytes() // max(1, t.element_size()))
            return out

    with Watch():
        torch.zeros(1).neg()  # the first operator under such a mode imports for seconds: not in the learner's time
        peak[0] = 0
        yield peak


class Counting:
    """Wraps a function and counts its calls in `.calls`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.calls, self.__name__ = fn, 0, getattr(fn, "__name__", "fn")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.fn(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Counting:
        return self


# ---- the tester


class Tester:
    """Handed to each check function. Every method that looks at the answer counts as a case and stops at a failure."""

    counting = Counting

    def __init__(self, answer: Any, name: str, limit: float, trace: bool = False) -> None:
        self.name, self.limit, self.trace = name, limit, trace
        self.slowest = 0.0  # seconds of the longest call that ended
        self.failure: Failure | None = None
        self.outcomes: list[tuple[str, Any]] = []
        self.answer, self._files = answer, _files_of(answer)

    @property
    def cases(self) -> int:
        return len(self.outcomes)

    def rng(self, seed: int = 0) -> Any:
        """A torch.Generator with this seed."""
        import torch

        return torch.Generator().manual_seed(seed)

    def case(
        self,
        fn: Callable[..., Any],
        *args: Any,
        expected: Any,
        tol: float | None = None,
        note: str = "",
        kwargs: dict[str, Any] | None = None,
        writes: Sequence[int] = (),
        after: dict[int, Any] | None = None,
        max_elements: int | None = None,
    ) -> Any:
        """Call fn on copies of args; compare type, shape, dtype and values with `expected`. Returns what fn returned.

        writes: numbers of the arguments that fn may change; all others must stay as they were. after: what arguments
        must be afterwards, by number. max_elements: the biggest tensor that fn may make. note: what this case is about.
        """
        args = _copy(args)
        got = self._guarded(fn, args, kwargs or {}, note, (*writes, *(after or {})), max_elements)
        if isinstance(got, _Raised):
            return None
        call = self._call_text(fn, args, kwargs)
        for i, want in (after or {}).items():
            text = difference(args[i], want, tol)
            if text:
                lines = [("call", call), ("argument", f"{_parameter(fn, i, len(args))} is {show(args[i])} afterwards")]
                lines.append(("expected", show(want)))
                self._fail(Failure("value", call, args[i], [*lines, ("differs", text)], note))
                return got
        return self.equal(got, expected, call, tol=tol, note=note)

    def call(self, fn: Callable[..., Any], *args: Any, note: str = "", **kwargs: Any) -> Any:
        """One step of a longer case: call fn on args themselves, with the same guards, and return the result."""
        got = self._guarded(fn, args, kwargs, note, range(len(args)), None, count=False)
        return None if isinstance(got, _Raised) else got

    def equal(
        self, got: Any, expected: Any, call: str = "", *, tol: float | None = None, note: str = "", hide: bool = False
    ) -> Any:
        """Compare. hide: do not print what was expected (a quiz would be solved by reading the message)."""
        text = difference(got, expected, tol)
        if text is None:
            self.outcomes.append(("ok", None))
            return got
        label = "call" if callable(self.answer) else "asked"  # an answer that is a value was not called
        lines = [(label, call)] * bool(call) + [("got", show(got))]
        if not hide:
            lines.append(("expected", show(expected)))
        if "the type is " in text or (not hide and text != "the value differs"):
            lines.append(("differs", text))
        self._fail(Failure("value", call, got, lines, note))
        return got

    def true(self, condition: Any, text: str, *, call: str = "", got: Any = None, note: str = "") -> None:
        """A property that must hold; `text` says it in words. got: shown, and compared when naming the mistake."""
        if condition:
            self.outcomes.append(("ok", None))
            return
        lines = [("call", call)] * bool(call) + [("got", show(got))] * (got is not None) + [("must hold", text)]
        self._fail(Failure("property", call, got, lines, note))

    def raises(
        self, error: type[Exception], fn: Callable[..., Any], *args: Any, match: str = "", note: str = "", **kwargs: Any
    ) -> None:
        """fn must refuse these arguments with `error`, whose message contains `match`."""
        got = self._guarded(fn, _copy(args), kwargs, note, (), None, expect=error)
        call = self._call_text(fn, args, kwargs)
        if isinstance(got, _Raised):
            if not got.wanted:
                return  # the failure is recorded
            if match in str(got.error):
                self.outcomes.append(("ok", None))
                return
            lines = [("call", call), ("raised", f"{error.__name__}: {show_error(got.error)}")]
            lines.append(("expected", f"a message with {match!r}"))
            self._fail(Failure("raised", call, str(got.error), lines, note))
            return
        lines = [("call", call), ("got", show(got)), ("expected", f"{error.__name__} is raised")]
        self._fail(Failure("not raised", call, got, lines, note))

    @contextlib.contextmanager
    def unchanged(self, *objects: Any, what: str = "an object that must stay as it is") -> Iterator[None]:
        """The block must not change these objects."""
        before = frozen(list(objects))
        yield
        text = difference(frozen(list(objects)), before, 0.0)
        if text is None:
            self.outcomes.append(("ok", None))
        else:
            self._fail(Failure("modified", what, None, [("changed", what), ("differs", text)]))

    # -- inside

    def _guarded(
        self, fn: Any, args: Any, kwargs: dict[str, Any], note: str, writes: Sequence[int], max_elements: int | None,
        expect: type[Exception] | None = None, count: bool = True,
    ) -> Any:  # fmt: skip
        call = self._call_text(fn, args, kwargs)
        keep = [frozen(a) for i, a in enumerate(args) if i not in writes]
        watch = largest_tensor() if max_elements is not None else contextlib.nullcontext([0])
        try:
            start = time.perf_counter()
            with watch as peak, time_limit(self.limit):
                got = fn(*args, **kwargs)
            self.slowest = max(self.slowest, time.perf_counter() - start)
        except NotImplementedError as error:
            raise _Todo from error
        except Timeout:
            lines = [("call", call), ("stopped", f"still running after {self.limit:g} s: does the loop end?")]
            self._fail(Failure("timeout", call, None, lines, note))
            raise _Stop from None
        except RecursionError as error:
            lines = [("call", call), ("raised", "RecursionError: the function calls itself and never stops")]
            self._fail(Failure("raised", call, "RecursionError", lines + self._line(error), note))
            return _Raised(error, False)
        except Exception as error:
            if expect is not None and isinstance(error, expect):
                return _Raised(error, True)
            lines = [("call", call), ("raised", f"{type(error).__name__}: {show_error(error)}"), *self._line(error)]
            if expect is not None:
                lines.append(("expected", f"{expect.__name__} is raised"))
            self._fail(Failure("raised", call, type(error).__name__, lines, note))
            return _Raised(error, False)
        now = [frozen(a) for i, a in enumerate(args) if i not in writes]
        for i, (a, b) in enumerate(zip(now, keep, strict=True)):
            if difference(a, b, 0.0):
                number = [j for j in range(len(args)) if j not in writes][i]
                name = _parameter(fn, number, len(args))
                lines = [("call", call), ("changed", f"argument {name} was {show(b)} before and is {show(a)} after")]
                self._fail(Failure("modified", call, number, lines, note or "arguments must not be modified"))
                return _Raised(RuntimeError(), False)
        if max_elements is not None and peak[0] > max_elements:
            lines = [("call", call), ("cost", f"makes a tensor of {peak[0]} elements; {max_elements} are enough")]
            self._fail(Failure("cost", call, None, lines, note))
            return _Raised(RuntimeError(), False)
        return got

    def _call_text(self, fn: Any, args: Any, kwargs: dict[str, Any] | None) -> str:
        inner = [show(a, 60) for a in args] + [f"{k}={show(v, 60)}" for k, v in (kwargs or {}).items()]
        name = self.name if fn is self.answer else getattr(fn, "__name__", self.name)
        return f"{name}({', '.join(inner)})"

    def _line(self, error: BaseException) -> list[tuple[str, str]]:
        """The learner's own last line in the traceback."""
        best, tb = None, error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code.co_filename in self._files:
                best = (tb.tb_frame.f_code.co_filename, tb.tb_lineno)
            tb = tb.tb_next
        text = linecache.getline(*best).strip() if best else ""
        return [("your line", f"{text}   (line {best[1]})")] if best and text else []

    def _fail(self, failure: Failure) -> None:
        failure.case = len(self.outcomes)
        self.outcomes.append((failure.kind, _copy(failure.value)))
        if self.failure is None:
            self.failure = failure
        if not self.trace:
            raise _Stop


def _parameter(fn: Any, number: int, count: int) -> str:
    """The name of fn's parameter that takes argument `number` of `count`; the number where that is not known."""
    try:
        bound = inspect.signature(fn).bind_partial(*range(count)).arguments
    except (TypeError, ValueError):  # no signature, or one that does not take these arguments
        return str(number)
    return next((name for name, value in bound.items() if value == number), str(number))


@dataclasses.dataclass
class _Raised:
    error: BaseException
    wanted: bool


def show_error(error: BaseException) -> str:
    return show(_Plain(str(error).strip().split("\n")[0]), 200)


class _Plain(str):
    def __repr__(self) -> str:
        return str(self)


def _files_of(answer: Any) -> set[str]:
    answer = inspect.unwrap(answer) if callable(answer) else answer
    parts = list(vars(answer).values()) if inspect.isclass(answer) else [answer]
    return {p.__code__.co_filename for p in parts if hasattr(p, "__code__")}


# ---- one check


def is_package_object(ex: Exercise, answer: Any) -> bool:
    """True for minillm's own function: passing it would check nothing of the learner's."""
    if not callable(answer):
        return False
    answer, reference = inspect.unwrap(answer), ex.reference()
    code = getattr(answer, "__code__", None)
    module = str(getattr(getattr(answer, "func", answer), "__module__", ""))
    return answer is reference or module.split(".")[0] == "minillm" or (
        code is not None and code is getattr(reference, "__code__", None)
    )  # fmt: skip


def _unanswered(answer: Any) -> bool:
    if isinstance(answer, dict):
        return any(map(_unanswered, answer.values()))
    if isinstance(answer, list | tuple):
        return any(map(_unanswered, answer))
    return answer is None or answer is ...


def _run(ex: Exercise, answer: Any, limit: float, trace: bool) -> Tester:
    t = Tester(answer, ex.name, limit, trace)
    with fixed_random():
        try:
            ex.check(t, answer)
        except _Stop:
            pass
        except _Todo:
            t.outcomes.append(("todo", None))
            raise
        except RecursionError as error:
            t.trace = True
            t._fail(Failure("raised", ex.name, "RecursionError", [("raised", "RecursionError"), *t._line(error)]))
        except Exception as error:  # the check used the answer in a way that the answer does not allow
            t.trace = True
            lines = [("raised", f"{type(error).__name__}: {show_error(error)}"), *t._line(error)]
            t._fail(Failure("raised", ex.name, type(error).__name__, lines))
    return t


def _outcomes(ex: Exercise, answer: Any, limit: float) -> list[tuple[str, Any]]:
    """What the answer does in every case, failures included. limit: seconds for each call."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return _run(ex, answer, limit, trace=True).outcomes
        except _Todo:
            return []


def diagnose(ex: Exercise, answer: Any, case: int, slowest: float) -> Any:
    """The mutant that does the same as the answer up to the failing case and in most others; None if there is none.

    It must also agree in at least half of the cases where the answer is wrong: one case may be a coincidence.
    slowest: seconds that the answer needed for a call; a machine that is slow or busy gets more time.
    """
    limit = min(LIMIT_S, max(1.0, 4.0 * slowest))
    mine = _outcomes(ex, answer, limit)
    wrong = [i for i, outcome in enumerate(mine) if outcome[0] != "ok"]
    best, most = None, 0
    for mutant in ex.mutants:
        if mutant.name not in ex.outcomes:
            ex.outcomes[mutant.name] = _outcomes(ex, mutant.obj, limit)
        theirs = ex.outcomes[mutant.name]
        same = [a[0] == b[0] and difference(a[1], b[1]) is None for a, b in zip(mine, theirs, strict=False)]
        if (
            len(same) <= case
            or not all(same[: case + 1])
            or 2 * sum(same[i] for i in wrong if i < len(same)) < len(wrong)
        ):
            continue
        if sum(same) > most:
            best, most = mutant, sum(same)
    return best


def run_check(ex: Exercise, answer: Any) -> CheckResult:
    """Check an answer. Deterministic: the same answer gives the same text."""
    head = f"{ex.id} {ex.name}"
    todo = f'TODO {ex.id} not attempted yet: hint("{ex.id}")'
    if _unanswered(answer):
        missing = [str(key) for key, value in answer.items() if _unanswered(value)] if isinstance(answer, dict) else []
        if missing and len(missing) < len(answer):
            given = f"{len(answer) - len(missing)} of {len(answer)} given"
            todo = f'TODO {ex.id} {given}; still None: {", ".join(missing)}. hint("{ex.id}")'
        return CheckResult(ex.id, "TODO", todo)
    if is_package_object(ex, answer) and os.environ.get("MINILLM_ALLOW_REF") != "1":
        text = f"FAIL {head}: this is minillm's own code. Define {ex.name} in the notebook and pass yours."
        return CheckResult(ex.id, "REFUSED", text)
    if callable(ex.reference()) and not callable(answer):
        text = f'FAIL {head}: you passed {show(answer)}. Pass the function itself: check("{ex.id}", {ex.name})'
        return CheckResult(ex.id, "FAIL", text)
    try:
        t = _run(ex, answer, LIMIT_S, trace=False)
    except _Todo:
        return CheckResult(ex.id, "TODO", todo)
    if t.failure is None:
        if t.cases == 0:
            raise ValueError(f"The check of exercise {ex.id} looked at nothing.")
        return CheckResult(ex.id, "PASS", f"PASS {head} ({t.cases} case{'s' * (t.cases > 1)})", cases=t.cases)
    fail = t.failure
    mutant = diagnose(ex, answer, fail.case, t.slowest)
    lines = list(fail.lines)
    if fail.note:
        lines.insert(1, ("case", fail.note))
    if mutant is not None:
        lines.append(("likely", mutant.message))
    elif fail.kind == "value" and fail.value is None:
        lines.append(("likely", "The function returned None: is a `return` missing?"))
    lines.append(("next", f'hint("{ex.id}")'))
    text = "\n".join([f"FAIL {head} (case {fail.case + 1})", *(f"  {label:<10}{text}" for label, text in lines)])
    return CheckResult(ex.id, "FAIL", text, mutant.name if mutant else None, t.cases)
