"""Sampling: pure functions on hand-made logits, and draws against their distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny import TINY, Scripted, one_hot, run, tokens_of

from minillm import sampler
from minillm.llm import LLM
from minillm.metrics import RequestMetrics
from minillm.request import Request, SamplingParams

NEVER = float("-inf")


def request(tokens=(1,), num_prompt: int = 1, stop_ids=(), **params) -> Request:
    made = Request("r", list(tokens), SamplingParams(**params), RequestMetrics(0.0), num_prompt=num_prompt)
    made.stop_ids = frozenset(stop_ids)
    return made


def sample(logits: torch.Tensor, requests: list[Request], seeds: list[int], num_ids: int) -> list[int]:
    return sampler.sample(logits, [replace(one, seed=seed) for one, seed in zip(requests, seeds, strict=True)], num_ids)


def penalize(logits: torch.Tensor, prompt: list[int], output: list[int], *penalties: float) -> torch.Tensor:
    return sampler.penalize(logits[None], [prompt], [output], *torch.tensor(penalties)[:, None])[0]


def support(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def test_temperature_zero_is_argmax_and_ties_go_to_the_lowest_id() -> None:
    """nano-vllm pull request 249: greedy was refused, because the sampler divides by the temperature."""
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 9.0]])
    rows = [request(temperature=0), request(temperature=1)]
    for seed in range(20):
        assert sample(logits.clone(), rows, [seed, seed], 3)[0] == 1
    assert sample(logits, [request(temperature=1e-6)] * 2, [1, 2], 3)[1] == 2


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn() -> None:
    """transformers issue 18268: the model's vocabulary is padded, and a padding id was sampled."""
    logits = torch.zeros(1, 96)
    logits[0, 93] = 50.0
    for seed in range(1000):
        assert sample(logits.clone(), [request(temperature=1)], [seed], 90)[0] < 90
    assert sample(logits.clone(), [request(temperature=0)], [0], 90)[0] < 90


