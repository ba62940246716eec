"""Triton kernels on a CPU, with their memory watched.

Triton's interpreter runs a kernel's programs one after another, in numpy. Here each load and store can be counted, and
one that goes outside of its tensors is an IndexError: on a GPU it would be undefined, and in the plain interpreter it
may end the process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported for the first time

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from minillm import kernels


def interpreted(kernel: Any) -> InterpretedFunction:
    """The kernel for the interpreter: a function with @triton.jit, or one that lacks it."""
    return kernel if isinstance(kernel, InterpretedFunction) else InterpretedFunction(getattr(kernel, "fn", kernel))


def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
    return interpreted(self).run(*args, **kwargs)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return interpreted(self)(*args, **kwargs)


if isinstance(tl.sum, JITFunction):  # Triton was imported before TRITON_INTERPRET was set
    JITFunction.run, JITFunction.__call__ = _run, _call
    kernels.INTERPRETED = True

for _kernel in [k for k in vars(kernels).values() if isinstance(k, InterpretedFunction | JITFunction)]:
    # so that inspect, and with it show_source, finds the source
    functools.update_wrapper(_kernel, _kernel.fn, ("__module__", "__doc__", "__qualname__"))


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, guard: bool = True) -> None:
    """kernel[grid](*args). An error inside comes out as it is, not wrapped by each function on the way.

    guard: reading or writing outside of the tensors in args is an IndexError.
    """
    fn = interpreted(kernel)
    named = {name: arg for name, arg in zip(fn.arg_names, args, strict=False) if isinstance(arg, Tensor)}
    try:
        with np.errstate(all="ignore"), watch(True, **named) if guard else nullcontext():
            fn[grid](*args)
    except InterpreterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from None


@dataclass
class Access:
    """One load or store of one program: the numbers of the elements of tensor `name` that it touched."""

    kind: str  # "read" or "write"
    program: tuple[int, ...]
    name: str
    elements: np.ndarray


@dataclass
class Watch:
    """What kernels did. launches: (kernel, number of programs), in order. accesses: only to the named tensors."""

    tensors: dict[str, Tensor]
    strict: bool
    launches: list[tuple[str, int]] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)

    def elements(self, name: str, kind: str = "read") -> np.ndarray:
        """Numbers of the elements of a tensor that were read (or written), in order, with repeats."""
        found = [a.elements for a in self.accesses if (a.name, a.kind) == (name, kind)]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def bytes_moved(self, kind: str | None = None) -> int:
        """Bytes that programs asked for, repeats included."""
        return sum(
            a.elements.size * self.tensors[a.name].element_size() for a in self.accesses if kind in (None, a.kind)
        )

    def note(self, kind: str, pointers: Any, mask: Any, program: tuple[int, ...]) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64)
        strangers = np.ones(addresses.shape, bool)
        for name, tensor in self.tensors.items():
            first, size = tensor.data_ptr(), tensor.element_size()
            inside = (addresses >= first) & (addresses < first + span(tensor) * size)
            strangers &= ~inside
            if inside.any():
                self.accesses.append(Access(kind, program, name, (addresses[inside] - first) // size))
        if self.strict and strangers.any():
            wrong = int(addresses[strangers][0])
            below = [n for n, t in self.tensors.items() if t.data_ptr() <= wrong] or list(self.tensors)
            name = min(below, key=lambda n: abs(wrong - self.tensors[n].data_ptr()))
            tensor = self.tensors[name]
            number = (wrong - tensor.data_ptr()) // tensor.element_size()
            where = f"element {number:,} of {name}" if abs(number) < 10**6 else "far outside of all tensors"
            raise IndexError(f"a {kind} of {where}, and {name} has {span(tensor)} elements")


def span(tensor: Tensor) -> int:
    """Elements from its first to its last, those between its rows included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0


@contextmanager
def watch(strict: bool = False, **tensors: Tensor) -> Iterator[Watch]:
    """Watch the kernels that are launched in the block. tensors: the memory to watch, by name.

    strict: a read or write outside of these tensors is an IndexError.
    """
    seen, builder, run = Watch(tensors, strict), interpreter.interpreter_builder, InterpretedFunction.run
    load, store, set_grid = builder.create_masked_load, builder.create_masked_store, builder.set_grid_dim
    names: list[str] = []

    def watched_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        seen.note("read", pointers, mask, builder.grid_idx)
        return load(pointers, mask, *rest)

    def watched_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.note("write", pointers, mask, builder.grid_idx)
        return store(pointers, value, mask, *rest)

    def watched_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    def watched_grid(*grid: int) -> None:
        seen.launches.append((names[-1], int(np.prod(grid))))
        set_grid(*grid)

    InterpretedFunction.run = watched_run
    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    builder.set_grid_dim = watched_grid
    try:
        yield seen
    finally:
        InterpretedFunction.run = run
        builder.create_masked_load, builder.create_masked_store, builder.set_grid_dim = load, store, set_grid


# ---- small launches, so that functions which run inside a kernel can be tried alone


@interpreted
def _tile(m, l, scores, new_m, new_l, weights, shrink, R: tl.constexpr, C: tl.constexpr, FN: tl.constexpr):
    r, c = tl.arange(0, R), tl.arange(0, C)
    place = r[:, None] * C + c[None, :]
    state = FN(tl.load(m + r), tl.load(l + r), tl.load(scores + place))
    tl.store(new_m + r, state[0])
    tl.store(new_l + r, state[1])
    tl.store(weights + place, state[2])
    tl.store(shrink + r, state[3])


def run_online_softmax(fn: Any, m: Tensor, l: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """One tile: m, l [R] and scores [R, C], powers of two, float32."""
    out = {"m": torch.full_like(m, torch.nan), "l": torch.full_like(l, torch.nan)}
    out |= {"weights": torch.full_like(scores, torch.nan), "shrink": torch.full_like(m, torch.nan)}
    launch(_tile, (1,), m, l, scores, *out.values(), *scores.shape, interpreted(fn))
    return out


@interpreted
def _rows(table, keys, flags, out, g, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, N: tl.constexpr, FN: tl.constexpr):
    i = tl.arange(0, N)
    inside = tl.load(flags + i) != 0
    tl.store(out + i, FN(table, tl.load(keys + i), inside, g, PAGE, KV_HEADS), inside)


def run_cache_rows(fn: Any, table: Tensor, key: Tensor, inside: Tensor, g: int, page: int, kv_heads: int) -> Tensor:
    """Rows for positions `key` [C], C a power of two; -1 where `inside` is False."""
    out, flags = torch.full((len(key),), -1, dtype=torch.int64), inside.to(torch.int8)
    launch(_rows, (1,), table, key, flags, out, g, page, kv_heads, len(key), interpreted(fn))
    return out


@interpreted
def _merge(each, lse, out, S: tl.constexpr, D: tl.constexpr, FN: tl.constexpr):
    s, d = tl.arange(0, S), tl.arange(0, D)
    tl.store(out + d, FN(tl.load(each + s[:, None] * D + d[None, :]), tl.load(lse + s)))


def run_merge_parts(fn: Any, each: Tensor, lse: Tensor) -> Tensor:
    """[S, D] and [S] to [D]; S and D powers of two."""
    out = torch.full((each.shape[1],), torch.nan)
    launch(_merge, (1,), each, lse, out, *each.shape, interpreted(fn))
    return out
