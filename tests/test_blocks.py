"""The block pool: hand out, share, find again, evict. Case numbers are those of public bug reports (see each test)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import kv
from minillm.blocks import KVPool


def compute(pool: KVPool, tokens: list[int]) -> list[int]:
    """A request that computes all its tokens; returns its table (still held)."""
    hits = pool.match(tokens)
    table = pool.admit(hits, len(tokens))
    assert table is not None
    digests = [pool.blocks[b].digest for b in hits]
    pool.publish(table, digests, tokens, len(tokens))
    return table


def test_arithmetic() -> None:
    """KV bytes per token: head_dim is the configured one, KV heads count, K and V both count."""
    assert kv.kv_bytes_per_token(36, 8, 128, 2) == 147456  # Qwen3-4B; LMCache issue 688
    assert kv.kv_bytes_per_token(32, 8, 128, 2) == 131072  # Llama-3-8B; vllm-fit issue 2
    assert kv.max_tokens_in(2**30, 131072) == 8192
    assert [kv.blocks_needed(n, 4) for n in (0, 1, 3, 4, 5, 8)] == [0, 1, 1, 1, 2, 2]
    assert [kv.blocks_needed(n, 1) for n in (0, 1, 2)] == [0, 1, 2]


def test_recycled_block_is_forgotten() -> None:
    """nano-vllm issue 163: a reused block's old hash led to foreign content."""
    pool = KVPool(2, 4)
    x, y = [1, 2, 3, 4, 5], [9, 9, 9, 9, 8]
    table = compute(pool, x)
    digest = pool.blocks[table[0]].digest
    pool.release(table)
    held = compute(pool, y)
    assert pool.match(x) == [] and digest not in pool.published
    pool.check([held])
    pool.release(held)
    assert len(pool.match(y)) * 4 == 4


@pytest.mark.parametrize("length", [4, 7, 8, 9, 12])
def test_a_full_hit_leaves_a_token_to_compute(length: int) -> None:
    """nano-vllm issue 144: a prompt that is cached whole left nothing to compute."""
    pool = KVPool(8, 4)
    tokens = list(range(length))
    pool.release(compute(pool, tokens))
    assert len(pool.match(tokens)) * 4 == (length - 1) // 4 * 4 < length


def test_colliding_digests_never_match_foreign_content() -> None:
    """vLLM pull requests 12621 and 15297, with every digest the same."""
    pool = KVPool(8, 4, hash_fn=lambda *_: b"same")
    first, second = [1] * 4 + [2] * 4, [3] * 4 + [4] * 4
    held = compute(pool, first)
    assert pool.match(second) == []
    other = compute(pool, second)
    pool.check([held, other])


def test_same_content_at_another_depth_does_not_match() -> None:
    """The same, with an honest digest and with one that ignores the parent."""
    for hash_fn in (None, lambda parent, tokens: bytes(tokens)):
        pool = KVPool(8, 4, **({"hash_fn": hash_fn} if hash_fn else {}))
        a, b = [1, 1, 1, 1], [2, 2, 2, 2]
        held = compute(pool, a + b + [0])
        assert pool.match([*b, 0]) == [] and pool.match(b + a + [0]) == []
        assert len(pool.match(a + b + [0])) == 2
        pool.check([held])


def test_large_token_ids_are_told_apart() -> None:
    """vllm-mlx issue 444: ids cut to 8 bits gave false hits."""
    pool = KVPool(8, 4)
    compute(pool, [1, 2, 3, 4, 5])
    for shift in (8, 16, 32):
        assert pool.match([1 + (1 << shift), 2, 3, 4, 5]) == []


def test_double_free_is_refused() -> None:
    """vLLM issue 1556: a block that stood twice in a table was freed twice."""
    pool = KVPool(4, 4)
    table = pool.allocate(1)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.release(table * 2)
    assert pool.num_free == 4 and len(set(pool.free)) == len(pool.free)
    assert len(set(pool.allocate(4))) == 4


def test_copy_on_write() -> None:
    """atlas issue 1193: a half-filled block had two writers."""
    pool = KVPool(8, 4)
    parent = compute(pool, [1, 2, 3, 4, 5, 6])
    pool.share(parent)
    child = list(parent)
    assert pool.num_free == 6 and pool.blocks[parent[1]].refs == 2
    copies = pool.extend(parent, 6, 7)
    assert copies == [(child[1], parent[1])] and parent[0] == child[0] and parent[1] != child[1]
    assert pool.extend(child, 6, 7) == []  # the last owner writes in place
    assert pool.num_free == 5 and pool.blocks[parent[0]].refs == 2
    pool.check([parent, child])
    pool.release(parent)
    pool.release(child)
    assert pool.num_free == 8


