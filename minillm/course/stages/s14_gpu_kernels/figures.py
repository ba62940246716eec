"""What the lesson of stage 14 shows: figures that benchmarks/gpu.py measured on a GPU, and operators counted here."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

FILE = "benchmarks/results/gpu.json"


class Figures:
    """The file's rows by name. What is missing there is nan, so that a cell can print it all the same."""

    def __init__(self, data: dict[str, Any] | None) -> None:
        self.data = data or {}
        self.found = bool(data)
        self.name = self.data.get("gpu", "no GPU")
        self.rows = {(r["workload"], r["model"], r["engine"], r["mode"]): r for r in self.data.get("rows", [])}
        # one GPU reads faster than another: what a row is compared with was measured in the same run
        self.reads = [run["machine"]["read"] for run in self.data.get("runs", [])]

    def read(self, model: str) -> float:
        """Bytes/s that the GPU of a model's one-stream row could read."""
        row = self.rows.get(("a", model, "minillm", ""))
        return self.reads[row["run"]] if row else math.nan

    def get(self, field: str, model: str, mode: str = "", workload: str = "a", engine: str = "minillm") -> float:
        row = self.rows.get((workload, model, engine, mode), {})
        value = None if row.get("error") else row.get(field)
        return math.nan if value is None else float(value)

    def kernels(self, model: str, mode: str = "", workload: str = "a") -> list[tuple[str, float, float]]:
        """(name, count in a decode step, microseconds each) of the dearest kernels."""
        return [tuple(one) for one in self.data.get("profile", {}).get(f"{workload}/{model}/minillm/{mode}", [])]

    def __repr__(self) -> str:
        if not self.found:
            return f"{FILE} is not here (it comes with the repository), so figures from a GPU are shown as nan."
        versions = ", ".join(f"{name} {version}" for name, version in self.data.get("versions", {}).items())
        return f"Figures from {FILE}: {self.name}, reads {self.span()} (measured); {versions}."

    def span(self) -> str:
        low, high = (f"{read / 1e9:,.0f}" for read in (min(self.reads), max(self.reads)))
        return f"{low} to {high} GB/s" if low != high else f"{low} GB/s"


def gpu_figures() -> Figures:
    """Look for the file in the package's folder and above it."""
    for folder in Path(__file__).resolve().parents:
        if (folder / FILE).is_file():
            return Figures(json.loads((folder / FILE).read_text(encoding="utf-8")))
    return Figures(None)


@contextmanager
def count_operators() -> Iterator[Counter[str]]:
    """Counts torch operators that compute or copy something; views are free and left out."""
    counts: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [t for t in tree_flatten((args, kwargs or {}))[0] if isinstance(t, torch.Tensor)]
            out = func(*args, **(kwargs or {}))
            old = {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}
            results = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and t.layout == torch.strided]
            new = any(t.untyped_storage().data_ptr() not in old for t in results)
            name = func.overloadpacket.__name__
            if (new or name.endswith("_")) and not name.startswith(("empty", "new_empty")):
                counts[name] += 1
            return out

    with Count():
        yield counts
