"""A request's tokens never depend on how they were computed: batch mates, chunks, blocks, pool size, prefix cache."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import TINY, greedy_reference, run, tiny_llm, tiny_model, tokens_of

from minillm import scheduler
from minillm.llm import LLM
from minillm.request import SamplingParams

WINDOWED = dataclasses.replace(TINY, sliding_window=5, sliding_layers=(True, False), qk_norm=True, qkv_bias=True)
GREEDY = SamplingParams(max_tokens=9, temperature=0)


def prompts(seed: int, count: int, longest: int = 14) -> list[list[int]]:
    """Prompts with shared beginnings, so that the prefix cache has work."""
    random = torch.Generator().manual_seed(seed)
    base = torch.randint(1, 96, (longest,), generator=random).tolist()
    made = []
    for _ in range(count):
        cut, length = torch.randint(0, longest, (2,), generator=random).tolist()
        made.append(base[:cut] + torch.randint(1, 96, (max(1, length - cut),), generator=random).tolist())
    return made


@pytest.fixture(scope="module", params=["plain", "windowed"])
def case(request):
    """A model, prompts and their tokens by the plain path."""
    model = tiny_model(TINY if request.param == "plain" else WINDOWED)
    work = prompts(3, 5)
    return model, work, [greedy_reference(model, prompt, 9) for prompt in work]


SETTINGS = list(itertools.product([1, 4, 16], [1, 3, 64], [True, False]))


@pytest.mark.parametrize("block_size,chunk,caching", SETTINGS)
@pytest.mark.parametrize("pool", ["large", "small", "two blocks"])
def test_equals_the_plain_path(case, block_size: int, chunk: int, caching: bool, pool: str) -> None:
    model, work, expected = case
    longest = max(len(p) for p in work) + 9
    blocks = {"large": 256, "small": -(-longest // block_size) + 1, "two blocks": 2}[pool]
    if pool == "two blocks" and 2 * block_size < longest:  # what two blocks hold: a short prompt and fewer tokens
        room = 2 * block_size
        work = [p[: max(1, room - 1)][: max(1, room // 2)] for p in work]
        params = SamplingParams(max_tokens=room - max(len(p) for p in work) or 1, temperature=0)
        expected = [greedy_reference(model, p, params.max_tokens) for p in work]
    else:
        params = GREEDY
    llm = LLM.from_parts(
        model.config, model, None,
        block_size=block_size, num_kv_blocks=blocks, max_num_batched_tokens=chunk, enable_prefix_caching=caching,
    )  # fmt: skip
    for _ in range(2):  # the second round meets a warm prefix cache
        assert tokens_of(run(llm, work, params)) == expected
    if pool == "small" and chunk == 64:
        assert llm.scheduler.num_preemptions > 0, "this pool was meant to force preemption"


def test_unchunked_equals_the_plain_path(case) -> None:
    model, work, expected = case
    llm = LLM.from_parts(
        model.config, model, None,
        block_size=4, num_kv_blocks=12, max_num_batched_tokens=32, enable_chunked_prefill=False,
    )  # fmt: skip
    assert tokens_of(run(llm, work, GREEDY)) == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 5),
    arrivals=st.lists(st.integers(0, 12), min_size=1, max_size=7),
    aborts=st.dictionaries(st.integers(0, 6), st.integers(0, 20), max_size=3),
    block_size=st.sampled_from([1, 2, 4, 16]),
    blocks=st.integers(2, 40),
    chunk=st.sampled_from([1, 3, 8, 64]),
    seats=st.integers(1, 8),
    caching=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]),
    scheduling=st.sampled_from(["continuous", "continuous", "dynamic", "static"]),
    policy=st.sampled_from(["priority", "fcfs", "deadline"]),
    swap_blocks=st.sampled_from([0, 0, 3, 40]),
    threshold=st.sampled_from([0, 2, 5]),
)
def test_any_arrivals_and_aborts(
    seed, arrivals, aborts, block_size, blocks, chunk, seats, caching, temperature,
    scheduling, policy, swap_blocks, threshold,
) -> None:  # fmt: skip
    """Requests come and go at any step; those that stay get the tokens of their solo run."""
    blocks = max(blocks, -(-24 // block_size))
    model = tiny_model()
    work = prompts(seed, len(arrivals), longest=12)
    each = [SamplingParams(max_tokens=8, temperature=temperature, seed=i, ignore_eos=True) for i in range(len(work))]
    solo = LLM.from_parts(TINY, model, None, enable_prefix_caching=False, num_kv_blocks=64)
    llm = LLM.from_parts(
        TINY, model, None, block_size=block_size, num_kv_blocks=blocks, max_num_batched_tokens=chunk,
        max_num_seqs=seats, enable_prefix_caching=caching, scheduling=scheduling, scheduling_policy=policy,
        preemption="swap" if swap_blocks else "recompute", num_swap_blocks=swap_blocks or None,
        long_prefill_token_threshold=threshold,
    )  # fmt: skip
    got: dict[int, list[int]] = {i: [] for i in range(len(work))}
    for step in range(2000):
        for i, when in enumerate(arrivals):
            if when == step:
                llm.add_request(work[i], each[i], request_id=str(i), priority=i % 2, timeout=1e9 - i)
        for i, when in aborts.items():
            if when == step:
                llm.abort(str(i))
        for request, delta in llm.step():
            got[int(request.id)] += delta.token_ids
        llm.scheduler.check()
        if step > 20 and not (llm.scheduler.waiting or llm.scheduler.running):
            break
    else:
        pytest.fail("no end")
    assert llm.pool.num_free == blocks
    for i, prompt in enumerate(work):
        expected = solo.generate(prompt, each[i])[0].outputs[0].token_ids
        aborted = i in aborts and aborts[i] >= arrivals[i]
        assert got[i] == expected[: len(got[i])] if aborted else got[i] == expected


@pytest.mark.parametrize("scheduling", ["static", "dynamic", "continuous"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_scheduling_and_preemption_change_no_token(case, scheduling, preemption) -> None:
    model, work, expected = case
    options = {"block_size": 4, "num_kv_blocks": 7, "max_num_seqs": 3, "enable_prefix_caching": False}
    llm = LLM.from_parts(model.config, model, None, scheduling=scheduling, preemption=preemption, **options)
    assert tokens_of(run(llm, work, GREEDY)) == expected
    assert llm.scheduler.num_preemptions > 0
    assert (llm.scheduler.num_swaps > 0) == (preemption == "swap")
    assert llm.scheduler.swap.num_free == len(llm.scheduler.swap.blocks)


def test_swapped_blocks_come_back_byte_for_byte_and_nothing_is_recomputed() -> None:
    """engines.md: `kv[index].copy_(x)` is a silent no-op, so compare bytes, not flags."""
    options = {"block_size": 4, "num_kv_blocks": 9, "enable_prefix_caching": False, "preemption": "swap"}
    llm = tiny_llm(dataclasses.replace(TINY, eos_token_ids=()), **options)
    ids = [llm.add_request([i + 1] * 9, SamplingParams(max_tokens=12, temperature=0)) for i in range(3)]
    requests = [llm.requests[i][0] for i in ids]
    before: dict[str, torch.Tensor] = {}
    swapped = 0

    def kept(request, cache, table) -> torch.Tensor:
        slots = [table[p // 4] * 4 + p % 4 for p in range(request.num_computed)]
        return cache.data[:, :, slots].clone()

    while any(r.need for r in requests if r.finish_reason is None):
        for request in requests:
            if request.block_table:
                before[request.id] = kept(request, llm.cache, request.block_table)
        llm.step()
        llm.scheduler.check()
        for request in requests:
            if request.swap_table:
                swapped += 1
                assert torch.equal(kept(request, llm.runner.host, request.swap_table), before[request.id])
    assert swapped and llm.stats()["computed_tokens"] == 3 * (9 + 11)


def test_a_static_batch_whose_wait_ends_within_a_step_is_no_error(monkeypatch) -> None:
    llm = tiny_llm(scheduling="static", max_num_seqs=2, batch_delay=1.0, num_kv_blocks=32)
    llm.add_request([1], SamplingParams(max_tokens=1), arrival=0.0)
    ticks = itertools.chain([0.998, 0.999], itertools.repeat(1.001))
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert llm.step() == []
    assert [delta.finish_reason for _, delta in llm.step()] in (["stop"], ["length"])


def test_a_static_batch_waits_to_be_full_and_a_dynamic_one_does_not() -> None:
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    static = tiny_llm(scheduling="static", max_num_seqs=2, batch_delay=1e6, num_kv_blocks=32)
    static.add_request([1, 2], params, request_id="a")
    assert static.step() == [] and not static.scheduler.running  # it waits
    static.add_request([3], params, request_id="b")
    static.add_request([4], params, request_id="c")
    assert {r.id for r, _ in static.step()} == {"a", "b"}  # full
    static.scheduler.config.batch_delay = 0.0
    static.step()
    assert {r.id for r, _ in static.step()} == {"c"}  # waited long enough
    dynamic = tiny_llm(scheduling="dynamic", max_num_seqs=2, num_kv_blocks=32)
    dynamic.add_request([1, 2], params, request_id="a")
    assert [r.id for r, _ in dynamic.step()] == ["a"]
    dynamic.add_request([3], params, request_id="b")
    assert [r.id for r, _ in dynamic.step()] == ["a"]  # the batch is closed
    assert [r.id for r, _ in dynamic.step()] == ["b"]


def test_a_padded_batch_computes_a_rectangle() -> None:
    llm = tiny_llm(dataclasses.replace(TINY, eos_token_ids=()), scheduling="static", max_num_seqs=3, num_kv_blocks=32)
    llm.timeline = []
    each = [SamplingParams(max_tokens=n, temperature=0) for n in (1, 2, 5)]
    run(llm, [[1] * 7, [2] * 4, [3] * 2], each)
    assert [step.padding for step in llm.timeline] == [3 + 5, 1, 2, 2, 2]


def test_padding_reads_and_writes_no_live_slot() -> None:
    """Everything but what a padded step may use is poisoned; the tokens stay the same."""
    config = dataclasses.replace(TINY, eos_token_ids=())
    each = [SamplingParams(max_tokens=n, temperature=0) for n in (1, 9)]
    expected = tokens_of(run(tiny_llm(config, num_kv_blocks=32), [[1] * 7, [2] * 4], each))
    llm = tiny_llm(config, scheduling="static", num_kv_blocks=32)
    llm.cache.data.fill_(float("nan"))
    assert tokens_of(run(llm, [[1] * 7, [2] * 4], each)) == expected
    assert llm.stats()["padding_tokens"] > 0


def test_a_seed_survives_everything() -> None:
    """vLLM issue 51226: alone, with unseeded and seeded mates, as third row, after preemption: the same ids."""
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=42, ignore_eos=True)
    free = SamplingParams(max_tokens=16, temperature=0.8, ignore_eos=True)
    other = SamplingParams(max_tokens=16, temperature=1.2, seed=7, top_k=9, ignore_eos=True)
    prompt = [7, 8, 9]
    alone = tokens_of(run(tiny_llm(), [prompt], params))[0]
    assert tokens_of(run(tiny_llm(), [prompt, [4]], [params, free]))[0] == alone
    assert tokens_of(run(tiny_llm(), [prompt, [4]], [params, other]))[0] == alone
    assert tokens_of(run(tiny_llm(), [[4], [5, 6], prompt], [free, other, params]))[2] == alone
    tight = tiny_llm(block_size=4, num_kv_blocks=6)
    assert tokens_of(run(tight, [[4], [5, 6], prompt], [free, other, params]))[2] == alone
    assert tight.scheduler.num_preemptions > 0
    assert tokens_of(run(tiny_llm(), [prompt], dataclasses.replace(params, seed=43)))[0] != alone


def test_unseeded_requests_differ_but_engines_repeat() -> None:
    free = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    first, second = (tokens_of(run(tiny_llm(), [[5], [5]], free)) for _ in range(2))
    assert first == second and first[0] != first[1]
    assert tokens_of(run(tiny_llm(seed=0), [[5]], free))[0] == first[0]


def test_two_models_in_one_process_do_not_meet() -> None:
    one, two = tiny_llm(seed=0), tiny_llm(seed=1)
    expected = [greedy_reference(llm.model, [5, 6], 8) for llm in (one, two)]
    streams = [llm.stream([5, 6], SamplingParams(max_tokens=8, temperature=0)) for llm in (one, two)]
    got = [[d.token_ids[0] for d in deltas] for deltas in zip(*streams, strict=True)]
    assert [list(tokens) for tokens in zip(*got, strict=True)] == expected


@pytest.mark.parametrize("damage", ["mask", "slots", "positions", "foreign prefix"])
def test_the_comparison_can_fail(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong line in the engine is seen by the comparisons above."""
    from minillm import attention
    from minillm.blocks import KVPool
    from minillm.runner import Runner

    model, work, params = tiny_model(), [9, 8, 7, 6, 5, 4, 3, 2, 1], SamplingParams(max_tokens=8, temperature=0)
    expected = greedy_reference(model, work, 8)
    llm = LLM.from_parts(TINY, model, None, block_size=4, num_kv_blocks=16, max_num_batched_tokens=4, attention="sdpa")
    assert llm.generate(work, params)[0].outputs[0].token_ids == expected
    llm.generate([1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=1))
    mask, build = attention.causal_mask, Runner.build

    def sees_the_last_key(queries: int, context: int, window: int | None = None) -> torch.Tensor:
        return mask(queries, context, window) | (torch.arange(context) == context - 1)

    def build_wrong(self: Runner, plan: object) -> object:
        batch = build(self, plan)
        if damage == "slots":
            batch.slots = batch.slots.flip(0)
        else:
            batch.positions = batch.positions - batch.positions[0]
        return batch

    if damage == "mask":
        monkeypatch.setattr(attention, "causal_mask", sees_the_last_key)
    elif damage == "foreign prefix":
        foreign = llm.pool.match([1, 2, 3, 4, 5, 6, 7, 8, 9])
        monkeypatch.setattr(KVPool, "match", lambda self, tokens: foreign)
    else:
        monkeypatch.setattr(Runner, "build", build_wrong)
    if damage != "foreign prefix":
        llm.pool.discard(range(16))
    assert llm.generate(work, params)[0].outputs[0].token_ids != expected
