"""GPU kernels in Triton, and the functions that launch them. Each has a twin in plain torch, named in its docstring.

Nothing here knows of requests or queues; sampling is in `gpu_sampler`. Without a GPU the same kernels run in Triton's
interpreter (TRITON_INTERPRET=1), slowly; the tests use that. Loop bounds are run-time values read from memory, so that
a kernel in a CUDA graph follows lengths that change between replays.

`PDL`: programmatic dependent launch (compute capability 9.0). A kernel may start while the one before it still runs;
it waits in `wait_for_last` before it touches anything that another kernel wrote.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .kv import LayerCache

INTERPRETED = triton.knobs.runtime.interpret
NO_TILE = 2**29  # the first query of a tile that does nothing: no sequence is so long
LONG_TILE = 128  # rows of a tile of a long sequence
FULL_SCALE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # largest number of a cache dtype that needs a scale


@functools.cache
def has_pdl(device: torch.device) -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(x: Tensor) -> dict[str, bool]:
    """What every launch of a kernel gets beside its own arguments. x: a tensor on the kernel's device."""
    return {"PDL": True, "launch_pdl": True} if has_pdl(x.device) else {"PDL": False}


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


# ---- embedding


@triton.jit
def _embed(tokens, sources, previous, table, out, size, SIZE: tl.constexpr, PDL: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    wait_for_last(PDL)
    let_next_start(PDL)
    source = tl.load(sources + row)
    token = tl.load(tokens + row)
    if source >= 0:
        token = tl.maximum(tl.load(previous + source), 0)  # -1: the step before was not finite; this row is thrown away
    values = tl.load(table + token * size + column, column < size, 0.0)
    tl.store(out + row * size + column, values, column < size)


def embed(tokens: Tensor, sources: Tensor, previous: Tensor, table: Tensor) -> Tensor:
    """Row `tokens[t]` of the table; where sources[t] >= 0 it is the row of token previous[sources[t]] instead.

    So a step can begin with the tokens that the step before has sampled, before the CPU has seen them. All int64.
    Twin: F.embedding.
    """
    size = table.shape[1]
    out = table.new_empty(len(tokens), size)
    _embed[(len(tokens),)](
        tokens, sources, previous, table, out, size, triton.next_power_of_2(size), **launch_options(table)
    )
    return out


# ---- norm, products, activation


@triton.jit
def _rms_norm(x, weight, out, size, eps, SIZE: tl.constexpr, PDL: tl.constexpr):
    """One program for each row of x: row / sqrt(mean(row ** 2) + eps) * weight, in float32, written to `out`.

    x, out: [T, size]; weight: [size]. SIZE: `size` rounded up to a power of two; `inside` marks the real columns.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = column < size
    w = tl.load(weight + column, inside, 0.0).to(tl.float32)
    wait_for_last(PDL)
    let_next_start(PDL)
    # exercise 14.1
    values = tl.load(x + row * size + column, inside, 0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values) / size + eps) * w
    tl.store(out + row * size + column, values.to(out.dtype.element_ty), inside)
    # end exercise 14.1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin: torch.nn.functional.rms_norm. x: [T, size] -> [T, size]."""
    out, size = torch.empty_like(x), x.shape[1]
    warps = 4 if size <= 4096 else 8
    _rms_norm[(len(x),)](x, weight, out, size, eps, triton.next_power_of_2(size), **launch_options(x), num_warps=warps)
    return out


@triton.jit
def _swiglu(x, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_last(PDL)
    let_next_start(PDL)
    gate = tl.load(x + row * 2 * size + column, inside, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)


def swiglu(x: Tensor) -> Tensor:
    """Twin: silu(gate) * up with gate, up = x.chunk(2, -1). x: [T, 2 * size] -> [T, size] (arXiv:2002.05202)."""
    out, block = x.new_empty(len(x), x.shape[1] // 2), 1024
    _swiglu[(len(x), triton.cdiv(out.shape[1], block))](x, out, out.shape[1], block, **launch_options(x))
    return out


@triton.jit
def _matvec(
    x, weight, bias, norm, residual, out, n_size, k_size, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    good = n < n_size
    place = weight + n.to(tl.int64)[:, None] * k_size + k[None, :]
    other = place + n_size.to(tl.int64) * k_size
    inside = good[:, None] & (k < k_size)[None, :]
    # the first tile of weights needs nothing of the kernel before: it is on its way while that one ends
    w = tl.load(place, inside, 0.0)
    u = tl.load(other, inside, 0.0) if GATED else w
    wait_for_last(PDL)
    let_next_start(PDL)
    acc, up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32), tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, k_size, BLOCK_K):
        values = tl.load(x + start + k, start + k < k_size, 0.0).to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(norm + start + k, start + k < k_size, 0.0).to(tl.float32)
        acc += w.to(tl.float32) * values[None, :]
        if GATED:
            up += u.to(tl.float32) * values[None, :]
        inside = good[:, None] & (start + BLOCK_K + k < k_size)[None, :]
        w = tl.load(place + start + BLOCK_K, inside, 0.0)
        if GATED:
            u = tl.load(other + start + BLOCK_K, inside, 0.0)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / k_size + eps)
    total = tl.sum(acc, 1) * scale
    if BIAS:
        total += tl.load(bias + n, good, 0.0).to(tl.float32)
    if GATED:
        second = tl.sum(up, 1) * scale
        if BIAS:
            second += tl.load(bias + n_size + n, good, 0.0).to(tl.float32)
        total = total * tl.sigmoid(total) * second
    if RESIDUAL:
        total += tl.load(residual + n, good, 0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), good)


