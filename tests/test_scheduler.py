"""The scheduler and the engine's step loop, on scripted models. Case numbers: see each test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import TINY, Scripted, one_hot, run, tiny_llm, tokens_of

from minillm.errors import RequestError
from minillm.llm import LLM
from minillm.request import RequestOutput, SamplingParams, Status

ENDLESS = replace(TINY, eos_token_ids=())


def scripted(**engine: object) -> LLM:
    """Each token is followed by the next number (70 after 69...): output shows who got what."""
    return LLM.from_parts(TINY, Scripted(lambda token, _: one_hot((token + 1) % 96)), None, **engine)


def params(count: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, **more)


def test_chunks_of_a_long_prompt() -> None:
    """vllm-metal pull request 200: a prompt longer than the step's budget waited for ever."""
    llm = scripted(max_num_batched_tokens=8, block_size=4, num_kv_blocks=16)
    llm.add_request(list(range(10, 30)), params(1))
    sizes = []
    while llm.scheduler.waiting or llm.scheduler.running:
        before = llm._totals["computed_tokens"]
        llm.step()
        sizes.append(llm._totals["computed_tokens"] - before)
    assert sizes == [8, 8, 4]


def test_without_chunking_a_long_prompt_is_refused_with_both_numbers() -> None:
    llm = scripted(max_num_batched_tokens=8, enable_chunked_prefill=False)
    with pytest.raises(RequestError, match=r"20 tokens.*at most 8"):
        llm.generate(list(range(20)), params(1))
    with pytest.raises(RequestError):
        llm.add_request(list(range(20)), params(1))
    assert llm.generate(list(range(8)), params(1))[0].outputs[0].token_ids == [8]


def test_without_chunking_prompts_are_computed_whole() -> None:
    llm = scripted(max_num_batched_tokens=8, enable_chunked_prefill=False, num_kv_blocks=16)
    for start in (10, 20):
        llm.add_request(list(range(start, start + 6)), params(2))
    assert [[r.id for r, _ in llm.step()] for _ in range(3)] == [
        ["request-0"],
        ["request-0", "request-1"],
        ["request-1"],
    ]


def test_seats_are_given_back() -> None:
    """vLLM issue 53130: admission stopped for good although memory was free."""
    llm = scripted(max_num_seqs=2)
    for i in range(5):
        llm.add_request([10 * i + 5], params(i + 1))
    firsts, steps, counts = [], 0, {}
    while llm.scheduler.waiting or llm.scheduler.running:
        news = llm.step()
        steps += 1
        assert len(llm.scheduler.running) <= 2 and steps <= 20
        for request, delta in news:
            firsts += [request.id] if request.id not in counts else []
            counts[request.id] = counts.get(request.id, 0) + len(delta.token_ids)
    assert firsts == [f"request-{i}" for i in range(5)] and list(counts.values()) == [1, 2, 3, 4, 5]


def test_short_requests_do_not_starve_a_long_one() -> None:
    llm = scripted(max_num_seqs=2, max_num_batched_tokens=4, block_size=4, num_kv_blocks=32)
    llm.add_request(list(range(40)), params(5), request_id="long")
    for step in range(200):
        llm.add_request([50], params(2), request_id=f"short-{step}")
        if "long" in [r.id for r, delta in llm.step() if delta.finish_reason]:
            return
    pytest.fail("the long request never finished")


def test_a_long_prompt_does_not_hold_up_decodes() -> None:
    """Who needs one token gets it in every step. Forks come after the long prompt in the list of running requests."""
    llm = scripted(max_num_batched_tokens=6, block_size=4, num_kv_blocks=64)
    llm.add_request([1, 2], params(12, n=3), request_id="short")
    llm.add_request(list(range(90)), params(1), request_id="long")
    llm.step()
    assert [r.id for r in llm.scheduler.running] == ["short", "long", "short", "short"]
    for _ in range(11):
        assert [r.id for r, _ in llm.step()] == ["short"] * 3
        assert llm.requests["long"][0].num_computed < 90


