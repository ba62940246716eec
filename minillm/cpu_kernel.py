"""Paged decode attention on a CPU, compiled by numba: `attention.paged_query` for a whole batch, in plain loops.

One task is a part of one sequence's context: at most PART tokens. It looks their slots up in the block table and reads
each key and value once, where it lies and in the order in which they lie, for all heads: what limits it is memory. The
parts of a sequence are then merged by their sums (Flash-Decoding, 2023). Parts begin at the same positions whatever the
batch, so threads get equal work, and a request's numbers depend neither on the other requests nor on the number of
threads.

Scores are kept in base 2 (the queries are scaled by log2(e) as well), because 2**x takes less work than exp(x).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj
from torch import Tensor

from .attention import Layout

LOCK = threading.Lock()  # numba's simplest thread pool allows one caller at a time
PART = 64  # tokens of a part
AHEAD = 4  # tokens between the one in work and the one asked for: a processor guesses the next line, not the next slot
LINE = 16  # float32 of a cache line
FAST = {"reassoc", "contract", "arcp", "nsz"}  # no "nnan", "ninf": a part may have no key that a query sees
LEAST = np.float32(-126.0)  # 2**LEAST is the smallest normal number
# 2**r = sum of (r ln 2)**k / k!; for |r| <= 1/2 what comes after these terms is less than float32 can tell
T0, T1, T2, T3, T4, T5, T6, T7 = (np.float32(math.log(2.0) ** k / math.factorial(k)) for k in range(8))


@njit(fastmath={"contract"})
def exp2(x):
    """2**x for x <= 0; 0 below LEAST. Unlike np.exp2 it has no call and no branch, so a loop over it is vectorised."""
    y = LEAST if x < LEAST else x
    whole = np.rint(y)
    r = y - whole
    p = T0 + r * (T1 + r * (T2 + r * (T3 + r * (T4 + r * (T5 + r * (T6 + r * T7))))))
    power = np.int32((np.int32(whole) + 127) << 23).view(np.float32)  # 2**whole: exponents have an offset of 127
    return np.float32(0.0) if x < LEAST else p * power


@intrinsic
def prefetch(typing, array, i, j, k):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array[i, j, k], without waiting for it (LLVM's `prefetch`)."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind, byte, i32 = signature.args[0], ir.IntType(8).as_pointer(), ir.IntType(32)
        found = arrayobj.make_array(kind)(context, builder, args[0])
        address = cgutils.get_item_pointer(context, builder, kind, found, list(args[1:]))
        takes = [byte, i32, i32, i32]  # address, read or write, how long to keep it, data or code
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), takes))
        builder.call(call, [builder.bitcast(address, byte), i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp), generate


@njit(fastmath=FAST, forceinline=True)
def softmax(scores, low, high, count):
    """Scores low..high-1 become weights, the others of the `count` zeros; returns their maximum and their sum."""
    top, total = np.float32(-np.inf), np.float32(0.0)
    for i in range(low, high):
        top = max(top, scores[i])
    for i in range(low, high):
        scores[i] = exp2(scores[i] - top)
        total += scores[i]
    for i in range(low):
        scores[i] = 0.0
    for i in range(high, count):
        scores[i] = 0.0
    return top, total


@njit(fastmath=FAST, forceinline=True)
def attend_part(q, keys, values, start, queries, length, table, first, stop, row, window, factor, m, l, acc, dim, size):
    """Positions first..stop-1 of a sequence of `length` tokens, for its queries q[start : start + queries].

    m, l, acc: their entries from `row` on are written, one for each query and head, in this order. Rows are named
    (`k = keys[slot, g]`) before a loop over them: only then does the compiler see that they are contiguous. And one
    token comes after the other: to take two at a time needs fewer instructions, but memory is then slower.
    """
    heads, kv_heads = q.shape[1], keys.shape[1]
    share = heads // kv_heads
    first = max(first, length - queries - window + 1)  # what is before it no query sees
    tokens = max(0, stop - first)
    slots = np.empty(PART, np.int64)
    for i in range(tokens):
        slots[i] = table[(first + i) // size] * size + (first + i) % size
    scaled = np.empty((queries * heads, dim), np.float32)
    for r in range(queries * heads):
        a, s, x = acc[row + r], scaled[r], q[start + r // heads, r % heads]
        for d in range(dim):
            a[d] = 0.0
            s[d] = x[d] * factor
    scores = np.empty((queries * heads, PART), np.float32)
    for i in range(tokens):
        for g in range(kv_heads):
            k, later = keys[slots[i], g], slots[min(i + AHEAD, tokens - 1)]
            for d in range(0, dim, LINE):
                prefetch(keys, later, g, d)  # type: ignore[call-arg]
            for c in range(queries):
                for r in range(c * heads + g * share, c * heads + (g + 1) * share):
                    s, x = scaled[r], np.float32(0.0)
                    for d in range(dim):
                        x += s[d] * k[d]
                    scores[r, i] = x
    for r in range(queries * heads):
        end = length - queries + r // heads + 1 - first  # the query's own position, and one more
        low, high = min(max(0, end - window), tokens), min(max(0, end), tokens)
        m[row + r], l[row + r] = softmax(scores[r], low, high, tokens)
    for i in range(tokens):
        for g in range(kv_heads):
            v, later = values[slots[i], g], slots[min(i + AHEAD, tokens - 1)]
            for d in range(0, dim, LINE):
                prefetch(values, later, g, d)  # type: ignore[call-arg]
            for c in range(queries):
                for r in range(c * heads + g * share, c * heads + (g + 1) * share):
                    a, weight = acc[row + r], scores[r, i]
                    for d in range(dim):
                        a[d] += weight * v[d]


@njit(fastmath=FAST, forceinline=True)
def merge(sequences, parts, m, l, acc, out, dim):
    """Sum up the parts of each sequence, each weighed by 2**(its largest score - the largest of all)."""
    heads, p = out.shape[1], 0
    while p < len(parts):
        n, end = parts[p, 0], p + 1
        while end < len(parts) and parts[end, 0] == n:
            end += 1
        for r in range(sequences[n, 1] * heads):
            mixed = out[sequences[n, 0] + r // heads, r % heads]
            top, total = np.float32(-np.inf), np.float32(0.0)
            for part in range(p, end):
                top = max(top, m[parts[part, 3] + r])
            for d in range(dim):
                mixed[d] = 0.0
            for part in range(p, end):
                row = parts[part, 3] + r
                a, weight = acc[row], exp2(m[row] - top)
                total += weight * l[row]
                for d in range(dim):
                    mixed[d] += weight * a[d]
            for d in range(dim):
                mixed[d] /= total
        p = end


@functools.cache
def compiled(head_dim: int, block_size: int) -> Callable[..., None]:
    """The kernel for these sizes. As constants they let the compiler unroll and vectorise the inner loops.

    The functions above are inlined into it. They are not defined in here, where they would know the sizes by
    themselves: numba's cache does not find a kernel again that refers to other compiled functions of its own scope.
    """
    dim, size = head_dim, block_size

    @njit(parallel=True, fastmath=FAST, nogil=True, cache=True)
    def kernel(q, keys, values, sequences, tables, parts, window, factor, m, l, acc, out):
        for p in prange(len(parts)):
            n, first, stop, row = parts[p]
            start, queries, length = sequences[n]
            where = start, queries, length, tables[n], first, stop, row
            attend_part(q, keys, values, *where, window, factor, m, l, acc, dim, size)
        merge(sequences, parts, m, l, acc, out, dim)

    return kernel


@dataclass
class Short:
    """The sequences of a step that the kernel takes, and room for what it finds in each part."""

    sequences: np.ndarray  # [N, 3]: row of the first query in the batch, number of queries, length
    tables: np.ndarray  # [N, longest table], padded with block 0
    parts: np.ndarray  # [P, 4]: sequence, first position and the one after the last, first row in m, l, acc
    m: np.ndarray  # [rows]: a row is a head of a query of a part
    l: np.ndarray
    acc: np.ndarray  # [rows, D]


def short_sequences(layout: Layout, most: int, num_heads: int, head_dim: int) -> Short:
    """Those with 1 to `most` queries."""
    picked = [(rows, length, table) for rows, length, table in layout.sequences() if 0 < rows.stop - rows.start <= most]
    tables = np.zeros((len(picked), max((len(table) for _, _, table in picked), default=0)), np.int64)
    sequences, parts, row = np.zeros((len(picked), 3), np.int64), [], 0
    for n, (rows, length, table) in enumerate(picked):
        tables[n, : len(table)] = table
        sequences[n] = rows.start, rows.stop - rows.start, length
        for first in range(0, length, PART):
            parts.append((n, first, min(first + PART, length), row))
            row += (rows.stop - rows.start) * num_heads
    m, l, acc = np.empty(row, np.float32), np.empty(row, np.float32), np.empty((row, head_dim), np.float32)
    return Short(sequences, tables, np.array(parts, np.int64).reshape(-1, 4), m, l, acc)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    short: Short,
    block_size: int,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Write the rows of these sequences into `out` [T, num_heads, D]. Shapes as in `attention.Attend`; all float32."""
    if not len(short.sequences):
        return
    kernel = compiled(q.shape[2], block_size)
    threads = torch.get_num_threads()
    tensors = q.numpy(), keys.numpy(), values.numpy()
    window, factor = 2**62 if window is None else window, np.float32(scale * math.log2(math.e))
    found = short.m, short.l, short.acc
    with LOCK:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        kernel(*tensors, short.sequences, short.tables, short.parts, window, factor, *found, out.numpy())
    if torch.get_num_threads() != threads:  # numba's first call sets this for everyone who uses OpenMP
        torch.set_num_threads(threads)