def _matvec_tiles(n: int, k: int) -> tuple[int, int]:
    """Rows and columns of a tile, as measured to be fast on an H200."""
    if n >= 32768:
        return 16, 256
    if n >= 2048:
        return (4, 512) if k < 2048 else (4, 1024) if n > 4096 else (1, 512)
    return 2, min(triton.next_power_of_2(k), 2048)


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One row times a matrix, with what stands before and after it in a decoder: every weight is read once.

    x: [1, K]; weight: [N, K]; norm: (weight [K], eps) of an RMSNorm that is applied to x first. gated: the N = 2 * I
    rows are gate and up, and the result is silu(gate) * up, [1, I]. residual: [1, N], added last.
    Twin: F.linear(F.rms_norm(x), weight, bias), `swiglu`, and an addition.
    """
    n = len(weight) // 2 if gated else len(weight)
    k = weight.shape[1]
    out = torch.empty((1, n), dtype=dtype or x.dtype, device=x.device)
    block_n, block_k = _matvec_tiles(n, k)
    gain, eps = norm if norm is not None else (x, 0.0)
    _matvec[(triton.cdiv(n, block_n),)](
        x, weight, x if bias is None else bias, gain, x if residual is None else residual, out, n, k, eps,
        norm is not None, gated, bias is not None, residual is not None, block_n, block_k, **launch_options(x),
        num_warps=2,
    )  # fmt: skip
    return out


# ---- the cache


@triton.jit
def _rope_store(
    qkv, positions, slots, frequencies, q_gain, k_gain, keys, values, key_scales, value_scales, num_slots, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    NORM: tl.constexpr, FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)[None, :]
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    good = (i < DIM // 2) & (head < HEADS + 2 * KV_HEADS)
    is_query, is_key, is_value = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS), head >= HEADS + KV_HEADS
    frequency = tl.load(frequencies + i, i < DIM // 2, 0.0)
    wait_for_last(PDL)
    let_next_start(PDL)
    place = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM + i
    first = tl.load(place, good, 0.0).to(tl.float32)
    second = tl.load(place + DIM // 2, good, 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1, keep_dims=True) / DIM + eps)
        low_q, high_q = tl.load(q_gain + i, i < DIM // 2, 0.0), tl.load(q_gain + DIM // 2 + i, i < DIM // 2, 0.0)
        low_k, high_k = tl.load(k_gain + i, i < DIM // 2, 0.0), tl.load(k_gain + DIM // 2 + i, i < DIM // 2, 0.0)
        first *= tl.where(is_value, 1.0, scale * tl.where(is_query, low_q, low_k).to(tl.float32))
        second *= tl.where(is_value, 1.0, scale * tl.where(is_query, high_q, high_k).to(tl.float32))
    angle = tl.load(positions + token).to(tl.float32) * frequency
    cos, sin = tl.where(is_value, 1.0, tl.cos(angle)), tl.where(is_value, 0.0, tl.sin(angle))
    first, second = first * cos - second * sin, second * cos + first * sin
    tl.store(place, first.to(qkv.dtype.element_ty), good & is_query)
    tl.store(place + DIM // 2, second.to(qkv.dtype.element_ty), good & is_query)
    slot, kv_head = tl.load(slots + token), (head - HEADS) % KV_HEADS
    row = slot * KV_HEADS + kv_head
    if FULL > 0:
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1, keep_dims=True)
        # a maximum forgets NaN: 0 times it does not, and the step's logits tell
        scale = tl.maximum(largest, 1e-20) / FULL + tl.sum(first * 0.0 + second * 0.0, 1, keep_dims=True)
        tl.store(key_scales + kv_head * num_slots + slot, scale, is_key)
        tl.store(value_scales + kv_head * num_slots + slot, scale, is_value & (head < HEADS + 2 * KV_HEADS))
        first, second = first / scale, second / scale
        if keys.dtype.element_ty == tl.int8:
            first, second = tl.floor(first + 0.5), tl.floor(second + 0.5)
    first, second = first.to(keys.dtype.element_ty), second.to(keys.dtype.element_ty)
    tl.store(keys + row * DIM + i, first, good & is_key)
    tl.store(keys + row * DIM + DIM // 2 + i, second, good & is_key)
    tl.store(values + row * DIM + i, first, good & is_value)
    tl.store(values + row * DIM + DIM // 2 + i, second, good & is_value)


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    frequencies: Tensor,
    cache: LayerCache,
    num_heads: int,
    gains: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Norm (if `gains`) and rotate queries and keys; store keys and values in the cache. Queries stay where they are.

    qkv: [T, (num_heads + 2 * num_kv_heads) * D], changed in place; positions, slots: [T] int64; frequencies: [D / 2].
    Twin: `model.RMSNorm`, `model.rotate`, `kv.write_kv`.
    """
    _, kv_heads, dim = cache.keys.shape
    q_gain, k_gain = gains if gains is not None else (qkv, qkv)
    scales = (cache.key_scales, cache.value_scales) if cache.key_scales is not None else (qkv, qkv)
    block_h = 8 if len(qkv) > 1 else 1
    _rope_store[(len(qkv), triton.cdiv(num_heads + 2 * kv_heads, block_h))](
        qkv, positions, slots, frequencies, q_gain, k_gain, cache.keys, cache.values, *scales, len(cache.keys), eps,
        num_heads, kv_heads, dim, triton.next_power_of_2(dim // 2), block_h, gains is not None,
        FULL_SCALE.get(cache.keys.dtype, 0.0), **launch_options(qkv), num_warps=1,
    )  # fmt: skip


# ---- attention


@triton.jit
def online_softmax(m, l, scores):
    """One tile of an online softmax, in base 2: the twin of `attention.online_update`.

    m, l: [R], the largest score so far and the sum of exp2(score - m); scores: [R, C], -inf where a key may not be
    seen. Returns the new m and l, the tile's weights [R, C], and the factor [R] that older sums shrink by.
    """
    # exercise 14.2
    new_m = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(new_m == float("-inf"), 0.0, new_m)  # nothing seen yet: -inf + inf would be NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(m - base)
    return new_m, l * shrink + tl.sum(weights, 1), weights, shrink
    # end exercise 14.2


@triton.jit
def _unpack(words, FP8: tl.constexpr, ASM: tl.constexpr):
    """Words of two int8 or fp8 numbers to two float16 tensors, low bytes and high bytes; fp8 comes out times 2**-8.

    A multiprocessor converts such numbers slowly, and moves single bytes slowly, so it is done on bits, two words at
    once. fp8 (e4m3) is float16 with a shorter exponent; 1024 + 128 + x in float16 has x + 128 as its low byte.
    """
    if ASM:
        if FP8:
            low, high = tl.inline_asm_elementwise(
                """{ .reg .b32 a, b;
                shl.b32 a, $2, 8; and.b32 a, a, 0x80008000; shl.b32 b, $2, 7;
                and.b32 b, b, 0x3f803f80; or.b32 $0, a, b;
                and.b32 a, $2, 0x80008000; shr.u32 b, $2, 1; and.b32 b, b, 0x3f803f80; or.b32 $1, a, b; }""",
                "=r,=r,r", [words], (tl.float16, tl.float16), True, 2,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                """{ .reg .b32 a, h, o;
                mov.b32 h, 0x64646464; mov.b32 o, 0x64806480; xor.b32 a, $2, 0x80808080;
                prmt.b32 $0, a, h, 0x4240; sub.rn.f16x2 $0, $0, o;
                prmt.b32 a, a, h, 0x4341; sub.rn.f16x2 $1, a, o; }""",
                "=&r,=r,r", [words], (tl.float16, tl.float16), True, 2,
            )  # fmt: skip
    else:
        wide = words.to(tl.int32)
        if FP8:
            low = (((wide << 8) & 0x8000) | ((wide << 7) & 0x3F80)).to(tl.int16).to(tl.float16, bitcast=True)
            high = ((wide & 0x8000) | ((wide >> 1) & 0x3F80)).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            low, high = ((wide << 24) >> 24).to(tl.float16), (wide >> 8).to(tl.float16)
    return low, high


@triton.jit
def cache_rows(table, key, inside, g, PAGE: tl.constexpr, KV_HEADS: tl.constexpr):
    """Where a KV head's keys at these positions are: rows of the cache seen as [num_slots * num_kv_heads, D].

    table: pointer to the sequence's block table; key: [C] positions; inside: [C], False where there is none (there the
    table must not be read); g: the KV head. Returns int64 [C]. The twin of `kv.slots_for`.
    """
    # exercise 14.3
    page = tl.load(table + key // PAGE, inside, 0).to(tl.int64)
    return (page * PAGE + key % PAGE) * KV_HEADS + g
    # end exercise 14.3


@triton.jit
def _attention(
    q, keys, values, key_scales, value_scales, out, parts, parts_lse,
    tile_sequence, tile_first, starts, counts, lengths, seats, tables, scale, window, q_stride, table_stride, num_slots,
    num_splits, KV_HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, WORDS: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # PACKED: a word of the cache is two numbers. Small tiles then compute two half-sized products, of even and of odd
    # dimensions (HALVES), so that what was unpacked stays in registers; large ones put the numbers in order again.
    WIDTH: tl.constexpr = 2 if PACKED else 1
    HALVES: tl.constexpr = PACKED and BLOCK_M < 64
    STEP: tl.constexpr = 2 if HALVES else 1
    # small weights times small scales are too small for float16; with this, values up to 8,000 are not too large
    LIFT: tl.constexpr = 1024.0
    COLUMNS: tl.constexpr = WORDS * WIDTH // STEP
    WHOLE: tl.constexpr = WORDS * WIDTH == DIM
    # neighbours are the KV heads of one sequence: what they read lies side by side
    g, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, columns, words, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, WORDS), tl.arange(0, COLUMNS)
    full = words < DIM // WIDTH
    inner = d < DIM // STEP
    sequence = tl.load(tile_sequence + tile)
    first, count, length = tl.load(tile_first + tile), tl.load(counts + sequence), tl.load(lengths + sequence)
    table = tables + tl.load(seats + sequence).to(tl.int64) * table_stride
    # all query heads that share a KV head are rows of one tile: keys and values are read once for them
    query = first + rows // SHARE
    good = (rows < BLOCK_M // SHARE * SHARE) & (query < count)
    position = length - count + query
    token = (tl.load(starts + sequence) + query).to(tl.int64)
    head = g * SHARE + rows % SHARE
    keep = good[:, None] & inner[None, :]
    wait_for_last(PDL)
    let_next_start(PDL)
    place_q = q + token[:, None] * q_stride + head[:, None] * DIM + d[None, :] * STEP
    q0 = tl.load(place_q, keep, 0.0)
    if PACKED:
        q0 = q0.to(tl.float16)
    acc0 = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    if HALVES:
        q1 = tl.load(place_q + 1, keep, 0.0).to(tl.float16)
        acc1 = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    m, l = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    end = tl.where(first < count, length - count + tl.minimum(first + BLOCK_M // SHARE, count), 0)
    low = tl.maximum(length - count + first - window + 1, 0) // BLOCK_N * BLOCK_N if WINDOW else 0
    per_split = tl.cdiv(tl.cdiv(end - low, BLOCK_N), num_splits) * BLOCK_N
    low = low + split * per_split
    for j in range(low, tl.minimum(low + per_split, end), BLOCK_N):
        key = j + columns
        # beyond the end the last key is read again, and not seen: no load needs a mask
        there = tl.minimum(key, end - 1)
        row = cache_rows(table, there, there >= 0, g, PAGE, KV_HEADS)
        where = row[:, None] * (DIM // WIDTH) + words[None, :]
        if WHOLE:
            k, v = tl.load(keys + where), tl.load(values + where)
        else:
            k, v = tl.load(keys + where, full[None, :], 0), tl.load(values + where, full[None, :], 0)
        if PACKED:
            k0, k1 = _unpack(k, FP8, ASM)
            v0, v1 = _unpack(v, FP8, ASM)
            if not HALVES:
                k, v = tl.join(k0, k1).reshape(BLOCK_N, COLUMNS), tl.join(v0, v1).reshape(BLOCK_N, COLUMNS)
        if HALVES:
            scores = tl.dot(q1, tl.trans(k1), tl.dot(q0, tl.trans(k0)))
        else:
            scores = tl.dot(q0, tl.trans(k), input_precision=PRECISION)
        factor = scale * 1.4426950408889634  # log2(e)
        if PACKED:
            place_scale = g.to(tl.int64) * num_slots + row // KV_HEADS
            scores *= (tl.load(key_scales + place_scale) * factor)[None, :]
        else:
            scores *= factor
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        m, l, weights, shrink = online_softmax(m, l, tl.where(seen, scores, float("-inf")))
        if PACKED:
            weights = (weights * (tl.load(value_scales + place_scale) * LIFT)[None, :]).to(tl.float16)
        if HALVES:
            acc0 = tl.dot(weights, v0, acc0 * shrink[:, None])
            acc1 = tl.dot(weights, v1, acc1 * shrink[:, None])
        else:
            acc0 = tl.dot(weights.to(v.dtype), v, acc0 * shrink[:, None], input_precision=PRECISION)
    total = tl.where(l == 0.0, 1.0, l)[:, None]
    if PACKED:
        total *= LIFT * 0.00390625 if FP8 else LIFT  # 2**-8 is what _unpack left out
    row_out = token * (KV_HEADS * SHARE) + head
    if not SPLIT:
        place_out = out + row_out[:, None] * DIM + d[None, :] * STEP
        tl.store(place_out, (acc0 / total).to(out.dtype.element_ty), keep)
        if HALVES:
            tl.store(place_out + 1, (acc1 / total).to(out.dtype.element_ty), keep)
    else:
        row_out = row_out * num_splits + split
        place_part = parts + row_out[:, None] * DIM + d[None, :] * STEP
        tl.store(place_part, acc0 / total, keep)
        if HALVES:
            tl.store(place_part + 1, acc1 / total, keep)
        tl.store(parts_lse + row_out, tl.where(l == 0.0, float("-inf"), m + tl.log2(l)), good)


@triton.jit
def merge_parts(each, lse):
    """Attention over a whole context from its parts (Flash-Decoding, 2023): [S, D] and [S] to [D].

    each: every part's own output, normalised; lse: log2 of its sum of exp2(scores), -inf if it had no keys.
    """
    # exercise 14.4
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    return tl.sum(each * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    # end exercise 14.4


@triton.jit
def _combine(parts, parts_lse, out, SPLITS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PDL: tl.constexpr):
    row, split, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, DIM_PAD)
    wait_for_last(PDL)
    let_next_start(PDL)
    lse = tl.load(parts_lse + row * SPLITS + split)
    each = tl.load(parts + (row * SPLITS + split)[:, None] * DIM + d[None, :], (d < DIM)[None, :], 0.0)
    tl.store(out + row * DIM + d, merge_parts(each, lse).to(out.dtype.element_ty), d < DIM)


@dataclass
class Tiles:
    """What the attention kernel reads about a step; all int32 on the device.

    starts, counts, lengths, seats: [N], for each sequence its first row in the batch, its number of queries, its
    context length with them, and its row in `tables` [seats, pages]. sequence, first: [number of tiles], the sequence
    of a tile and its first query in it; a tile that begins behind the last query does nothing (NO_TILE). block_m: rows
    of a tile, queries times heads that share a KV head. long: sequence and first of tiles of LONG_TILE rows.
    splits: parts in which each context is read, so that a few long sequences keep the whole GPU busy.
    """

    starts: Tensor
    counts: Tensor
    lengths: Tensor
    seats: Tensor
    tables: Tensor
    sequence: Tensor
    first: Tensor
    block_m: int = 16
    splits: int = 1
    long: tuple[Tensor, Tensor] | None = None


def paged_attention(
    qkv: Tensor,
    cache: LayerCache,
    tiles: Tiles,
    out: Tensor,
    page_size: int,
    num_heads: int,
    scale: float,
    window: int | None,
) -> None:
    """Causal attention of the sequences in `tiles`, read through their block tables. Twin: `attention.paged_query`.

    qkv: [T, >= num_heads * D], the queries first in each row; out: [T, num_heads * D]. Rows of `out` that belong to no
    tile are left as they are (with splits: anything); a sequence with no query or no context writes nothing or zeros.
    With splits, each part leaves its own output and log-sum-exp, and `_combine` weighs them (Flash-Decoding, 2023).
    """
    _, kv_heads, dim = cache.keys.shape
    share, splits, precise = num_heads // kv_heads, tiles.splits, "ieee" if qkv.dtype == torch.float32 else "tf32"
    packed, fp8 = cache.keys.dtype in FULL_SCALE, cache.keys.dtype == torch.float8_e4m3fn
    keys, values, width = cache.keys, cache.values, dim
    scales: tuple[Tensor | None, Tensor | None] = (out, out)
    if packed:
        keys, values, width = keys.view(torch.int16), values.view(torch.int16), dim // 2
        scales = (cache.key_scales, cache.value_scales)
        scale = scale * 256.0 if fp8 else scale  # see _unpack
    words, parts, lse = max(16, triton.next_power_of_2(width)), out, out
    if splits > 1:
        parts = torch.empty((*out.shape, splits), dtype=torch.float32, device=out.device)
        lse = torch.empty((len(out) * num_heads, splits), dtype=torch.float32, device=out.device)
    groups = [(tiles.sequence, tiles.first, tiles.block_m)]
    groups += [(*tiles.long, LONG_TILE)] if tiles.long is not None else []
    for sequence, first, block_m in groups:
        # as measured to be fast on an H200: long tiles of keys move more bytes at a time, short ones leave work for
        # every part; fewer registers let more programs run on a multiprocessor
        if block_m > 64:
            block_n, warps, stages, registers = 32, 4 if packed else 8, 2, None
        else:
            block_n, warps, stages, registers = 128 if splits <= 4 else 64, 4, 2, 128 if packed else None
        block_n //= 2 if qkv.dtype == torch.float32 else 1  # shared memory
        _attention[(kv_heads, len(sequence), splits)](
            qkv, keys, values, *scales, out, parts, lse, sequence, first, tiles.starts, tiles.counts, tiles.lengths,
            tiles.seats, tiles.tables, scale, window or 0, qkv.stride(0), tiles.tables.stride(0), len(cache.keys),
            splits, kv_heads, share, dim, words, page_size, splits > 1, window is not None, block_m, block_n, packed,
            fp8, not INTERPRETED, precise, **launch_options(qkv), num_warps=warps, num_stages=stages, maxnreg=registers,
        )  # fmt: skip
    if splits > 1:
        _combine[(len(out) * num_heads,)](
            parts, lse, out, splits, dim, triton.next_power_of_2(dim), **launch_options(qkv), num_warps=1
        )
