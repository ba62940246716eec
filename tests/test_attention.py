"""Paged attention against the formula, and what it must never read."""

from __future__ import annotations

import pytest
import torch

from minillm import attention, kv

HEADS = [(1, 1), (2, 1), (6, 3), (9, 3), (9, 1), (4, 4)]


def paged_case(lens: list[tuple[int, int]], heads: tuple[int, int], size: int, window: int | None, seed: int = 0):
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
        slots = torch.tensor([table[p // size] * size + p % size for p in range(context)])
        kv.write_kv(keys, k, slots)
        kv.write_kv(values, v, slots)
        tables.append([*table, 10**6])  # an entry that is never to be used
        queries.append(q)
        expected.append(attention.naive(q, k, v, attention.causal_mask(count, context, window), dim**-0.5))
    counts, contexts = zip(*lens, strict=True)
    groups = attention.make_groups(counts, contexts, tables, size, {window}, torch.float32, "cpu")
    return attention.paged(torch.cat(queries), keys, values, groups, dim**-0.5, window), torch.cat(expected)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_paged_equals_the_formula(heads, size, window) -> None:
    edges = [1, size, size + 1, 2 * size, max(1, size - 1), 3 * size + 2]
    decode = [(1, n) for n in edges]
    chunks = [(n, n + extra) for n in edges for extra in (0, 3)]
    for lens in (decode, chunks, decode + chunks):
        got, expected = paged_case(lens, heads, size, window)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


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
    from tiny import TINY

    cache = kv.KVCache(TINY, 3, 4, torch.float32, "cpu")
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.clone()
    cache.copy_block(0, 2)
    assert torch.equal(cache.data[:, :, 8:12], before[:, :, 0:4])
    assert torch.equal(cache.data[:, :, :8], before[:, :, :8]) and torch.equal(cache.data[:, :, 12:], before[:, :, 12:])
    assert cache.bytes_per_token * 4 * 4 == cache.data.numel() * 4