def test_copy_on_write_without_room_changes_nothing() -> None:
    pool = KVPool(2, 4)
    parent = pool.allocate(2)
    pool.share(parent)
    child = list(parent)
    assert pool.extend(child, 6, 7) is None and child == parent
    pool.check([parent, child])


def test_the_tail_is_evicted_first() -> None:
    """llm-d-inference-sim issue 704: evicting the first block strands the rest."""
    for _ in range(100):
        pool = KVPool(3, 4)
        tokens = list(range(12))
        table = compute(pool, tokens)
        pool.release(table)
        assert pool.allocate(1) == [table[2]]
        assert len(pool.match([*tokens, 99])) == 2


def test_duplicates_of_the_same_step_become_one() -> None:
    """nano-vllm issue 219: two requests computed one prefix at the same time and kept two copies."""
    pool = KVPool(8, 4)
    tokens = list(range(9))
    tables = [pool.admit([], 9), pool.admit([], 9)]
    for table in tables:
        pool.publish(table, [], tokens, 9)
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2]
    assert pool.num_free == 4
    pool.check(tables)


def test_failed_admission_changes_nothing() -> None:
    pool = KVPool(3, 4)
    pool.release(compute(pool, list(range(8))))
    before = (list(pool.free), dict(pool.published))
    assert pool.admit(pool.match(list(range(16))), 16) is None
    assert (list(pool.free), dict(pool.published)) == before


def test_idle_hits_are_not_counted_as_room() -> None:
    """A hit that nobody uses sits in the free list; it cannot be handed out as a new block too."""
    pool = KVPool(3, 4)
    pool.release(compute(pool, list(range(8))))
    hits = pool.match([*range(8), 50])
    assert len(hits) == 2 and pool.admit(hits, 13) is None
    table = pool.admit(hits, 12)
    assert table[:2] == hits and pool.num_free == 0
    pool.check([table])


def test_discarded_blocks_and_their_descendants_are_gone() -> None:
    pool = KVPool(8, 4)
    tokens = list(range(12))
    pool.release(compute(pool, tokens))
    bad = pool.match(tokens)[:1]
    held = compute(pool, tokens)
    pool.discard(bad)
    assert pool.match(tokens) == []
    digests = [b"x"] * 3
    pool.publish(held, digests, tokens, 12)
    pool.check([held])


def test_check_sees_broken_books() -> None:
    pool = KVPool(4, 4)
    table = compute(pool, list(range(8)))
    pool.check([table])
    with pytest.raises(AssertionError, match="refs"):
        pool.check([])
    pool.blocks[table[0]].tokens = (7, 7, 7, 7)
    with pytest.raises(AssertionError, match="digest"):
        pool.check([table])


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(2, 9),
    size=st.sampled_from([1, 2, 3, 4]),
    caching=st.booleans(),
    actions=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 9)), max_size=60),
)
def test_any_history_keeps_the_books(num_blocks, size, caching, actions) -> None:
    """Random adds, growth, forks and releases over a small alphabet, against an oracle that only compares lists."""
    pool = KVPool(num_blocks, size, caching)
    live: list[tuple[list[int], list[bytes], list[int]]] = []  # table, digests, tokens
    for kind, which, count in actions:
        if kind <= 1:
            tokens = [(which + i // 3) % 3 for i in range(count)]
            hits = pool.match(tokens)
            for i, number in enumerate(hits):  # oracle: an equal block, reached by equal blocks
                assert pool.blocks[number].tokens == tuple(tokens[i * size : (i + 1) * size])
            table = pool.admit(hits, len(tokens))
            if table is not None:
                live.append((table, [pool.blocks[b].digest for b in hits], tokens))
                pool.publish(table, live[-1][1], tokens, len(tokens))
        elif live:
            table, digests, tokens = live[which % len(live)]
            if kind == 2:
                if pool.extend(table, len(tokens), len(tokens) + 1) is not None:
                    tokens.append(count % 3)
                    pool.publish(table, digests, tokens, len(tokens))
            elif kind == 3:
                pool.share(table)
                live.append((list(table), list(digests), list(tokens)))
            else:
                pool.release(live.pop(which % len(live))[0])
        pool.check([table for table, _, _ in live])
    for table, _, _ in live:
        pool.release(table)
    assert pool.num_free == num_blocks