@pytest.mark.parametrize("length", range(1, 10))
def test_chunks_cover_each_position_once(length: int) -> None:
    """tenstorrent/vllm pull request 448: a last chunk of one token was taken for a decode."""
    llm = scripted(max_num_batched_tokens=4, block_size=4, num_kv_blocks=8)
    llm.add_request(list(range(length)), params(1))
    ranges, plan_of = [], llm.scheduler.plan

    def plan():
        made = plan_of()
        ranges.extend((c.start, c.end) for c in made.chunks)
        return made

    llm.scheduler.plan = plan
    tokens = [delta.token_ids for _ in range(5) for _, delta in llm.step()]
    assert [p for start, end in ranges for p in range(start, end)] == list(range(length))
    assert len(ranges) == -(-length // 4) and tokens == [[length]]


def test_preemption_changes_nothing_but_the_time() -> None:
    """vllm-gaudi pull request 524: output tokens were doubled or lost."""
    prompts = [[10 * i + j for j in range(6)] for i in range(4)]
    outcomes = []
    for blocks in (1000, 7):
        llm = tiny_llm(block_size=4, num_kv_blocks=blocks)
        deltas: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            llm.add_request(prompt, params(8, ignore_eos=True), request_id=str(i))
        while llm.scheduler.waiting or llm.scheduler.running:
            for request, delta in llm.step():
                deltas.setdefault(request.id, []).extend(delta.token_ids)
            llm.scheduler.check()
        outputs = [RequestOutput.of(llm.requests[str(i)]) for i in range(4)]
        assert [deltas[str(i)] for i in range(4)] == tokens_of(outputs)
        assert llm.pool.num_free == blocks
        outcomes.append((tokens_of(outputs), [o.outputs[0].finish_reason for o in outputs]))
        assert (llm.scheduler.num_preemptions > 0) == (blocks == 7)
    assert outcomes[0] == outcomes[1]


def test_recomputed_tokens_are_no_prefix_hits() -> None:
    """vLLM issue 25780: preempted requests raised the hit rate."""
    llm = tiny_llm(block_size=4, num_kv_blocks=7)
    run(llm, [[10 * i + j for j in range(6)] for i in range(4)], params(8, ignore_eos=True))
    assert llm.stats()["preemptions"] > 0 and llm.stats()["prefix_hit_rate"] == 0


def test_what_can_never_fit_is_refused_and_the_others_go_on() -> None:
    llm = scripted(block_size=4, num_kv_blocks=3)  # 12 tokens
    outputs = run(llm, [[1, 2], list(range(30)), [5]], params(2))
    assert tokens_of(outputs) == [[3, 4], [], [6, 7]]
    assert "30 tokens" in outputs[1].error and "11 fit" in outputs[1].error
    assert outputs[1].outputs[0].finish_reason == "error"


def test_a_sequence_that_fills_the_pool_ends_with_length() -> None:
    """nano-vllm issues 274 and 277: a lone sequence that outgrew the pool hit an assertion, or never ended."""
    llm = scripted(block_size=4, num_kv_blocks=2)
    output = run(llm, [[1, 2, 3]], params(100))[0].outputs[0]
    assert output.finish_reason == "length" and output.token_ids == [4, 5, 6, 7, 8]


STATES = ["waiting", "mid-prefill", "running", "preempted", "finished", "unknown"]


@pytest.mark.parametrize("state", STATES)
def test_abort_in_any_state(state: str) -> None:
    """ATOM pull request 1562: a client that left kept its blocks. Abort works at any moment, and twice."""
    llm = scripted(max_num_seqs=2, max_num_batched_tokens=4, block_size=4, num_kv_blocks=8)
    free = llm.pool.num_free
    llm.add_request([1], params(6), request_id="other")
    llm.step()
    if state != "unknown":
        llm.add_request(list(range(9)), params(1 if state == "finished" else 9), request_id="x")
    steps = {"waiting": 0, "mid-prefill": 2, "running": 5, "preempted": 5, "finished": 5, "unknown": 1}[state]
    for _ in range(steps):
        llm.step()
    if state == "preempted":
        llm.scheduler._preempt(llm.requests["x"][0])
    expected = {"waiting": Status.WAITING, "mid-prefill": Status.RUNNING, "running": Status.RUNNING}
    if state in expected:
        assert llm.requests["x"][0].status is expected[state]
    for _ in range(2):
        llm.abort("x")
        llm.scheduler.check()
    while llm.scheduler.running:
        llm.step()
    assert llm.requests["other"][0].output == [2, 3, 4, 5, 6, 7]
    assert llm.pool.num_free == free and "x" not in llm.requests


def test_leaving_a_stream_early_frees_its_blocks() -> None:
    llm = scripted()
    free = llm.pool.num_free
    for i, delta in enumerate(llm.stream([1], params(100))):
        assert delta.token_ids == [i + 2]
        if i == 2:
            break
    assert llm.pool.num_free == free and not llm.requests and not llm.scheduler.running


def test_two_streams_and_a_generate_at_once() -> None:
    llm = scripted()
    first, second = llm.stream([1], params(4)), llm.stream([50], params(4))
    got = [next(first).token_ids, next(second).token_ids]
    assert tokens_of(llm.generate([[80]], params(3))) == [[81, 82, 83]]
    got += [d.token_ids for d in first] + [d.token_ids for d in second]
    assert got == [[2], [51], [3], [4], [5], [52], [53], [54]]


def test_an_error_in_a_step_leaks_nothing() -> None:
    def script(token: int, position: int) -> torch.Tensor:
        if position == 3:
            raise ZeroDivisionError
        return one_hot(token + 1)

    llm = LLM.from_parts(TINY, Scripted(script), None, num_kv_blocks=8)
    with pytest.raises(ZeroDivisionError):
        llm.generate([[1], [2, 3]], params(9))
    assert llm.pool.num_free == 8 and not llm.requests
    llm.scheduler.check()
    assert tokens_of(llm.generate([[5]], params(2))) == [[6, 7]]


def test_nan_fails_one_request_only() -> None:
    """Qwen3 issue 761: NaN logits made token 0 for ever."""

    def script(token: int, position: int) -> torch.Tensor:
        return torch.full((96,), float("nan")) if token == 13 else one_hot(token + 1)

    llm = LLM.from_parts(TINY, Scripted(script), None, block_size=1, num_kv_blocks=64)
    bad, good = run(llm, [[11], [40]], params(6))
    assert bad.outputs[0].finish_reason == "error" and "request-0" in bad.error and "finite" in bad.error
    assert bad.outputs[0].token_ids == [12, 13] and good.outputs[0].token_ids == [41, 42, 43, 44, 45, 46]
    assert good.error is None
    assert llm.pool.match([11, 12, 13, 14]) == [], "what a broken request computed is not reused"
    with pytest.raises(RequestError, match="finite"):
        llm.generate([13], params(2))


def test_priority_goes_first_and_is_preempted_last() -> None:
    llm = scripted(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        llm.add_request([10], params(1), request_id=name, priority=priority)
    assert [r.id for _ in range(3) for r, _ in llm.step()] == ["c", "a", "b"]
    llm = scripted(block_size=4, num_kv_blocks=3)
    llm.add_request([1, 2, 3, 4], params(7), request_id="low", priority=5)
    llm.step()
    llm.add_request([21, 22, 23, 24], params(4), request_id="high", priority=0)
    ends = [r.id for _ in range(20) for r, delta in llm.step() if delta.finish_reason]
    assert ends == ["high", "low"] and llm.scheduler.num_preemptions > 0


def test_a_preempted_request_gives_its_budget_back() -> None:
    """vLLM issue 26661: the victim was scheduled in this very step; its tokens must be handed to someone else."""
    llm = scripted(block_size=1, num_kv_blocks=8)
    llm.add_request([1, 2], params(5), request_id="victim", priority=1)
    llm.step()
    llm.add_request([31, 32], params(3), request_id="a")
    llm.add_request([41, 42], params(3), request_id="b")
    llm.step()
    assert llm.pool.num_free == 1  # the victim, first in line, takes it; then nothing is left for "a"
    llm.engine_config.max_num_batched_tokens = 2
    plan = llm.scheduler.plan()
    assert [(c.request.id, c.end - c.start) for c in plan.chunks] == [("a", 1), ("b", 1)]
    assert llm.scheduler.num_preemptions == 1
    llm.runner.run(plan)
    llm.scheduler.commit(plan)
    llm.scheduler.check()


def test_second_generate_starts_fresh() -> None:
    """transformers issue 45943: a second call returned wrong or missing rows."""
    llm = scripted()
    for _ in range(3):
        assert tokens_of(llm.generate([[3], [4]], params(2))) == [[4, 5], [5, 6]]


def test_scoring_a_prompt() -> None:
    """llama.cpp issue 27174: scoring requests returned entries of generated tokens only."""
    llm = tiny_llm(block_size=4, num_kv_blocks=16, max_num_batched_tokens=4)
    prompt = [5, 6, 7, 8, 9, 10]
    none = llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert none.outputs[0].token_ids == [] and none.outputs[0].finish_reason == "length"
    assert len(none.prompt_logprobs) == 6 and none.prompt_logprobs[0] is None
    assert all(list(entry) == [token] for entry, token in zip(none.prompt_logprobs[1:], prompt[1:], strict=True))
    one = llm.generate(prompt, params(1, prompt_logprobs=2, logprobs=2))[0]
    assert len(one.outputs[0].token_ids) == 1 and len(one.outputs[0].logprobs) == 1
    assert len(one.prompt_logprobs) == 6 and len(one.outputs[0].logprobs[0]) in (2, 3)
    assert llm.generate(prompt, params(0))[0].outputs[0].text == ""


def test_forked_completions_share_the_prompt_and_copy_on_write() -> None:
    """atlas issue 1193, in the engine: two completions, each equal to its solo run."""
    llm = tiny_llm(block_size=4, num_kv_blocks=32)
    prompt, more = [5, 6, 7, 8, 9, 10], dict(max_tokens=6, temperature=1.0, ignore_eos=True)
    llm.add_request(prompt, SamplingParams(seed=1, n=2, **more), request_id="x")
    llm.step()  # computes the prompt, forks, samples one token each
    assert len(llm.pool.blocks) - llm.pool.num_free == 2
    first, second = llm.requests["x"]
    assert llm.pool.blocks[first.block_table[1]].refs == 2
    llm.step()
    llm.scheduler.check()
    assert len(llm.pool.blocks) - llm.pool.num_free == 3 and first.block_table[0] == second.block_table[0]
    assert llm.pool.blocks[first.block_table[0]].refs == 2
    data, size = llm.cache.data, 4
    a, b = (data[:, :, r.block_table[1] * size : r.block_table[1] * size + 3] for r in (first, second))
    assert torch.equal(a[:, :, :2], b[:, :, :2])
    assert torch.equal(a[:, :, 2], b[:, :, 2]) == (first.output[0] == second.output[0])
    while llm.scheduler.running:
        llm.step()
    together = [r.output for r in llm.requests["x"]]
    assert together[0] != together[1]
    for request in (first, second):
        solo = run(tiny_llm(block_size=4, num_kv_blocks=32), [prompt], SamplingParams(seed=request.seed, **more))
        assert solo[0].outputs[0].token_ids == request.output
    llm.abort("x")
    assert llm.pool.num_free == 32


def test_fork_seats() -> None:
    llm = scripted(max_num_seqs=3)
    with pytest.raises(RequestError, match="n=4"):
        llm.generate([1], params(1, n=4))
    outputs = run(llm, [[1], [20], [40]], params(3, n=2))
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[[s, s + 1, s + 2]] * 2 for s in (2, 21, 41)]


def test_wrong_arguments_are_refused_with_a_sentence() -> None:
    llm = scripted()
    bad = [
        (lambda: llm.generate([], params(1)), None),
        (lambda: llm.generate([[]], params(1)), "empty"),
        (lambda: llm.generate([96], params(1)), "96"),
        (lambda: llm.generate([-1], params(1)), "-1"),
        (lambda: llm.generate("text", params(1)), "tokenizer"),
        (lambda: llm.generate([[1], [2]], [params(1)]), "2 prompts"),
        (lambda: llm.generate([1], params(1, stop="x")), "stop"),
        (lambda: SamplingParams(temperature="hot"), "temperature"),
        (lambda: SamplingParams(temperature=-1), "temperature"),
        (lambda: SamplingParams(top_p=0.0), "top_p"),
        (lambda: SamplingParams(top_p=1.1), "top_p"),
        (lambda: SamplingParams(top_k=-1), "top_k"),
        (lambda: SamplingParams(max_tokens=-1), "max_tokens"),
        (lambda: SamplingParams(max_tokens=True), "max_tokens"),
        (lambda: SamplingParams(n=0), "n must"),
        (lambda: SamplingParams(min_tokens=20), "min_tokens"),
        (lambda: SamplingParams(repetition_penalty=0), "repetition_penalty"),
        (lambda: SamplingParams(stop=[""]), "stop"),
        (lambda: SamplingParams(seed=1.5), "seed"),
        (lambda: SamplingParams(min_p=float("nan")), "min_p"),
        (lambda: tiny_llm(block_size=0), "block_size"),
        (lambda: tiny_llm(memory_fraction=1.5), "memory_fraction"),
    ]
    for call, word in bad:
        if word is None:
            assert call() == []
        elif word == "empty":
            assert "empty" in call()[0].error
        else:
            with pytest.raises(RequestError, match=word):
                call()
    assert SamplingParams(stop=None).stop == [] and SamplingParams(stop="x").stop == ["x"]
    assert not llm.requests


def test_decodes_beyond_the_budget_take_turns() -> None:
    """Six decodes, a budget of 4: nobody waits for more than one step for the next turn, and a new prompt gets in."""
    llm = tiny_llm(ENDLESS, num_kv_blocks=64, max_num_batched_tokens=4, max_num_seqs=8)
    for i in range(6):
        llm.add_request([i + 1], params(40), request_id=str(i))
    for _ in range(4):
        llm.step()
    last = {str(i): 0 for i in range(6)}
    for step in range(1, 13):
        for request, _ in llm.step():
            assert step - last[request.id] <= 2
            last[request.id] = step
    llm.add_request([9] * 3, params(1), request_id="new")
    assert any(request.id == "new" for _ in range(200) for request, _ in llm.step())


def test_a_threshold_lets_a_short_prompt_pass_a_long_one() -> None:
    first = {}
    for threshold in (0, 4):
        llm = tiny_llm(ENDLESS, num_kv_blocks=64, max_num_batched_tokens=8, long_prefill_token_threshold=threshold)
        llm.add_request([1] * 64, params(1), request_id="long")
        llm.add_request([2] * 4, params(1), request_id="short")
        done = []
        while len(done) < 2:
            done += [request.id for request, _ in llm.step()]
        first[threshold] = done[0]
    assert first == {0: "long", 4: "short"}
    with pytest.raises(RequestError, match="chunked"):
        tiny_llm(enable_chunked_prefill=False, long_prefill_token_threshold=3)


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "swapped"])
def test_a_timeout_ends_a_request_in_any_state(state: str) -> None:
    swap = {"preemption": "swap"} if state == "swapped" else {}
    llm = tiny_llm(ENDLESS, num_kv_blocks=8, block_size=4, max_num_seqs=1 if state == "waiting" else 8, **swap)
    llm.add_request([1] * 6, params(20), request_id="other")
    llm.step()
    llm.add_request([2] * 6, params(20), request_id="x", timeout=1e6, priority=1)
    while {"waiting": False, "running": llm.requests["x"][0].num_output < 2}.get(
        state, llm.requests["x"][0].status is not Status.PREEMPTED
    ):
        llm.step()
    assert bool(llm.requests["x"][0].swap_table) == (state == "swapped")
    llm.requests["x"][0].deadline = 0.0
    news = llm.step()
    [(request, delta)] = [(r, d) for r, d in news if r.id == "x"]
    assert delta.finish_reason == request.finish_reason == "timeout" and not delta.token_ids
    while not llm.is_done("other"):
        llm.step()
        llm.scheduler.check()
    assert llm.pool.num_free == 8 and llm.scheduler.swap.num_free == len(llm.scheduler.swap.blocks)
    for wrong in (0, -1, "5", True, float("nan")):
        with pytest.raises(RequestError, match="timeout"):
            llm.add_request([1], params(1), timeout=wrong)  # type: ignore[arg-type]


