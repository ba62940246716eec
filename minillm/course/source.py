"""The engine's source is the source of stub and solution: what stands between `# exercise NN.k` and its end marker.

    def blocks_needed(num_tokens: int, block_size: int) -> int:
        \"\"\"How many blocks hold num_tokens.\"\"\"
        # exercise 04.1
        return -(-num_tokens // block_size)
        # end exercise 04.1

A class may hold several regions of one exercise. The text outside the regions is given to the learner.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from typing import Any

from .exercise import Exercise

MARKER = re.compile(r"^[ \t]*# (end )?exercise (\d\d\.\d+[a-z]?)[ \t]*$")


def regions(code: str) -> list[tuple[str, int, int]]:
    """(exercise id, first line, last line) of each marked region, line indices of the two marker lines."""
    found: list[tuple[str, int, int]] = []
    start: tuple[str, int] | None = None
    for i, line in enumerate(code.splitlines()):
        match = MARKER.match(line)
        if not match:
            continue
        if not match[1] and start is None:
            start = (match[2], i)
        elif match[1] and start is not None and start[0] == match[2]:
            found.append((match[2], start[1], i))
            start = None
        else:
            raise ValueError(f"Exercise markers do not pair up at: {line.strip()}")
    if start is not None:
        raise ValueError(f"'# exercise {start[0]}' has no end marker.")
    return found


def blank(code: str, id: str | None, text: str) -> str:
    """`code` with every region of exercise `id` (None: of any) replaced by `text`, and without marker lines."""
    lines = code.splitlines()
    for region, first, last in reversed(regions(code)):
        if id in (None, region):
            indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
            lines[first : last + 1] = [indent + text.format(id=region)]
    return "\n".join(line for line in lines if not MARKER.match(line))


def get_code(obj: Any) -> str:
    return textwrap.dedent(inspect.getsource(obj)).rstrip()


def solution_code(ex: Exercise) -> str:
    """The answer as the engine has it, without markers."""
    if ":" not in ex.symbol:
        return textwrap.dedent(ex.solution).strip()
    code = get_code(ex.reference())
    return "\n".join(line for line in code.splitlines() if not MARKER.match(line))


def stub_code(ex: Exercise) -> str:
    """What the learner starts from: signature, docstring and NotImplementedError in place of each region."""
    if ":" not in ex.symbol:
        return textwrap.dedent(ex.stub).strip()
    code = get_code(ex.reference())
    if ex.id not in {id for id, _, _ in regions(code)}:
        raise ValueError(f"{ex.symbol} has no '# exercise {ex.id}' region.")
    return blank(code, ex.id, 'raise NotImplementedError("exercise {id}")')


def solution_lines(ex: Exercise) -> list[str]:
    """The lines that the learner has to find."""
    if ":" not in ex.symbol:
        given = {line.strip() for line in ex.stub.splitlines()}
        return [line.strip() for line in ex.solution.splitlines() if line.strip() and line.strip() not in given]
    code = get_code(ex.reference())
    lines = code.splitlines()
    return [s.strip() for id, a, b in regions(code) if id == ex.id for s in lines[a + 1 : b] if s.strip()]


def imports_for(ex: Exercise) -> list[str]:
    """The import lines that the exercise's code needs, as absolute imports."""
    if ":" not in ex.symbol:
        return []
    module = importlib.import_module(ex.symbol.partition(":")[0])
    tree = ast.parse(get_code(ex.reference()))
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - set(vars(builtins)) - {ex.name}
    package = module.__name__.rpartition(".")[0]
    lines = set()
    bound: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            if name not in used:
                continue
            bound.add(name)
            text = alias.name + (f" as {alias.asname}" if alias.asname else "")
            if isinstance(node, ast.Import):
                lines.add(f"import {text}")
            else:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
                lines.add(f"from {'.'.join(filter(None, (base, node.module)))} import {text}")
    own = sorted(n for n in used - bound if n in vars(module) and not n.startswith("__"))
    return sorted(lines) + [f"from {module.__name__} import {n}" for n in own]


def edited(symbol: str, old: str, new: str) -> Any:
    """A mutant by editing: the symbol's object compiled again with `old` (found exactly once) replaced by `new`."""
    module = importlib.import_module(symbol.partition(":")[0])
    obj: Any = module
    for part in symbol.partition(":")[2].split("."):
        obj = getattr(obj, part)
    code = get_code(obj)
    if code.count(old) != 1:
        raise ValueError(f"{symbol} holds {old!r} {code.count(old)} times, not once.")
    space = dict(vars(module))
    code = "from __future__ import annotations\n" + code.replace(old, new)
    exec(compile(code, f"<mutant of {symbol}>", "exec"), space)
    return space[symbol.rpartition(":")[2].rpartition(".")[2]]
