"""The Triton kernels against their twins in torch: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from minillm import attention, gpu_sampler, kernels, kv, sampler  # noqa: E402
from minillm.metrics import RequestMetrics  # noqa: E402
from minillm.model import rotate  # noqa: E402
from minillm.request import Request, SamplingParams  # noqa: E402

# bfloat16's tl.dot is wrong in the interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DTYPES = [torch.float32, HALF]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 1e-2}


@pytest.fixture
def draw():
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    return normal


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape and torch.isfinite(got.float()).all()
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 100, 129])
def test_rms_norm(draw, dtype, size) -> None:
    x, weight = draw(3, size, dtype=dtype), draw(size, dtype=dtype)
    assert_close(kernels.rms_norm(x, weight, 1e-5), F.rms_norm(x, (size,), weight, 1e-5), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 1025])
def test_swiglu(draw, dtype, size) -> None:
    x = draw(3, 2 * size, dtype=dtype)
    gate, up = x.float().chunk(2, -1)
    assert_close(kernels.swiglu(x), F.silu(gate) * up, TOLERANCE[dtype])


@pytest.mark.parametrize("n, k", [(5, 7), (12, 64), (10, 1030)])
@pytest.mark.parametrize("norm, gated, bias, residual", [(0, 0, 0, 0), (1, 0, 1, 0), (0, 0, 1, 1), (1, 1, 1, 0)])
def test_matvec(draw, n, k, norm, gated, bias, residual) -> None:
    x, weight, gain = draw(1, k, dtype=HALF), draw(n * (1 + gated), k, dtype=HALF) / k**0.5, draw(k, dtype=HALF)
    offset = draw(len(weight), dtype=HALF) if bias else None
    rest = draw(1, n, dtype=HALF) if residual else None
    want = F.rms_norm(x.float(), (k,), gain.float(), 1e-5) if norm else x.float()
    want = F.linear(want, weight.float(), None if offset is None else offset.float())
    if gated:
        gate, up = want.chunk(2, -1)
        want = F.silu(gate) * up
    want = want + rest if residual else want
    got = kernels.matvec(x, weight, offset, (gain, 1e-5) if norm else None, bool(gated), rest, torch.float32)
    assert got.dtype == torch.float32
    assert_close(got, want, TOLERANCE[HALF])


def test_embed_takes_the_step_befores_tokens(draw) -> None:
    def ids(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    table = draw(9, 20)
    got = kernels.embed(ids(3, 0, 8), ids(-1, 1, -1), ids(6, 5), table)
    assert torch.equal(got, table[ids(3, 5, 8)])
    assert torch.equal(kernels.embed(ids(4), ids(0), ids(-1), table), table[:1])  # a row that is thrown away


def pages(lengths: list[int], size: int, spread: bool = True) -> tuple[list[list[int]], int]:
    """Block tables in random order, one block of each left over, and the number of blocks."""
    counts = [kv.blocks_needed(length, size) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    tables = []
    for count in counts:
        tables.append(order[:count])
        order = order[count:]
    return tables, sum(counts) + 2


def tiles_of(counts, lengths, tables, share, block_m, splits):
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    block_m = max(block_m, triton.next_power_of_2(share))
    per_tile = block_m // share
    pairs = [(i, first) for i, count in enumerate(counts) for first in range(0, count, per_tile)]
    # seats in another order than sequences; what a table's row holds beyond its blocks must not matter
    seats = list(range(len(tables)))[::-1]
    rows = torch.full((len(tables), max(map(len, tables)) + 1), 2**30, dtype=torch.int32, device=DEVICE)
    for i, table in enumerate(tables):
        rows[seats[i], : len(table)] = ints(table)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    sequence, first = ints([i for i, _ in pairs]), ints([q for _, q in pairs])
    return kernels.Tiles(
        ints(starts), ints(counts), ints(lengths), ints(seats), rows, sequence, first, block_m, splits
    )  # fmt: skip


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter can watch memory, a GPU cannot")
def test_cache_rows_reads_only_the_table() -> None:
    """Positions beyond the context have no page: the table must not be read for them (strict: an IndexError)."""
    from minillm.course.stages.s14_gpu_kernels.interpreted import run_cache_rows

    table, key = torch.tensor([5, 2], dtype=torch.int32), torch.arange(16, dtype=torch.int32)
    rows = run_cache_rows(kernels.cache_rows, table, key, key < 7, 1, 4, 3)
    want = [slot * 3 + 1 for slot in kv.slots_for([5, 2], 0, 7, 4)]
    assert rows.tolist() == want + [-1] * 9


SHAPES = [  # heads, KV heads, head size, page size, window
    (6, 2, 16, 16, None),
    (9, 1, 8, 1, None),
    (4, 4, 20, 4, 5),
    (7, 7, 64, 16, 70),
    (3, 1, 32, 8, 1),
]


@pytest.mark.parametrize("heads, kv_heads, dim, page, window", SHAPES)
@pytest.mark.parametrize("block_m, splits", [(8, 1), (16, 4), (64, 1)])
def test_paged_attention(draw, heads, kv_heads, dim, page, window, block_m, splits) -> None:
    """Ragged batch, permuted tables, NaN in every slot that is not in use, lengths around block and tile sizes."""
    lengths, counts = [1, page, page + 1, 64, 65, 130], [1, 1, min(2, page + 1), 9, 1, 4]
    tables, num_blocks = pages(lengths, page)
    keys = torch.full((num_blocks * page, kv_heads, dim), float("nan"), device=DEVICE)
    values = keys.clone()
    for table, length in zip(tables, lengths, strict=True):
        slots = torch.tensor(kv.slots_for(table, 0, length, page), device=DEVICE)
        keys[slots], values[slots] = draw(length, kv_heads, dim), draw(length, kv_heads, dim)
    q = draw(sum(counts), (heads + 2 * kv_heads) * dim)
    out = torch.full((sum(counts), heads * dim), float("nan"), device=DEVICE)
    tiles = tiles_of(counts, lengths, tables, heads // kv_heads, block_m, splits)
    kernels.paged_attention(q, kv.LayerCache(keys, values), tiles, out, page, heads, dim**-0.5, window)
    layout = attention.Layout(counts, lengths, tables, page)
    queries = q[:, : heads * dim].unflatten(1, (heads, dim))
    want = attention.each_paged(queries.cpu(), keys.cpu(), values.cpu(), layout, dim**-0.5, window)
    assert_close(out.cpu(), want.flatten(1), 1e-5)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads, kv_heads, dim, page, window", [s for s in SHAPES if s[2] >= 16])
def test_eight_bit_cache(draw, kind, heads, kv_heads, dim, page, window) -> None:
    """What `rope_store` writes, `paged_attention` reads back: attention over exactly the numbers that were stored."""
    lengths = [1, page + 1, 40]
    tables, num_blocks = pages(lengths, page)
    slots = torch.tensor([s for t, n in zip(tables, lengths, strict=True) for s in kv.slots_for(t, 0, n, page)])
    cache = kv.LayerCache(
        *(torch.full((num_blocks * page, kv_heads, dim), -1.0, device=DEVICE).to(kind) for _ in range(2)),
        *(torch.full((kv_heads, num_blocks * page), float("nan"), device=DEVICE) for _ in range(2)),
    )
    total = sum(lengths)
    qkv = draw(total, (heads + 2 * kv_heads) * dim) * torch.logspace(-3, 3, total, device=DEVICE)[:, None]
    plain = qkv.clone()
    zeros = torch.zeros(dim // 2, device=DEVICE)
    positions = torch.tensor([p for n in lengths for p in range(n)], device=DEVICE)
    kernels.rope_store(qkv, positions, slots.to(DEVICE), zeros, cache, heads)
    assert torch.equal(qkv, plain)  # no rotation: queries as they were
    stored = []
    for data, scales, first in (
        (cache.keys, cache.key_scales, heads),
        (cache.values, cache.value_scales, heads + kv_heads),
    ):
        number = data.float() * scales.t()[..., None]
        wanted = plain.unflatten(1, (-1, dim))[:, first : first + kv_heads]
        if kind != torch.int8 and DEVICE == "cpu":  # the interpreter does not round to fp8 as a GPU does: torch does it
            scales[:, slots] = wanted.abs().amax(-1).t() / 448.0
            data[slots] = (wanted / scales[:, slots].t()[..., None]).to(kind)
            number = data.float() * scales.t()[..., None]
        step = wanted.abs().amax(-1, keepdim=True) / (254 if kind == torch.int8 else 28)  # half a step of the largest
        assert ((number[slots] - wanted).abs() <= step * 1.001).all()
        stored.append(number)
    counts = [1, 1, 3]
    rows = torch.tensor([0, page + 1, total - 3, total - 2, total - 1])
    out = torch.empty(len(rows), heads * dim, device=DEVICE)
    q = (plain[rows] / plain[rows].abs().amax()).contiguous()
    layout = attention.Layout(counts, lengths, tables, page)
    queries = q[:, : heads * dim].unflatten(1, (heads, dim))
    want = attention.each_paged(queries.cpu(), stored[0].cpu(), stored[1].cpu(), layout, dim**-0.5, window)
    for block_m in (8, 16, kernels.LONG_TILE):
        tiles = tiles_of(counts, lengths, tables, heads // kv_heads, block_m, 1)
        kernels.paged_attention(q, cache, tiles, out.fill_(float("nan")), page, heads, dim**-0.5, window)
        assert_close(out.cpu(), want.flatten(1), 5e-3)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("block_m", [8, kernels.LONG_TILE])
def test_a_long_tail_of_small_weights_counts(kind, block_m) -> None:
    """One key takes nearly all of the weight, and its value is 0; left are many small weights of small values."""
    dim, length, page = 16, 1024, 16
    keys, values = torch.zeros(length, 1, dim, device=DEVICE), torch.full((length, 1, dim), 0.1, device=DEVICE)
    keys[0], values[0] = 2.5, 0.0
    full = kernels.FULL_SCALE[kind]
    scales = [torch.full((1, length), top / full, device=DEVICE) for top in (2.5, 0.1)]
    packed = [(x / s[0, 0]).round().to(kind) for x, s in zip((keys, values), scales, strict=True)]
    cache = kv.LayerCache(packed[0], packed[1], scales[0], scales[1])
    q, out = torch.ones(1, 3 * dim, device=DEVICE), torch.empty(1, dim, device=DEVICE)
    tiles = tiles_of([1], [length], [list(range(length // page))], 1, block_m, 1)
    kernels.paged_attention(q, cache, tiles, out, page, 1, 0.25, None)
    tail = (length - 1) / (length - 1 + torch.tensor(2.5 * dim * 0.25).exp().item())
    assert_close(out, torch.full_like(out, 0.1 * tail), 0.02)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads, kv_heads, dim", [(6, 2, 16), (9, 1, 20), (1, 1, 2)])
def test_rope_store(draw, normed, heads, kv_heads, dim) -> None:
    tokens, slots = 3, torch.tensor([7, 0, 4], device=DEVICE)
    qkv, gains = draw(tokens, (heads + 2 * kv_heads) * dim), (draw(dim), draw(dim)) if normed else None
    q, k, v = qkv.clone().unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], 1)
    positions = torch.tensor([0, 5, 3000], device=DEVICE)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
    keys = torch.full((9, kv_heads, dim), float("nan"), device=DEVICE)
    cache = kv.LayerCache(keys, keys.clone())
    kernels.rope_store(qkv, positions, slots, frequencies, cache, heads, gains, 1e-6)
    if gains is not None:
        q, k = (F.rms_norm(x, (dim,), gain, 1e-6) for x, gain in zip((q, k), gains, strict=True))
    angles = (positions[:, None].float() * frequencies)[:, None]
    assert_close(qkv[:, : heads * dim], rotate(q, angles.cos(), angles.sin()).flatten(1), 1e-5)
    assert_close(cache.keys[slots], rotate(k, angles.cos(), angles.sin()), 1e-5)
    assert torch.equal(cache.values[slots], v)
    others = [slot for slot in range(9) if slot not in slots.tolist()]
    assert cache.keys[others].isnan().all() and cache.values[others].isnan().all()


def requests_for(cases: list[dict], trial: int) -> list[Request]:
    return [
        Request("x", [1] * (3 + i + trial), SamplingParams(**case), RequestMetrics(0.0), num_prompt=1)
        for i, case in enumerate(cases)
    ]


CASES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_k": 1},
]


def draws_of(requests: list[Request], seeds: list[int]) -> gpu_sampler.Draws:
    for request, seed in zip(requests, seeds, strict=True):
        request.seed = seed
    return gpu_sampler.Draws.of(requests, 1000, DEVICE)


@pytest.mark.parametrize("trial", range(4))
def test_sample_draws_what_the_sampler_draws(draw, trial) -> None:
    size, num_ids, requests = 1100, 1090, requests_for(CASES, trial)
    logits = draw(len(CASES), size) * 3
    logits = logits.round() if trial % 2 else logits  # many ties
    seeds = [100 * trial + 7 * i + 2**62 * (i % 2) for i in range(len(CASES))]
    draws, out = draws_of(requests, seeds), torch.full((len(CASES),), -7, device=DEVICE)
    want = sampler.sample(logits.clone(), requests, num_ids)
    gpu_sampler.sample(logits, draws, num_ids, out)
    assert out.tolist() == want


def test_sample_tells_what_is_not_finite(draw) -> None:
    logits = draw(len(CASES), 60)
    logits[1, 5], logits[2, 9], logits[3, 8], logits[4, 59] = float("nan"), float("inf"), -float("inf"), float("nan")
    logits[5] = -float("inf")
    out = torch.zeros(len(CASES), dtype=torch.int64, device=DEVICE)
    gpu_sampler.sample(logits, draws_of(requests_for(CASES, 0), list(range(len(CASES)))), 59, out)
    assert [token == -1 for token in out.tolist()] == [False, True, True, False, False, True, False, False]


def test_sample_stays_within_its_arrays_where_all_is_nan() -> None:
    """Padding rows may be all NaN. 2,500 ids are three blocks, and a maximum over four has no place that is right."""
    requests = requests_for([{}, {"temperature": 1.0}], 0)
    out = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    gpu_sampler.sample(torch.full((2, 2500), float("nan"), device=DEVICE), draws_of(requests, [0, 1]), 2500, out)
    assert out.tolist() == [-1, -1]


def test_gumbel_noise_has_no_holes_at_its_ends() -> None:
    """The largest noise comes from numbers next to 1, where float32's logarithm needs care."""
    ids = torch.arange(4096, device=DEVICE)
    noise = sampler.gumbel_noise(torch.tensor([5], device=DEVICE), torch.tensor([9], device=DEVICE), 4096)[0]
    best = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for part in noise.topk(8).indices.tolist():  # make each of the largest win, by a hair
        logits = torch.full((1, 4096), -30.0, device=DEVICE)
        logits[0, part] = 0.0
        runner_up = int(ids[(part + 1) % 4096])
        logits[0, runner_up] = float(noise[part] - noise[runner_up]) - 1e-3
        request = requests_for([{"temperature": 1.0}], 6)[0]
        assert len(request.tokens) == 9
        gpu_sampler.sample(logits, draws_of([request], [5]), 4096, best)
        assert best.item() == part