def test_policies() -> None:
    asked = [("a", 1, 9.0), ("b", 0, None), ("c", 0, 5.0), ("d", 0, 8.0), ("e", 1, 1.0)]
    expected = {"fcfs": "abcde", "priority": "bcdae", "deadline": "cdbea"}
    policies = {name: name for name in expected} | {"own": lambda request: request.id}
    for name, policy in policies.items():
        llm = tiny_llm(ENDLESS, max_num_seqs=1, num_kv_blocks=32, scheduling_policy=policy)
        for request_id, priority, timeout in asked:
            now = {} if timeout is None else {"timeout": timeout + 1e6}
            llm.add_request([1], params(1), request_id=request_id, priority=priority, **now)
        order = [request.id for _ in asked for request, _ in llm.step()]
        assert "".join(order) == expected.get(name, "abcde")
    with pytest.raises(RequestError, match="scheduling_policy"):
        tiny_llm(scheduling_policy="random")


def test_an_error_with_swapped_requests_computes_them_again() -> None:
    llm = tiny_llm(ENDLESS, num_kv_blocks=9, block_size=4, preemption="swap", enable_prefix_caching=False)
    solo = tokens_of(run(tiny_llm(ENDLESS, num_kv_blocks=64), [[i + 1] * 9 for i in range(3)], params(12)))
    ids = [llm.add_request([i + 1] * 9, params(12)) for i in range(3)]
    while not llm.scheduler.num_swaps:
        llm.step()
    build = llm.runner.build

    def breaks(plan):
        llm.runner.build = build  # type: ignore[method-assign]
        raise MemoryError

    llm.runner.build = breaks  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        llm.step()
    llm.scheduler.check()
    assert llm.scheduler.swap.num_free == len(llm.scheduler.swap.blocks)
    requests = [llm.requests[i][0] for i in ids]
    while llm.scheduler.running or llm.scheduler.waiting:
        llm.step()
    assert [r.output for r in requests] == solo