@pytest.mark.parametrize("p,kept", [(0.5, [0]), (0.75, [0, 1]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2, 3]), (1e-9, [0])])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, kept: list[int]) -> None:
    """transformers issue 18976 and llama.cpp pull request 1953: off by one at the boundary, in both directions."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert support(sampler.keep_top_p(logits, torch.tensor([p]))) == [kept]


def test_top_p_keeps_one_of_many_equal() -> None:
    assert support(sampler.keep_top_p(torch.zeros(1, 5), torch.tensor([0.1]))) == [[0]]


def test_top_k_is_exact_under_ties_and_differs_by_row() -> None:
    """vLLM issue 50979: more than k survived a tie."""
    logits = torch.tensor([[2.0, 1.0, 2.0, 2.0, 0.0]] * 4)
    assert support(sampler.keep_top_k(logits, torch.tensor([2, 1, 0, 9]))) == [
        [0, 2],
        [0],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]


def test_top_k_then_top_p_never_removes_everything() -> None:
    """mlx-lm pull request 388: top-p after a top-k that was not renormalised could mask every token."""
    logits = torch.tensor([[0.3, 0.3, 0.2, 0.2]]).log()
    left = sampler.keep_top_p(sampler.keep_top_k(logits, torch.tensor([2])), torch.tensor([0.6]))
    assert support(left) == [[0, 1]]


def test_min_p() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.2, 0.05]]).log()
    assert support(sampler.keep_min_p(logits, torch.tensor([0.45]))) == [[0, 1]]
    assert support(sampler.keep_min_p(logits, torch.tensor([0.0]))) == [[0, 1, 2, 3]]
    assert support(sampler.keep_min_p(logits, torch.tensor([1.0]))) == [[0]]


def test_repetition_penalty() -> None:
    """transformers issue 2302: negative logits were divided too; applied once per occurrence; applied twice."""
    logits = torch.tensor([2.0, -2.0, 1.0, 0.0])
    out = penalize(logits, [0, 1], [0, 0], 2.0, 0.0, 0.0)
    assert out.tolist() == [1.0, -4.0, 1.0, 0.0] and logits.tolist() == [2.0, -2.0, 1.0, 0.0]
    assert torch.equal(penalize(logits, [0, 1], [0], 1.0, 0.0, 0.0), logits)


def test_presence_and_frequency_count_the_output_only() -> None:
    """vllm-metal issue 69."""
    out = penalize(torch.zeros(4), [0, 0, 1], [1, 2, 2], 1.0, 0.5, 0.25)
    assert out.tolist() == [0.0, -0.75, -1.0, 0.0]


def test_penalties_survive_preemption() -> None:
    def script(token: int, position: int) -> torch.Tensor:
        return torch.linspace(1.0, 0.5, 96)

    params = SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.3, ignore_eos=True)
    roomy = LLM.from_parts(TINY, Scripted(script), None, block_size=4, num_kv_blocks=64)
    tight = LLM.from_parts(TINY, Scripted(script), None, block_size=4, num_kv_blocks=4)
    work = [[0, 1, 2], [1], [2]]
    assert tokens_of(run(roomy, work, params)) == tokens_of(run(tight, work, params))
    assert tight.scheduler.num_preemptions > 0


def test_min_tokens_holds_back_every_end() -> None:
    """vLLM issues 21987, 26317, 32642."""
    llm = LLM.from_parts(TINY, Scripted(lambda *_: one_hot(0)), None)
    for more in ({}, {"stop_token_ids": [5]}):
        out = llm.generate([3], SamplingParams(max_tokens=9, min_tokens=4, temperature=0, **more))[0].outputs[0]
        assert len(out.token_ids) == 5 and out.token_ids[-1] == 0 and out.finish_reason == "stop"
        assert 0 not in out.token_ids[:4] and (not more or 5 not in out.token_ids)


def test_end_tokens() -> None:
    """vLLM issues 4180 and 4589: several end tokens; ignore_eos; stop_token_ids are added, not instead."""
    import dataclasses

    config = dataclasses.replace(TINY, eos_token_ids=(11, 12))
    llm = LLM.from_parts(config, Scripted(lambda token, _: one_hot(token + 1), config), None)
    greedy = dict(max_tokens=6, temperature=0)
    stopped = llm.generate([8], SamplingParams(**greedy))[0].outputs[0]
    assert stopped.token_ids == [9, 10, 11] and stopped.finish_reason == "stop"
    assert llm.generate([11], SamplingParams(**greedy))[0].outputs[0].token_ids == [12]
    ignored = llm.generate([8], SamplingParams(ignore_eos=True, **greedy))[0].outputs[0]
    assert ignored.token_ids == [9, 10, 11, 12, 13, 14] and ignored.finish_reason == "length"
    added = llm.generate([6], SamplingParams(stop_token_ids=[8], **greedy))[0].outputs[0]
    assert added.token_ids == [7, 8]
    both = llm.generate([9], SamplingParams(stop_token_ids=[90], **greedy))[0].outputs[0]
    assert both.token_ids == [10, 11]
    own = llm.generate([9], SamplingParams(stop_token_ids=[12], ignore_eos=True, **greedy))[0].outputs[0]
    assert own.token_ids == [10, 11, 12] and own.finish_reason == "stop"


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 positions; the bound has a false alarm rate of about 1e-6 for 5 degrees of freedom."""
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    count = 20_000
    noise = sampler.gumbel_noise(torch.full((count,), 5), torch.arange(count), 6)
    counts = (probs.log() + noise).argmax(-1).bincount(minlength=6)
    expected = probs * count
    assert float(((counts - expected) ** 2 / expected).sum()) < 35.9
    noise = sampler.gumbel_noise(torch.arange(count), torch.full((count,), 5), 6)
    counts = (probs.log() + noise).argmax(-1).bincount(minlength=6)
    assert float(((counts - expected) ** 2 / expected).sum()) < 35.9


def test_noise_is_gumbel_finite_and_independent() -> None:
    noise = sampler.gumbel_noise(torch.arange(300), torch.arange(300) * 7, 500)
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    rows = torch.corrcoef(noise) - torch.eye(300)
    assert float(rows.abs().max()) < 0.3
    near = sampler.gumbel_noise(torch.tensor([1, 1, 2, 0]), torch.tensor([1, 2, 1, 3]), 20_000)
    assert float((torch.corrcoef(near) - torch.eye(4)).abs().max()) < 0.03
    assert torch.equal(noise[7:8], sampler.gumbel_noise(torch.tensor([7]), torch.tensor([49]), 500))


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.linspace(0, 3, 96)
    llm = LLM.from_parts(TINY, Scripted(lambda *_: logits), None)
    out = llm.generate([5], SamplingParams(max_tokens=3, temperature=0.1, top_k=2, logprobs=3, ignore_eos=True))[
        0
    ].outputs[0]
    raw = logits.log_softmax(-1)
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert {95, 94, 93} <= set(entry) and token in entry
        assert all(value == pytest.approx(raw[i].item(), abs=1e-6) for i, value in entry.items())


def test_half_precision_facts() -> None:
    """Qwen3 issue 761: why fp16 activations become NaN and bf16 ones do not."""
    assert torch.tensor(70000.0).half().isinf() and torch.tensor(70000.0).bfloat16().item() == 70144


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows = [
        request(temperature=0.7, top_k=5),
        request(temperature=1.3, top_p=0.8),
        request(temperature=0),
        request([1, 2, 3], 1, temperature=1, min_p=0.1, repetition_penalty=1.5, presence_penalty=0.5),
    ]
    together = sample(logits.clone(), rows, [1, 2, 3, 4], 50)
    alone = [sample(logits[i : i + 1].clone(), [row], [i + 1], 50)[0] for i, row in enumerate(rows)]
    assert together == alone
