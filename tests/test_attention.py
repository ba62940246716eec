"""Every attention backend against the formula, and what it must never read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import TINY, greedy_reference, run, tiny_llm, tiny_model, tokens_of

from minillm import SamplingParams, attention, kv
from minillm.errors import RequestError

HEADS = [(share * (1 + share % 3), 1 + share % 3) for share in range(1, 10)]  # 1 to 9 query heads for a KV head


def step_case(
    backend: str, lens: list[tuple[int, int]], heads: tuple[int, int], size: int, window: int | None, seed: int = 0
):
    """Random sequences in a shuffled cache that is NaN wherever nothing was written: (result, expected)."""
    random = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    dim, blocks = 8, sum(kv.blocks_needed(context, size) for _, context in lens) + 2
    order = torch.randperm(blocks, generator=random).tolist()
    keys = torch.full((blocks * size, num_kv_heads, dim), float("nan"))
    values = keys.clone()
    tables, queries, expected = [], [], []
    for count, context in lens:
        table = [order.pop() for _ in range(kv.blocks_needed(context, size))]
        q = torch.randn(count, num_heads, dim, generator=random)
        k, v = (torch.randn(context, num_kv_heads, dim, generator=random) for _ in range(2))
        slots = torch.tensor([table[p // size] * size + p % size for p in range(context)], dtype=torch.int64)
        kv.write_kv(keys, k, slots)
        kv.write_kv(values, v, slots)
        tables.append([*table, 10**6])  # an entry that is never to be used
        queries.append(q)
        expected.append(attention.naive(q, k, v, attention.causal_mask(count, context, window), dim**-0.5))
    counts, contexts = zip(*lens, strict=True)
    layout = attention.Layout(counts, contexts, tables, size)
    attend = attention.BACKENDS[backend]
    return attend(torch.cat(queries), keys, values, layout, dim**-0.5, window), torch.cat(expected)


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_every_backend_equals_the_formula(backend, size, window) -> None:
    edges = [0, 1, max(1, size - 1), size, size + 1, 2 * size, 3 * size + 2]
    decode = [(1, n) for n in edges if n]
    chunks = [(n, n + extra) for n in edges for extra in (0, 3)]
    for i, heads in enumerate(HEADS):
        got, expected = step_case(backend, (decode, chunks, decode + chunks)[i % 3], heads, size, window, seed=i)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tiles", [(1, 1), (2, 3), (5, 4), (64, 64)])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_tiled_for_any_tile_size(tiles, window) -> None:
    random = torch.Generator().manual_seed(1)
    for count, context in ((0, 4), (1, 1), (1, 11), (4, 11), (11, 11), (12, 12)):
        q = torch.randn(count, 6, 8, generator=random) * 8
        k, v = (torch.randn(context, 3, 8, generator=random) for _ in range(2))
        expected = attention.naive(q, k, v, attention.causal_mask(count, context, window), 0.5)
        got = attention.tiled(q, k, v, 0.5, window, *tiles)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_decode_reads_only_the_window_and_the_table() -> None:
    """A decode step of `paged` and `numba` touches no slot outside: those are NaN here, and a table is permuted."""
    keys = torch.full((6 * 4, 1, 8), float("nan"))
    values = keys.clone()
    table, length, window = [5, 0, 3], 10, 3
    q = torch.randn(1, 2, 8)
    for p in range(length - window, length):
        slot = table[p // 4] * 4 + p % 4
        keys[slot], values[slot] = torch.randn(1, 8), torch.randn(1, 8)
    for backend in ("paged", "numba"):
        layout = attention.Layout([1], [length], [table], 4)
        assert attention.BACKENDS[backend](q, keys, values, layout, 0.3, window).isfinite().all()


def test_unknown_backend() -> None:
    with pytest.raises(RequestError, match="attention 'flash' is unknown"):
        tiny_llm(attention="flash")
    with pytest.raises(RequestError, match="numba"):
        attention.pick("numba", torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("backend", attention.BACKENDS)
def test_the_engine_gives_the_same_tokens_on_every_backend(backend) -> None:
    prompts = [[5, 6, 7], list(range(1, 40)), [9] * 17]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = [greedy_reference(tiny_model(replace(TINY, eos_token_ids=())), p, 12) for p in prompts]
    for options in ({}, {"max_num_batched_tokens": 7}):
        llm = tiny_llm(replace(TINY, eos_token_ids=()), attention=backend, block_size=4, num_kv_blocks=64, **options)
        assert tokens_of(run(llm, prompts, params)) == [e[:12] for e in expected]


def test_mask_by_hand() -> None:
    assert attention.causal_mask(2, 3).int().tolist() == [[1, 1, 0], [1, 1, 1]]
    seen = attention.causal_mask(10, 10, 4)
    assert seen[9].nonzero().flatten().tolist() == [6, 7, 8, 9]  # a window counts the token itself
    assert [int(row.sum()) for row in seen] == [min(i + 1, 4) for i in range(10)]


def test_write_kv_changes_its_slots_only() -> None:
    cache = torch.zeros(10, 2, 3)
    new = torch.arange(12.0).view(2, 2, 3)
    kv.write_kv(cache, new, torch.tensor([7, 2]))
    assert torch.equal(cache[7], new[0]) and torch.equal(cache[2], new[1])
    assert cache.abs().sum() == new.sum()


def test_copy_block() -> None:
    cache = kv.KVCache(TINY, 3, 4, torch.float32, "cpu")
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.clone()
    cache.copy_block(0, 2)
    assert torch.equal(cache.data[:, :, 8:12], before[:, :, 0:4])
    assert torch.equal(cache.data[:, :, :8], before[:, :, :8]) and torch.equal(cache.data[:, :, 12:], before[:, :, 12:])
    assert cache.bytes_per_token * 4 * 4 == cache.data.numel() * 4