@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
def test_padding_is_part_of_a_steps_budget(scheduling: str) -> None:
    """One prompt of 200 tokens and 90 of 2 were padded to 18,200 tokens under a budget of 400."""
    llm = tiny_llm(ENDLESS, scheduling=scheduling, max_num_batched_tokens=400, max_num_seqs=128, num_kv_blocks=512)
    prompts = [[1] * 2] * 30 + [[1] * 200] + [[1] * 2] * 60
    llm.timeline = []
    assert [len(out.outputs[0].token_ids) for out in llm.generate(prompts, params(2))] == [2] * 91
    sizes = [sum(end - start for _, _, start, end in step.work) + step.padding for step in llm.timeline]
    assert max(sizes) <= 400 and llm.stats()["padding_tokens"] > 0
    assert [len(step.work) for step in llm.timeline] == [30, 30, 2, 2, 59, 59]


def test_a_static_batch_is_full_when_its_seats_are() -> None:
    llm = tiny_llm(ENDLESS, scheduling="static", batch_delay=60.0, max_num_seqs=4, num_kv_blocks=64)
    outputs = llm.generate([[1, 2]], params(3, n=4))  # it does not wait for a minute
    assert len(outputs[0].outputs) == 4


def test_a_prompt_that_ends_early_has_all_its_completions() -> None:
    llm = tiny_llm(ENDLESS, num_kv_blocks=64)
    llm.add_request([1, 2, 3], params(9, n=3), request_id="x", timeout=1e-9)
    news = llm.step()
    assert [(request.index, delta.finish_reason) for request, delta in news] == [(i, "timeout") for i in range(3)]
    output = RequestOutput.of(llm.requests["x"])
    assert [one.finish_reason for one in output.outputs] == ["timeout"] * 3 and not llm.scheduler.hurried
    assert llm.abort("x") == [] and not llm.requests
