"""Things that go wrong around the engine: it stays usable, leaks nothing, and no token changes."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import numpy as np
import pytest
import torch
from tiny import TINY, Scripted, full_logits, run, tiny_llm, tiny_model, tokens_of

from minillm import sampler
from minillm.config import EngineConfig
from minillm.errors import RequestError
from minillm.llm import LLM
from minillm.request import SamplingParams

FREE = dict(temperature=1.0, ignore_eos=True)


@pytest.mark.parametrize("place", ["before the copies", "in the model", "in sampling", "while accepting"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_step_that_breaks_off_changes_no_token(place: str, error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a fork whose copy-on-write was planned and never made."""
    params = SamplingParams(seed=1, n=2, max_tokens=9, **FREE)
    prompt = [5, 6, 7, 8, 9, 10]
    expected = [c.token_ids for c in tiny_llm(block_size=4).generate(prompt, params)[0].outputs]
    for broken in range(1, 8):
        llm = tiny_llm(block_size=4, num_kv_blocks=32)
        llm.cache.data.fill_(9.0)
        llm.add_request(prompt, params, request_id="x")
        target, name = {
            "before the copies": (llm.runner, "run"),
            "in the model": (llm.model, "logits"),
            "in sampling": (sampler, "sample"),
            "while accepting": (llm, "_accept"),
        }[place]
        real, calls = getattr(target, name), [0]

        def fail(*args: object, real=real, calls=calls, broken=broken) -> object:
            calls[0] += 1
            if calls[0] == broken:
                raise error
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(target, name, fail)
            for _ in range(40):
                with contextlib.suppress(error):
                    llm.step()
                llm.scheduler.check()
        assert [r.output for r in llm.requests["x"]] == expected, broken
        llm.abort("x")
        assert llm.pool.num_free == 32


def test_unchunked_requests_that_outgrew_the_budget_resume() -> None:
    """Preempted at 20 tokens with a budget of 12: without chunks it could never come back."""
    llm = tiny_llm(block_size=4, num_kv_blocks=10, max_num_batched_tokens=12, enable_chunked_prefill=False)
    work = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2]]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    assert tokens_of(run(llm, work, params)) == tokens_of(run(tiny_llm(), work, params))
    assert llm.scheduler.num_preemptions > 0


def test_a_plan_that_stays_empty_is_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    monkeypatch.setattr(llm.scheduler, "_admit", lambda *_: False)
    with pytest.raises(RuntimeError, match="bug in the scheduler"):
        llm.generate([1], SamplingParams(max_tokens=1))
    assert not llm.requests


@pytest.mark.parametrize("bad", [7, {"a": 1}, b"x", [True], None, [1.5], ["a"], [96], []])
def test_a_bad_prompt_among_good_ones(bad: object) -> None:
    llm = tiny_llm()
    outputs = llm.generate([[1, 2], bad], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert outputs[1].error and not outputs[0].error and len(outputs[0].outputs[0].token_ids) == 2
    assert not llm.requests and not llm.scheduler.waiting


def test_wrong_arguments_leave_nothing_behind() -> None:
    llm = tiny_llm()
    good = SamplingParams(max_tokens=2)
    for call in (
        lambda: llm.generate(b"x", good),
        lambda: llm.generate({"a": 1}, good),
        lambda: llm.generate(None, good),
        lambda: llm.generate([True, False], good),
        lambda: llm.generate([1, 2], {"max_tokens": 2}),
        lambda: llm.generate([1], SamplingParams(min_tokens=1, stop_token_ids=range(96))),
    ):
        with pytest.raises(RequestError):
            call()
    assert not llm.requests


def test_arrays_are_token_ids() -> None:
    llm, params = tiny_llm(), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    expected = tokens_of(llm.generate([[1, 2, 3]], params))
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.int64(1), 2, 3], np.array([[1, 2, 3]])):
        assert tokens_of(llm.generate(prompt, params)) == expected
    assert tokens_of(llm.generate([np.array([1, 2, 3])], params)) == expected


def test_extreme_sampling_values() -> None:
    llm = tiny_llm()
    greedy = llm.generate([5], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))[0].outputs[0].token_ids
    for more in ({"top_p": 1e-46}, {"top_k": 1}, {"min_p": 1.0}):
        params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, **more)
        assert llm.generate([5], params)[0].outputs[0].token_ids == greedy
    huge = llm.generate([5], SamplingParams(max_tokens=2, top_k=2**70, ignore_eos=True))[0].outputs[0]
    assert len(huge.token_ids) == 2
    llm.num_ids = 50
    hot = SamplingParams(max_tokens=20, temperature=3.5e38, seed=3, min_tokens=20, stop_token_ids=[7])
    drawn = llm.generate([5], hot)[0].outputs[0].token_ids
    assert len(drawn) == 20 and max(drawn) < 50 and 7 not in drawn


def test_ids_of_requests() -> None:
    llm, params = tiny_llm(), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    llm.add_request([1], params, request_id="request-1")
    assert [o.error for o in llm.generate([[1], [2], [3]], params)] == [None] * 3
    llm.add_request([1], SamplingParams(max_tokens=50, ignore_eos=True), request_id="a")
    with pytest.raises(RequestError, match="running already"):
        llm.add_request([1], params, request_id="a")
    llm.abort("a")
    while llm.step():
        pass
    assert llm.add_request([1], params, request_id="request-1") == "request-1"  # done: the name is free again


