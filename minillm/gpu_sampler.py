"""Sampling on the GPU, without a full sort and without waiting for the GPU: the twin of `sampler`, in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import launch_options, let_next_start, wait_for_last
from .request import Request


@triton.jit
def _sort_key(x):
    """An int32 that orders float32 numbers as their values."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser, as in `sampler`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(seed, position, ids):
    """`sampler.gumbel_noise`. The GPU's fast logarithm is rough near 1, where the largest noise is: a series there."""
    bits = (_mix(_mix(_mix(seed) + position) + ids.to(tl.int64) * -7046029254386353131) >> 41) & 0x7FFFFF
    uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
    rest = (8388608 - bits).to(tl.float32) * 1.1920928955078125e-07 - 5.960464477539063e-08  # 1 - uniform
    series = 1.0 + rest * (0.5 + rest * (1 / 3 + rest * (0.25 + rest * (0.2 + rest / 6))))
    minus_log = tl.where(rest < 0.0625, rest * series, -tl.log(uniform))
    return -tl.log(minus_log)


@triton.jit
def _total(
    row, low, high, id_end, temperature, peak, size, floor_key, floor_id, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Count (or probability mass, not normalised) of the row's kept tokens with key in low..high and id below id_end.

    Kept is what earlier filters left: keys above floor_key, and equal keys up to id floor_id.
    """
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tl.minimum(size, id_end), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = tl.load(row + ids, ids < size, float("-inf")) / temperature
        key = _sort_key(scaled)
        kept = (key > floor_key) | ((key == floor_key) & (ids <= floor_id))
        kept = kept & (key >= low) & (key <= high) & (ids < id_end) & (ids < size)
        if MASS:
            total += tl.where(kept, tl.exp(scaled - peak), 0.0)
        else:
            total += tl.where(kept, 1.0, 0.0)
    return tl.sum(total)


@triton.jit
def _tighten(row, goal, temperature, peak, size, floor_key, floor_id, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Take kept tokens from the top until `goal` (a count, or a mass) is reached: (key, id) of the last one taken."""
    low, high = tl.full((), -2147483648, tl.int64), tl.full((), 2147483646, tl.int64)
    while low < high:  # the smallest key whose larger keys alone do not reach the goal
        middle = (low + high) >> 1
        start = (middle + 1).to(tl.int32)
        if _total(row, start, 2147483647, size, temperature, peak, size, floor_key, floor_id, MASS, BLOCK) < goal:
            high = middle
        else:
            low = middle + 1
    key = low.to(tl.int32)
    above = _total(row, key + 1, 2147483647, size, temperature, peak, size, floor_key, floor_id, MASS, BLOCK)
    first, last = tl.full((), 0, tl.int32), size - 1
    while first < last:  # among equals the lower id first: the smallest id with which the goal is reached
        half = (first + last) >> 1
        if above + _total(row, key, key, half + 1, temperature, peak, size, floor_key, floor_id, MASS, BLOCK) < goal:
            first = half + 1
        else:
            last = half
    if key == floor_key:
        first = tl.minimum(first, floor_id)
    return tl.maximum(key, floor_key), tl.where(key < floor_key, floor_id, first)


@triton.jit
def _filter(
    logits, temperatures, top_ks, top_ps, min_ps, floor_keys, floor_ids, size, stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For each row the last token that may be drawn, as (key, id), by bisection: nothing is sorted."""
    r = tl.program_id(0)
    wait_for_last(PDL)
    row = logits + r.to(tl.int64) * stride
    temperature, top_k = tl.load(temperatures + r), tl.load(top_ks + r)
    top_p, min_p = tl.load(top_ps + r), tl.load(min_ps + r)
    floor_key, floor_id = tl.full((), -2147483648, tl.int32), tl.full((), 2147483647, tl.int32)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        temperature = tl.minimum(tl.maximum(temperature, 1e-5), 1e30)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(row + ids, ids < size, float("-inf")))
        peak = tl.max(best) / temperature
        if (top_k > 0) & (top_k < size):
            goal = top_k.to(tl.float32)
            floor_key, floor_id = _tighten(row, goal, temperature, peak, size, floor_key, floor_id, False, BLOCK)
        if top_p < 1.0:
            goal = _total(row, -2147483648, 2147483647, size, temperature, peak, size, floor_key, floor_id, True, BLOCK)
            goal = tl.maximum(goal * top_p, 1e-30)
            floor_key, floor_id = _tighten(row, goal, temperature, peak, size, floor_key, floor_id, True, BLOCK)
        if min_p > 0.0:
            key = _sort_key(peak + tl.log(min_p))
            floor_id = tl.where(key > floor_key, 2147483647, floor_id)
            floor_key = tl.maximum(key, floor_key)
    tl.store(floor_keys + r, floor_key)
    tl.store(floor_ids + r, floor_id)


@triton.jit
def _draw(
    logits, temperatures, seeds, positions, floor_keys, floor_ids, best, best_ids, bad, size, stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    wait_for_last(PDL)
    let_next_start(PDL)
    x = tl.load(logits + r.to(tl.int64) * stride + ids, ids < size, float("-inf"))
    tl.store(bad + r * parts + part, tl.max(((x != x) | (x == float("inf"))).to(tl.int32)))
    temperature = tl.load(temperatures + r)
    if temperature > 0.0:
        x = x / tl.minimum(tl.maximum(temperature, 1e-5), 1e30)
        key, floor = _sort_key(x), tl.load(floor_keys + r)
        kept = (key > floor) | ((key == floor) & (ids <= tl.load(floor_ids + r)))
        x = tl.where(kept, x + _gumbel(tl.load(seeds + r), tl.load(positions + r), ids), float("-inf"))
    value, where = tl.max(x, 0, return_indices=True)
    tl.store(best + r * parts + part, value)
    tl.store(best_ids + r * parts + part, part * BLOCK + where)


@triton.jit
def _pick(best, best_ids, bad, out, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    r, i = tl.program_id(0), tl.arange(0, PARTS)
    wait_for_last(PDL)
    value, where = tl.max(tl.load(best + r * parts + i, i < parts, float("-inf")), 0, return_indices=True)
    wrong = tl.max(tl.load(bad + r * parts + i, i < parts, 0)) | (value == float("-inf")).to(tl.int32)
    token = tl.load(best_ids + r * parts + tl.minimum(where, parts - 1))  # all NaN: the place may be anywhere
    tl.store(out + r, tl.where(wrong > 0, -1, token).to(tl.int64))


@dataclass
class Draws:
    """How each row is drawn: [R] each. seeds, positions: int64; top_ks: int32 (0: all); the others float32."""

    seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request], num_ids: int, device: torch.device | str) -> Draws:
        """The next draw of each."""
        rows = [(r.seed, len(r.tokens), min(r.params.top_k, num_ids)) for r in requests]
        seeds, positions, top_ks = torch.tensor(rows, device=device).T.contiguous()
        floats = [(r.params.temperature, r.params.top_p, r.params.min_p) for r in requests]
        temperatures, top_ps, min_ps = torch.tensor(floats, dtype=torch.float32, device=device).T.contiguous()
        return cls(seeds, positions, temperatures, top_ks.int(), top_ps, min_ps)


def sample(logits: Tensor, draws: Draws, num_ids: int, out: Tensor) -> None:
    """One token id for each row of logits [R, V] float32, into out [R] int64; -1 where they are not finite.

    Nothing waits for the GPU. Temperature, top-k, top-p, min-p and noise as in `sampler.sample`, its twin; ids from
    num_ids on are never chosen.
    """
    count, block = len(logits), 1024
    parts = triton.cdiv(num_ids, block)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    floor_keys, floor_ids = empty(count), empty(count)
    best, best_ids, bad = empty(count, parts, dtype=torch.float32), empty(count, parts), empty(count, parts)
    pdl = launch_options(logits)
    _filter[(count,)](
        logits, draws.temperatures, draws.top_ks, draws.top_ps, draws.min_ps, floor_keys, floor_ids, num_ids,
        logits.stride(0), 4096, **pdl, num_warps=16,
    )  # fmt: skip
    _draw[(count, parts)](
        logits, draws.temperatures, draws.seeds, draws.positions, floor_keys, floor_ids, best, best_ids, bad, num_ids,
        logits.stride(0), block, **pdl,
    )  # fmt: skip
    _pick[(count,)](best, best_ids, bad, out, parts, triton.next_power_of_2(parts), **pdl, num_warps=1)
