"""Many requests of every kind through a small pool: nothing lost, nothing leaked, every text equal to its solo run.

MINILLM_SOAK=2000 sets the number of requests; the default keeps `make test` short.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from test_text_in_engine import Pieces
from tiny import TINY, tiny_model

from minillm.llm import LLM
from minillm.model import Transformer
from minillm.request import Request, SamplingParams, Status
from minillm.weights import random_state_dict

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
COUNT = int(os.environ.get("MINILLM_SOAK", "250"))
ENDLESS = replace(TINY, eos_token_ids=(3,))
LETTERS = "abcdefghijklmnopqrstuvwxyz "
TOKENS = Pieces(*[LETTERS[i % 27] * (1 + i % 2) for i in range(90)], "é".encode()[:1], "é".encode()[1:])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_soak(device: str, preemption: str) -> None:
    draw, model = random.Random(preemption), tiny_model(ENDLESS)
    prefixes = [[draw.randrange(4, 96) for _ in range(n)] for n in (5, 16, 23)]
    kinds = [
        SamplingParams(max_tokens=12, temperature=0.0),
        SamplingParams(max_tokens=9, temperature=1.0, seed=5),
        SamplingParams(max_tokens=20, temperature=0.9, seed=6, stop=["ab", "qq", "e z"], top_k=20),
        SamplingParams(max_tokens=7, temperature=1.1, seed=7, n=3, repetition_penalty=1.2),
        SamplingParams(max_tokens=1, temperature=0.0, logprobs=2, prompt_logprobs=1),
    ]
    prompts = [draw.choice(prefixes) + [draw.randrange(4, 96) for _ in range(draw.randrange(1, 9))] for _ in range(12)]
    solo = LLM.from_parts(ENDLESS, model, TOKENS, num_kv_blocks=64, enable_prefix_caching=False)  # type: ignore[arg-type]
    expected: dict[tuple[int, int], list[tuple[list[int], str]]] = {}
    for p, prompt in enumerate(prompts):
        for k, kind in enumerate(kinds):
            outputs = solo.generate(prompt, kind)[0].outputs
            expected[p, k] = [(one.token_ids, one.text) for one in outputs]

    if device == "cuda":  # with kernels, graphs and a step in flight; the solo runs were the CPU's
        moved = {name: tensor.cuda() for name, tensor in random_state_dict(ENDLESS, 0).items()}
        model = Transformer.from_state(ENDLESS, moved)
    llm = LLM.from_parts(
        ENDLESS, model, TOKENS, block_size=4, num_kv_blocks=24, max_num_seqs=9, max_num_batched_tokens=24,  # type: ignore[arg-type]
        preemption=preemption, num_swap_blocks=10 if preemption == "swap" else None, long_prefill_token_threshold=16,
    )  # fmt: skip
    asked: dict[str, tuple[int, int, bool]] = {}
    told: dict[tuple[str, int], tuple[list[int], str, str | None]] = {}
    live: dict[str, list[Request]] = {}
    reasons: dict[str | None, int] = {}
    while len(asked) < COUNT or live:
        for _ in range(draw.choice([0, 0, 0, 1, 1, 2, 5])):
            if len(asked) < COUNT:
                p, k, name = draw.randrange(len(prompts)), draw.randrange(len(kinds)), f"r{len(asked)}"
                timeout = draw.choice([None] * 8 + [1e-9, 0.004, 0.02])
                llm.add_request(prompts[p], kinds[k], name, priority=draw.choice([0, 0, 0, -1, 1]), timeout=timeout)
                asked[name], live[name] = (p, k, timeout is None), llm.requests[name]
        if live and draw.random() < 0.05:
            name = draw.choice(list(live))
            requests = live.pop(name)
            llm.abort(name)
            assert all(r.status is Status.FINISHED for r in requests)
            asked[name] = (*asked[name][:2], False)
        for request, delta in llm.step():
            tokens, text, end = told.get((request.id, request.index), ([], "", None))
            assert end is None, "something came after the end"
            told[request.id, request.index] = (tokens + delta.token_ids, text + delta.text, delta.finish_reason)
        llm.scheduler.check()
        for name in [name for name in live if llm.is_done(name)]:
            for request in live.pop(name):
                tokens, text, end = told[name, request.index]
                reasons[end] = reasons.get(end, 0) + 1
                assert (tokens, text, end) == (request.output, request.text, request.finish_reason)
            llm.abort(name)
    assert llm.pool.num_free == 24 and not llm.requests
    assert llm.scheduler.swap.num_free == len(llm.scheduler.swap.blocks)
    for (name, index), (tokens, text, end) in told.items():
        p, k, whole = asked[name]
        right_tokens, right_text = expected[p, k][index]
        if end in ("stop", "length"):
            assert (tokens, text) == (right_tokens, right_text)
        else:
            assert tokens == right_tokens[: len(tokens)] and (end != "timeout" or text[:-1] in right_text or not text)
    for name, (p, k, whole) in asked.items():
        if whole:  # neither aborted nor in a hurry: all its completions came
            assert sum((name, i) in told for i in range(kinds[k].n)) == kinds[k].n, f"{name} of {p}, {k} was lost"
    assert reasons.get("stop") and reasons.get("length") and reasons.get("timeout")
    assert llm.scheduler.num_preemptions and llm.scheduler.num_hit_tokens
    assert bool(llm.scheduler.num_swaps) == (preemption == "swap")
