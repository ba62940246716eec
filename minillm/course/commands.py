"""The course's commands: `minillm check NN`, `hint NN.k`, `explain NN.k`, `progress`, `reset NN.k`, `build`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click


def _plain_errors(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An unknown stage or exercise is one sentence and exit code 2."""

    @wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except (ValueError, FileNotFoundError) as error:
            raise click.UsageError(str(error)) from error
        except ModuleNotFoundError as error:
            raise click.UsageError(f"{error.name} is not installed. It comes with minillm[course].") from error

    return inner


@click.command()
@click.argument("what", metavar="NN[.k]")
@_plain_errors
def check(what: str) -> None:
    """Run your exercise notebook NN and print one line for each exercise (or all about exercise NN.k)."""
    import nbformat

    from .build import execute, find_root
    from .exercise import get_exercise, get_stage
    from .learn import Progress

    stage = get_stage(what.partition(".")[0])
    wanted = [get_exercise(what)] if "." in what else list(stage.exercises())
    path = find_root() / "exercises" / stage.file_name
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        env = {"MINILLM_STRICT": "1", "MINILLM_RESULTS": str(results), "MINILLM_PROGRESS": str(Progress().path)}
        execute(notebook, path.parent, env, allow_errors=True)
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    said = {id: (status, message) for id, status, message in map(json.loads, lines)}
    errors = [o for c in notebook.cells if c.cell_type == "code" and 'check("' not in c.source
              for o in c.outputs if o.output_type == "error"]  # fmt: skip
    for ex in wanted:
        _, message = said.get(ex.id, ("", f"NOT RUN {ex.id} {ex.name}: its check cell is missing or stopped"))
        likely = [line.split(None, 1)[1] for line in message.splitlines() if line.startswith("  likely")]
        short = message.splitlines()[0] + (f": {likely[0]}" if likely else "")
        click.echo(message if "." in what else short)
    if errors:
        click.echo(f"The notebook's first error: {errors[0].ename}: {errors[0].evalue}")
    if any(said.get(ex.id, ("",))[0] != "PASS" for ex in wanted):
        sys.exit(1)


@click.command()
@click.argument("id", metavar="NN.k")
@click.argument("number", required=False, type=click.IntRange(1, 3))
@_plain_errors
def hint(id: str, number: int | None) -> None:
    """Show the next hint of exercise NN.k."""
    from . import learn

    learn.hint(id, number)


@click.command()
@click.argument("id", metavar="NN.k")
@click.option("--anyway", is_flag=True, help="Also before the check passes.")
@_plain_errors
def explain(id: str, anyway: bool) -> None:
    """Say why the answer to exercise NN.k is right, and what else would be."""
    from . import learn

    learn.explain(id, anyway)


@click.command()
@click.argument("stage", metavar="[NN]", required=False)
@_plain_errors
def progress(stage: str | None) -> None:
    """Show what you have done so far."""
    from . import learn

    learn.progress(stage)


@click.command()
@click.argument("id", metavar="NN[.k]")
@_plain_errors
def reset(id: str) -> None:
    """Forget that exercise NN.k, or stage NN, was passed."""
    from . import learn

    learn.reset(id)


@click.command()
@click.argument("stages", metavar="[NN ...]", nargs=-1)
@click.option("--check", is_flag=True, help="Write nothing; say what is not up to date.")
@_plain_errors
def build(stages: tuple[str, ...], check: bool) -> None:
    """Build the notebooks of the course, and the README's table, from their sources."""
    from .build import build as run

    os.environ.setdefault("OMP_NUM_THREADS", "2")
    wrong = run(stages, check=check, say=click.echo)
    for line in wrong:
        click.echo(line)
    if wrong:
        sys.exit(1)
    click.echo("all up to date" if check else "done")


COMMANDS = (check, hint, explain, progress, reset, build)