def test_an_aborted_stream_ends() -> None:
    llm, seen = tiny_llm(), []
    for delta in llm.stream([1], SamplingParams(max_tokens=50, ignore_eos=True)):
        seen.append(delta.finish_reason)
        if len(seen) == 3:
            llm.abort(next(iter(llm.requests)))
    assert seen == [None] * 3 + ["abort"] and not llm.requests


def test_an_error_in_any_completion_is_raised_by_stream() -> None:
    """The first tokens of the completions differ; one of them leads to NaN."""
    llm = LLM.from_parts(TINY, Scripted(lambda *_: torch.zeros(96)), None)
    params = SamplingParams(max_tokens=3, n=3, seed=1, ignore_eos=True)
    firsts = [o.token_ids[0] for o in llm.generate([1], params)[0].outputs]
    assert firsts[0] != firsts[2]

    def script(token: int, position: int) -> torch.Tensor:
        return torch.full((96,), float("nan")) if token == firsts[2] else torch.zeros(96)

    llm = LLM.from_parts(TINY, Scripted(script), None)
    with pytest.raises(RequestError, match="finite"):
        list(llm.stream([1], params))
    assert not llm.requests and llm.pool.num_free == len(llm.pool.blocks)


def test_scoring_with_several_completions_gives_as_many() -> None:
    outputs = tiny_llm().generate([5, 6], SamplingParams(max_tokens=0, n=3))[0].outputs
    assert [(o.index, o.token_ids, o.finish_reason) for o in outputs] == [(i, [], "length") for i in range(3)]


def test_unseeded_is_not_a_small_seed() -> None:
    llm = LLM.from_parts(TINY, tiny_model(), None)
    free = llm.generate([5], SamplingParams(max_tokens=12, **FREE))[0].outputs[0].token_ids
    for seed in range(3):
        assert llm.generate([5], SamplingParams(max_tokens=12, seed=seed, **FREE))[0].outputs[0].token_ids != free


def test_metrics_cover_sampling_and_all_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower bound on measured times, set by a pause that the test makes itself."""
    real = sampler.sample

    def slow(*args: object) -> list[int]:
        time.sleep(0.02)
        return real(*args)

    monkeypatch.setattr(sampler, "sample", slow)
    metrics = tiny_llm().generate([5], SamplingParams(max_tokens=2, ignore_eos=True))[0].metrics
    assert metrics.ttft >= 0.02 and metrics.e2e >= metrics.ttft + 0.02
    eos = dataclasses.replace(TINY, eos_token_ids=tuple(range(1, 9)))
    output = LLM.from_parts(eos, tiny_model(), None).generate([5], SamplingParams(max_tokens=40, n=4, seed=5))[0]
    counts = [len(o.token_ids) for o in output.outputs]
    assert len(set(counts)) > 1 and output.metrics.e2e >= 0.02 * max(counts)


def test_types_of_engine_and_sampling_arguments() -> None:
    wrong = ({"block_size": "16"}, {"block_size": 1.5}, {"num_kv_blocks": 2.5}, {"max_num_seqs": None}, {"seed": "x"})
    for bad in wrong:
        with pytest.raises(RequestError, match=next(iter(bad))):
            EngineConfig(**bad)
    for bad in ({"stop": 5}, {"stop_token_ids": 5}, {"stop_token_ids": ["x"]}):
        with pytest.raises(RequestError, match="stop"):
            SamplingParams(**bad)
    with pytest.raises(RequestError, match="device"):
        LLM("smollm2-135m", device="meta")


def test_long_prompts_are_scored_a_few_positions_at_a_time() -> None:
    """Logits of 8,192 positions and 150,000 ids would take 5 GB, and their log probabilities as much again."""
    prompts = [[(7 * i + k) % 90 + 1 for i in range(200)] for k in range(3)]
    params = SamplingParams(max_tokens=3, prompt_logprobs=1, **FREE | {"temperature": 0.0})
    llm = tiny_llm(num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=512)
    plain, rows = llm.runner.logits, []
    llm.runner.logits = lambda hidden: rows.append(len(hidden)) or plain(hidden)  # type: ignore[method-assign]
    found = llm.generate(prompts, params)
    assert max(rows) <= 64
    for prompt, output in zip(prompts, found, strict=True):
        expected = full_logits(llm.model, prompt).log_softmax(-1)
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 200
        for place, scores in enumerate(output.prompt_logprobs[1:], 1):
            best = int(expected[place - 1].argmax())
            assert set(scores) == {prompt[place], best}
            for token, score in scores.items():
                assert score == pytest.approx(expected[place - 1, token].item(), abs=1e-5)


@pytest.mark.parametrize("place", [0, 70, 198, 199])
def test_a_score_that_is_not_finite_ends_that_request_only(place: int) -> None:
    """Wherever it is in the prompt, and nothing of it is matched later."""

    def script(token: int, position: int) -> torch.Tensor:
        wrong = token == 9 and position == place
        return torch.full((96,), float("nan")) if wrong else torch.arange(96.0) / 9

    llm = LLM.from_parts(TINY, Scripted(script), None, num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=512)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, **FREE | {"temperature": 0.0})
    bad, good = llm.generate([[9] * 200, [8] * 200], params)
    assert "not finite" in bad.error and good.error is None and good.outputs[0].token_ids == [95, 95]
    assert not llm.pool.match([9] * 200) and len(llm.pool.match([8] * 200)) == 12
