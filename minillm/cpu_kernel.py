"""Paged decode attention on a CPU, compiled by numba: `attention.paged_query` for a whole batch, in plain loops.

One task is one KV head of one sequence. It walks through the block table and reads each key and value once, where it
lies, for all query heads that share it. A task's arithmetic never depends on the other tasks or on the number of
threads, so a request's numbers do not depend on its batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from .attention import Layout

LOCK = threading.Lock()  # numba's simplest thread pool allows one caller at a time


@functools.cache
def compiled(head_dim: int, block_size: int) -> Callable[..., None]:
    """The kernel for these sizes. As constants they let the compiler unroll and vectorise the inner loops."""
    dim, size = head_dim, block_size

    # no "nnan", "ninf": masked scores are -inf
    @njit(parallel=True, fastmath={"reassoc", "contract", "arcp", "nsz"}, nogil=True, cache=True)
    def kernel(q, keys, values, starts, counts, lengths, tables, scale, window, out):
        num_kv_heads = keys.shape[1]
        share = q.shape[1] // num_kv_heads
        for task in prange(len(starts) * num_kv_heads):
            n, g = task // num_kv_heads, task % num_kv_heads
            count, length = counts[n], lengths[n]
            rows = count * share  # row r is query r // share, head g * share + r % share
            m = np.full(rows, -np.inf, np.float32)
            l = np.zeros(rows, np.float32)
            acc = np.zeros((rows, dim), np.float32)
            scores = np.empty((rows, size), np.float32)
            first = max(0, length - count - window + 1)
            for i in range(first // size, (length + size - 1) // size):
                slot, begin = tables[n, i] * size, i * size
                low, high = max(first - begin, 0), min(size, length - begin)
                for r in range(rows):
                    row, head = starts[n] + r // share, g * share + r % share
                    position = length - count + r // share
                    top = m[r]
                    for t in range(low, high):
                        x = np.float32(0.0)
                        for d in range(dim):
                            x += q[row, head, d] * keys[slot + t, g, d]
                        place = begin + t
                        x = x * scale if position - window < place <= position else np.float32(-np.inf)
                        scores[r, t] = x
                        top = max(top, x)
                    if top == -np.inf:
                        scores[r, low:high] = 0.0
                        continue
                    shrink = np.exp(m[r] - top)
                    m[r] = top
                    l[r] *= shrink
                    for d in range(dim):
                        acc[r, d] *= shrink
                    for t in range(low, high):
                        scores[r, t] = np.exp(scores[r, t] - top)
                        l[r] += scores[r, t]
                for t in range(low, high):
                    for r in range(rows):
                        for d in range(dim):
                            acc[r, d] += scores[r, t] * values[slot + t, g, d]
            for r in range(rows):
                for d in range(dim):
                    out[starts[n] + r // share, g * share + r % share, d] = acc[r, d] / l[r]

    return kernel


@dataclass
class Short:
    """The sequences of a step that the kernel takes, as arrays with one entry for each."""

    starts: np.ndarray  # row of the first query in the batch
    counts: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray  # [N, longest table], padded with block 0


def short_sequences(layout: Layout, most: int) -> Short:
    """Those with 1 to `most` queries."""
    picked = [(rows, length, table) for rows, length, table in layout.sequences() if 0 < rows.stop - rows.start <= most]
    tables = np.zeros((len(picked), max((len(table) for _, _, table in picked), default=0)), np.int64)
    for n, (_, _, table) in enumerate(picked):
        tables[n, : len(table)] = table
    starts, counts = [rows.start for rows, _, _ in picked], [rows.stop - rows.start for rows, _, _ in picked]
    lengths = [length for _, length, _ in picked]
    return Short(np.array(starts, np.int64), np.array(counts, np.int64), np.array(lengths, np.int64), tables)


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
    if not len(short.starts):
        return
    kernel = compiled(q.shape[2], block_size)
    threads = torch.get_num_threads()
    with LOCK:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        kernel(
            q.numpy(),
            keys.numpy(),
            values.numpy(),
            short.starts,
            short.counts,
            short.lengths,
            short.tables,
            np.float32(scale),
            2**62 if window is None else window,
            out.numpy(),
        )
    if torch.get_num_threads() != threads:  # numba's first call sets this for everyone who uses OpenMP
        torch.set_num_threads(threads)
