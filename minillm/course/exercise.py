"""How an exercise is declared, and where the stages are found. A stage is imported when it is asked for."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import stages


@dataclass(frozen=True)
class Mutant:
    """A wrong answer that people really give. `message` names the mistake; `seen` says where it was met."""

    name: str
    obj: Any
    message: str
    seen: str


@dataclass(frozen=True)
class Exercise:
    """One exercise. docs/adding_a_stage.md shows a complete one.

    symbol: "package.module:name" (or "package.module:Class.method") of the code with the exercise's markers; or a bare
    name such as "verdicts", and then `stub` and `solution` hold the text of the two cells.
    check(t, answer): see `checker.Tester`. plug_in(answer, swap): see `learn.plug_in`; None runs the engine on it.
    scratch: code for the learner's scratch cell; it may call the stub and should print.
    """

    id: str
    symbol: str
    title: str
    minutes: int
    difficulty: int
    statement: str
    hints: tuple[str, str, str]
    explanation: str
    check: Callable[[Any, Any], None]
    mutants: tuple[Mutant, ...]
    variant: Any
    scratch: str = ""
    plug_in: Callable[[Any, Callable[[], Any]], None] | None = None
    stub: str = ""
    solution: str = ""
    outcomes: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # what each mutant did, kept

    def __post_init__(self) -> None:
        wrong = []
        if not re.fullmatch(r"\d\d\.\d+[a-z]?", self.id):
            wrong.append(f"id {self.id!r} is not like '02.1'")
        if len(self.hints) != 3 or not all(h.strip() for h in self.hints):
            wrong.append("it needs exactly three hints")
        if len(self.mutants) < 3 or len({m.name for m in self.mutants}) < len(self.mutants):
            wrong.append("it needs at least three mutants with different names")
        if not 1 <= self.difficulty <= 3:
            wrong.append("difficulty is 1, 2 or 3")
        if (":" in self.symbol) == bool(self.stub or self.solution):
            wrong.append("give either a symbol 'module:name', or a bare name with stub and solution")
        for text in ("title", "statement", "explanation"):
            if not getattr(self, text).strip():
                wrong.append(f"{text} is empty")
        if wrong:
            raise ValueError(f"Exercise {self.id}: " + "; ".join(wrong) + ".")

    @property
    def name(self) -> str:
        """The name the learner defines in the notebook."""
        return self.symbol.rpartition(":")[2].rpartition(".")[2]

    def owner(self) -> tuple[Any, str]:
        """The module or class that holds the symbol, and the attribute's name there."""
        module, _, path = self.symbol.partition(":")
        if not path:
            raise ValueError(f"Exercise {self.id} is not a part of the engine, so there is nothing to swap.")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name

    def reference(self) -> Any:
        """The package's own answer."""
        if ":" in self.symbol:
            return getattr(*self.owner())
        return _run_text(self.solution)[self.symbol]


def _run_text(code: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "minillm.course.solution"}
    exec(compile(code, "<solution>", "exec"), space)
    return space


@dataclass(frozen=True)
class Stage:
    number: str
    slug: str
    title: str
    ability: str
    package: str | None  # None: planned, not written yet

    @property
    def minutes(self) -> int:
        """Minutes for the lesson."""
        return importlib.import_module(self.package).MINUTES if self.package else 0

    @property
    def file_name(self) -> str:
        return f"{self.number}_{self.slug}.ipynb"

    def exercises(self) -> tuple[Exercise, ...]:
        if not self.package:
            return ()
        found = tuple(importlib.import_module(f"{self.package}.exercises").EXERCISES)
        for ex in found:
            if not ex.id.startswith(self.number + "."):
                raise ValueError(f"Exercise {ex.id} stands in stage {self.number}.")
        if len({ex.id for ex in found}) < len(found):
            raise ValueError(f"Stage {self.number} uses an exercise id twice.")
        return found

    def folder(self) -> Path:
        file = importlib.import_module(self.package or "").__file__
        assert file is not None
        return Path(file).parent


@lru_cache(maxsize=1)
def all_stages() -> dict[str, Stage]:
    """Every stage by number, in order: written ones and planned ones."""
    written = {}
    for info in pkgutil.iter_modules(stages.__path__):
        match = re.fullmatch(r"s(\d\d)_(\w+)", info.name)
        if match:
            written[match[1]] = (match[2], f"{stages.__name__}.{info.name}")
    found = {}
    for number in sorted({*stages.PLAN, *written}):
        slug, package = written.get(number, (None, None))
        plan = stages.PLAN.get(number)
        if plan is None:
            module = importlib.import_module(package or "")
            plan = (slug or "", module.TITLE, module.ABILITY)
        if slug not in (None, plan[0]):
            raise ValueError(f"Stage {number} is called {plan[0]!r} in the plan, but its folder says {slug!r}.")
        found[number] = Stage(number, *plan, package=package)
    return found


def get_stage(number: str) -> Stage:
    """The written stage `number`; ValueError names the ones there are."""
    stage = all_stages().get(number)
    if stage is None or stage.package is None:
        there = ", ".join(s.number for s in all_stages().values() if s.package) or "none yet"
        raise ValueError(f"There is no stage {number!r}. Stages written so far: {there}.")
    return stage


def get_exercise(id: str) -> Exercise:
    """The exercise `id`, such as "02.1"; ValueError names the ones of its stage."""
    stage = get_stage(id.partition(".")[0])
    by_id = {ex.id: ex for ex in stage.exercises()}
    if id not in by_id:
        raise ValueError(f"There is no exercise {id!r}. Stage {stage.number} has {', '.join(by_id) or 'none'}.")
    return by_id[id]
