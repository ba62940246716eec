"""Bugs that other engines had, each excluded as a whole kind: over block sizes, lengths, chunk sizes, orders, moments.

Rows are those of the bug table and cases those of the case list in the project's collection of public reports.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from random import Random

import pytest
import torch
from test_text import byte_level
from tiny import TINY, Scripted, full_logits, one_hot, tiny_model, tokens_of
from torch import Tensor, nn

from minillm import sampler, text
from minillm.blocks import KVPool
from minillm.errors import RequestError
from minillm.llm import LLM
from minillm.request import Request, SamplingParams, Status

MODEL = tiny_model()


def greedy(count: int, **more: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 0, **more})


def drawn(count: int, seed: int | None = None, **more: object) -> SamplingParams:
    return greedy(count, **{"temperature": 1.0, "seed": seed, **more})


def engine(model: nn.Module = MODEL, tokenizer: object = None, **options: object) -> LLM:
    """An engine whose cache is NaN wherever nothing was written, so that a slot read by mistake shows."""
    backend = "auto" if options.get("block_size") in (1, 4) else "sdpa"  # numba compiles for each block size
    llm = LLM.from_parts(model.config, model, tokenizer, **{"num_kv_blocks": 64, "attention": backend, **options})
    llm.cache.data.fill_(float("nan"))
    return llm


def counting(**options: object) -> LLM:
    """Token t is followed by t + 1, so the output shows who got what."""
    return engine(Scripted(lambda token, _: one_hot((token + 1) % 96)), **options)


def some_prompts(random: Random, count: int, longest: int) -> list[list[int]]:
    """Prompts with shared beginnings."""
    base = [random.randrange(1, 96) for _ in range(longest)]
    cuts = [random.randrange(longest) for _ in range(count)]
    return [base[:cut] + [random.randrange(1, 96) for _ in range(random.randint(1, longest - cut))] for cut in cuts]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@cache
def plain(tokens: tuple[int, ...]) -> Tensor:
    """Log probabilities after each position, by one pass without a cache: [len(tokens), vocab]."""
    return full_logits(MODEL, tokens).log_softmax(-1)


def rank(request: Request) -> tuple[int, int, int]:
    """Who comes first: the lowest priority number, then first come."""
    return (request.priority, request.order, request.index)


class Broken(Exception):
    pass


class Client:
    """Steps an engine, proves what must hold after each step, and keeps what each completion was told."""

    def __init__(self, llm: LLM, break_at: Sequence[int] = ()) -> None:
        self.llm, self.break_at, self.steps = llm, set(break_at), 0
        self.groups: dict[str, list[Request]] = {}  # the completions of each of its requests
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.texts: dict[tuple[str, int], list[str]] = {}
        self.ends: dict[tuple[str, int], str] = {}

    def add(self, name: str, prompt: Sequence[int], params: SamplingParams, priority: int = 0) -> Request:
        self.llm.add_request(list(prompt), params, request_id=name, priority=priority)
        self.groups[name] = self.llm.requests[name]
        return self.groups[name][0]

    def requests(self) -> list[Request]:
        return [request for group in self.groups.values() for request in group]

    def busy(self) -> bool:
        return any(request.status is not Status.FINISHED for request in self.requests())

    def step(self) -> None:
        llm, budget = self.llm, self.llm.engine_config.max_num_batched_tokens
        before = {r: (r.need, len(r.tokens)) for r in self.requests() if r.status is Status.RUNNING}
        queue = [r for r in self.requests() if r.status in (Status.WAITING, Status.PREEMPTED)]
        computed, news = llm.stats()["computed_tokens"], []
        self.steps += 1
        with breaking(llm.model, self.steps if self.steps in self.break_at else 0):
            news = llm.step()
        llm.scheduler.check()
        used, told = llm.stats()["computed_tokens"] - computed, {}
        assert used <= budget, "more tokens than the budget"
        for request, delta in news:
            key = (request.id, delta.index)
            assert key not in self.ends and key not in told, "told twice, or after its end"
            told[key] = delta
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            self.texts.setdefault(key, []).append(delta.text)
            if delta.finish_reason:
                self.ends[key] = delta.finish_reason
            if request.status is Status.RUNNING:
                assert request.need == 1, "a token for a request whose tokens were not all computed"
        if self.steps in self.break_at or any(r.finish_reason in ("abort", "error") for r in before):
            return
        ahead = [rank(r) for r in queue if r.status in (Status.RUNNING, Status.FINISHED)]
        behind = [rank(r) for r in queue if r.status in (Status.WAITING, Status.PREEMPTED)]
        assert not ahead or not behind or max(ahead) < min(behind), "someone was admitted out of turn"
        kept = [(r, *known) for r, known in before.items() if r.status is not Status.PREEMPTED]
        decodes = [r for r, need, _ in kept if need == 1]
        assert len(decodes) > budget or all((r.id, r.index) in told for r in decodes), "a decode was held up"
        for request, _, length in kept:
            served = request.status is Status.FINISHED or request.num_computed >= length
            assert served or used == budget, "budget is left, and a running request waits"

    def drain(self, most: int = 500) -> Client:
        while self.busy():
            assert most > 0, "no end"
            self.step()
            most -= 1
        stats = self.llm.stats()
        assert not (stats["blocks_used"] or stats["num_running"] or stats["num_waiting"]), "something is left behind"
        for request in self.requests():
            key = (request.id, request.index)
            if request.finish_reason == "abort":
                continue
            assert self.ends[key] == request.finish_reason and self.tokens[key] == request.output
            assert "".join(self.texts[key]) == request.text
        return self

    def prove(self, most: int = 500) -> Client:
        """Run to the end; every token and its log probability are those of one plain pass over prompt and output."""
        for request in self.drain(most).requests():
            assert request.error is None
            if request.finish_reason == "abort" or not request.output:
                continue
            expected = plain(tuple(request.tokens))[request.num_prompt - 1 : -1]
            chosen = expected.gather(1, torch.tensor(request.output)[:, None])[:, 0]
            told = torch.tensor([entry[t] for entry, t in zip(request.logprobs, request.output, strict=True)])
            assert (told - chosen).abs().max() < 1e-4, f"{request.id} read a wrong cache"
            if request.params.temperature == 0:
                assert (expected.amax(-1) - chosen).max() < 1e-4, f"{request.id} is not greedy"
        return self


@contextmanager
def breaking(model: nn.Module, step: int) -> Iterator[None]:
    """If step is not 0: the model raises in this step, before (odd) or after (even) it wrote to the cache."""
    if not step:
        yield
        return

    def fail(*_: object) -> None:
        raise Broken

    hook = model.register_forward_pre_hook if step % 2 else model.register_forward_hook
    with hook(fail), pytest.raises(Broken):
        yield


# ---- blocks and prefix cache


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("spare", [0, 2])
def test_recycled_blocks_never_serve_what_they_held_before(size: int, spare: int) -> None:
    """nano-vllm issue 163 (row 1, case 13): a reused block's hash still led to it, so a request read foreign keys."""
    random = Random(size)
    llm = engine(block_size=size, num_kv_blocks=-(-15 // size) + spare)
    seen: list[list[int]] = []
    for i, prompt in enumerate(some_prompts(random, 6, 12) * 2):
        client = Client(llm)
        request = client.add(str(i), prompt, greedy(3))
        client.prove()
        known = max((common(prompt, tokens[:-1]) for tokens in seen), default=0)
        assert request.num_cached <= known // size * size
        seen.append(request.tokens)
        llm.abort(str(i))


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_a_prompt_that_is_cached_whole_computes_its_last_token(size: int) -> None:
    """nano-vllm issues 144 and 199 (row 2, case 14): nothing was left to compute, and the step failed."""
    for length in sorted({1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size} - {0}):
        llm = engine(block_size=size)
        prompt = [1 + (7 * i) % 95 for i in range(length)]
        for again in (0, 1, 2):
            client = Client(llm)
            request = client.add(str(again), prompt, greedy(1 + again))
            client.prove()
            assert request.num_cached == (length - 1) // size * size * (again > 0)
            assert request.num_output == 1 + again
        turn = client.add("next turn", request.tokens, greedy(2))
        client.prove()
        assert turn.num_cached == (length + 2) // size * size


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("budget,chunked,way", [(3, True, "recompute"), (64, True, "swap"), (12, False, "recompute")])
def test_resuming_starts_from_what_the_cache_holds_then(size: int, budget: int, chunked: bool, way: str) -> None:
    """nano-vllm issue 211 (row 3): a preempted request came back with the count of cached tokens it had before."""
    random = Random(size)
    for first in (1, 2, 4, 8):
        limits = dict(max_num_batched_tokens=budget, enable_chunked_prefill=chunked, enable_prefix_caching=chunked)
        llm = engine(block_size=size, num_kv_blocks=-(-21 // size) + 2, preemption=way, **limits)
        client = Client(llm, break_at=(first, first + 1, first + 4, 17, 22))
        for i, prompt in enumerate(some_prompts(random, 4, 12)):
            client.add(str(i), prompt, greedy(9, n=1 + i % 2))
        for _ in range(first + 1):
            client.step()
        llm.abort("1")  # its blocks go to others while the rest waits
        client.prove()
        assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("size,blocks", [(1, 1), (1, 5), (2, 2), (5, 1), (4, 2)])
@pytest.mark.parametrize("chunked", [True, False])
def test_what_cannot_fit_is_refused_and_what_fits_fills_the_pool(size: int, blocks: int, chunked: bool) -> None:
    """nano-vllm issues 274 and 277, vLLM issues 39734 and 52530 (row 4): larger than the pool meant a hang."""
    room = size * blocks
    for length, count in itertools.product(range(1, room + 3), (0, 1, 2, 99)):
        options = dict(block_size=size, num_kv_blocks=blocks, enable_chunked_prefill=chunked)
        client = Client(counting(**options, max_num_batched_tokens=2 if chunked else room + 2))
        client.add("mate", [90], greedy(min(2, room - 1)))
        if length > room - (count > 0):
            with pytest.raises(RequestError, match=rf"{length} tokens.*{room}"):
                client.add("x", range(length), greedy(count))
            client.drain()
        else:
            client.add("x", range(length), greedy(count))
            client.drain(4 * room + 20)
            assert len(client.tokens["x", 0]) == min(count, room - length)
            assert client.ends["x", 0] == "length"
        assert client.tokens["mate", 0] == [91, 92][: min(2, room - 1)]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_preempted_request_leaves_its_step(size: int, seed: int) -> None:
    """tt-inference-server issue 2042, vLLM issues 26661 and 9342 (rows 5, 6): a victim kept its place in the step."""
    random = Random(seed)
    way = dict(preemption="swap", num_swap_blocks=5) if seed % 2 else {}
    llm = engine(block_size=size, num_kv_blocks=-(-14 // size) + seed % 3, **way)
    client, work = Client(llm), some_prompts(random, 7, 8)
    while work or client.busy():
        if work and client.steps % 2 == 0:
            client.add(str(len(work)), work.pop(), drawn(6, seed, n=1 + seed % 2), priority=random.randrange(3))
        was = {r for r in client.requests() if r.status is Status.RUNNING}
        llm.engine_config.max_num_batched_tokens = random.choice((1, 2, 3, 5, 64))  # what a victim had is handed on
        client.step()
        victims = [rank(r) for r in was if r.status is Status.PREEMPTED]
        left = [rank(r) for r in was if r.status is Status.RUNNING]
        assert not victims or not left or min(victims) > max(left), "a more important request was preempted"
        assert client.steps < 500
    client.prove()
    assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("budget", [3, 64])
def test_a_hit_on_a_running_request_finds_exactly_what_is_computed(size: int, budget: int) -> None:
    """MinivLLM issue 98 (row 7): hits on blocks of a running request, some not written yet, gave silent garbage."""
    prompt = [5 + 3 * i for i in range(12)]
    for delay in range(10):
        client = Client(engine(block_size=size, max_num_batched_tokens=budget))
        first = client.add("first", prompt, greedy(4))
        for _ in range(delay):
            client.step()
        second = client.add("second", [*prompt[:9], 50, 51], greedy(3))
        while second.status is Status.WAITING:
            done = len(first.tokens) - 1 if first.status is Status.FINISHED else first.num_computed
            client.step()
        assert second.num_cached == min(done, 9) // size * size
        client.prove()


@pytest.mark.parametrize("size,budget", [(2, 64), (4, 7)])
def test_hits_misses_chunks_and_decodes_share_a_step_in_any_order(size: int, budget: int) -> None:
    """vLLM issue 7018 (row 8): beside a row without a prefix hit, the row with one got an empty block table."""
    warm = [2 + 5 * i for i in range(13)]
    work = {"two hits": [*warm[:9], 1], "one hit": [*warm[:5], 2, 3], "cold": [90, 91], "long": [*range(30, 50)]}
    for order in itertools.permutations(work):
        llm = engine(block_size=size, max_num_batched_tokens=budget)
        client = Client(llm)
        client.add("warm", warm, greedy(1))
        client.drain()
        client.add("decode", [7], greedy(9))
        client.step()
        hits = [client.add(name, work[name], greedy(3)) for name in order]
        client.prove()
        expected = {"two hits": 8, "one hit": 4, "cold": 0, "long": 0}
        assert {r.id: r.num_cached for r in hits} == expected


@pytest.mark.parametrize("shift", [7, 8, 12, 15, 16])
def test_ids_that_agree_in_their_low_bits_are_told_apart(shift: int) -> None:
    """vllm-mlx issue 444 (row 9): token ids were cut to 8 bits in the hash, which gave false hits."""
    wide = dataclasses.replace(TINY, vocab_size=2**17, hidden_size=8, eos_token_ids=())
    llm, prompt = engine(Scripted(lambda *_: torch.zeros(2**17), wide), block_size=2), [1, 2, 3, 4, 5, 6, 7]
    llm.generate(prompt, greedy(0))
    for place in range(7):
        other = list(prompt)
        other[place] += 1 << shift
        assert llm.generate(other, greedy(0))[0].num_cached_tokens == min(place // 2 * 2, 6)


@pytest.mark.parametrize("size,moment", [(1, 2), (4, 4), (16, 2)])
@pytest.mark.parametrize("scheduling,attention", [("continuous", "sdpa"), ("static", "auto"), ("dynamic", "paged")])
def test_what_a_free_slot_holds_is_never_read(size: int, moment: int, scheduling: str, attention: str) -> None:
    """vLLM issue 43869, rvllm issue 32, flashinfer issue 2883, nano-vllm-v1 issue 3 (rows 17, 18, 20): padding read, or
    wrote, a slot of someone else, the last one, or a column left over from a larger step."""
    way = dict(scheduling=scheduling, attention=attention, enable_prefix_caching=False)
    llm = engine(block_size=size, num_kv_blocks=90, **way)
    client, random = Client(llm), Random(size)
    for name in "abcde":
        client.add(name, [random.randrange(1, 96) for _ in range(random.randint(1, 9))], greedy(8, n=1 + (name == "c")))
    while client.busy():
        client.step()
        if client.steps == moment:
            llm.abort("a")  # it has the first block
        held = {r.block_table[p // size] * size + p % size for r in client.requests() for p in range(r.num_computed)}
        free = [slot for slot in range(llm.cache.data.shape[2]) if slot not in held]
        llm.cache.data[:, :, free] = float("nan")
    client.prove()


WEAK = {
    "constant": lambda parent, tokens: b"same",
    "length": lambda parent, tokens: bytes([len(parent), len(tokens)]),
    "no parent": lambda parent, tokens: bytes(tokens),
    "parent only": lambda parent, tokens: bytes([len(parent) + 1]) * (len(parent) + 1),
    "one bit": lambda parent, tokens: bytes([sum(tokens) % 2]),
}


@pytest.mark.parametrize("weak", WEAK)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_digests_that_collide_never_give_foreign_keys(weak: str, size: int) -> None:
    """openvino.genai issue 3722, vLLM issue 8229 and pull request 12621 (row 10, case 17): the hash was trusted."""
    random = Random(size)
    llm = engine(block_size=size, num_kv_blocks=40 // size, max_num_batched_tokens=9)
    llm.pool.hash_fn = WEAK[weak]
    seen: list[list[int]] = []
    for batch in range(5):
        client = Client(llm)
        work = [[random.choice((3, 4)) for _ in range(random.randint(1, 9))] for _ in range(3)]
        for i, prompt in enumerate(work):
            client.add(f"{batch}.{i}", prompt, greedy(3))
        for request in client.prove().requests():
            others = [*seen, *(r.tokens for r in client.requests() if r is not request)]
            assert request.num_cached <= max((common(request.tokens, tokens) for tokens in others), default=0)
        seen += [request.tokens for request in client.requests()]
        for name in client.groups:
            llm.abort(name)


class Letters:
    """A tokenizer with one letter for each id."""

    vocab_size, eos_ids = TINY.vocab_size, ()

    def token_bytes(self, token: int) -> bytes:
        return chr(0x4E00 + token).encode()

    def encode(self, prompt: str) -> list[int]:
        return [ord(c) - 0x4E00 for c in prompt]


@pytest.mark.parametrize("end", ["length", "stop token", "stop string", "abort", "broken step", "full"])
@pytest.mark.parametrize("size", [1, 4])
def test_the_cache_is_transparent_however_the_warm_up_ended(end: str, size: int) -> None:
    """vLLM issues 5543 and 54490, sglang issue 28374 (rows 12, 16): a warm-up changed later greedy output."""
    solo = Client(engine())
    for length in sorted({1, 2 * size, 2 * size + 1}):
        prompt = [3 + 7 * i for i in range(length)]
        full = solo.add(f"{length}", prompt, greedy(9))
        solo.drain()
        third = chr(0x4E00 + full.output[2])
        more = {"stop token": {"stop_token_ids": [full.output[2]]}, "stop string": {"stop": [third]}}.get(end, {})
        for moment in (1, 3, 6) if end in ("abort", "broken step") else (0,):
            limits = {"max_model_len": length + 4} if end == "full" else {}
            llm = engine(tokenizer=Letters(), block_size=size, max_num_batched_tokens=4, **limits)
            client = Client(llm, break_at=[moment] if end == "broken step" else [])
            warm = client.add("warm", prompt, greedy(9 if end == "full" else 6, **more))
            for _ in range(moment if end == "abort" else 0):
                client.step()
            computed = warm.num_computed
            if end == "abort":
                llm.abort("warm")
            else:
                client.drain()
            if warm.finish_reason != "abort":
                computed = len(warm.tokens) - 1  # all but the last token, which nobody needed
            assert (warm.finish_reason == "stop") == end.startswith("stop")
            llm.engine_config.max_num_batched_tokens, later = 64, Client(llm)
            if end != "full":
                again = later.add("again", warm.tokens, greedy(1))
                later.step()
                assert again.num_cached <= computed // size * size
            for cut in {1, length - 1, length, length + 1, length + 2, len(warm.tokens)} - {0}:
                later.add(f"{cut}", [*full.tokens[: min(cut, length + 2)], 95], greedy(1))
            later.prove()


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("shared", [0, 7])
def test_what_is_computed_again_is_no_hit(size: int, shared: int) -> None:
    """vLLM issue 25780 (row 13): tokens recomputed after a preemption were counted as hits of the prefix cache."""
    for moments in ((), (3,), (1, 4, 5, 9)):
        llm = engine(block_size=size, num_kv_blocks=-(-26 // size))
        client = Client(llm, break_at=moments)
        for i in range(4):
            client.add(str(i), [*range(60, 60 + shared), *range(10 * i + 1, 10 * i + 7)], greedy(8))
        first = {}
        while client.busy():
            client.step()
            for request in client.requests():
                if request.status is not Status.WAITING:
                    assert first.setdefault(request.id, request.num_cached) == request.num_cached
        client.prove()
        assert llm.stats()["preemptions"] > 0
        assert all(hit <= shared // size * size for hit in first.values())
        queried = sum(request.num_prompt for request in client.requests())
        assert llm.stats()["prefix_hit_rate"] == pytest.approx(sum(first.values()) / queried)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("blocks", [6, 64])
def test_abort_at_any_moment_ends_all_completions_and_frees_all(count: int, blocks: int) -> None:
    """vLLM issues 57061 and 14326, ATOM pull request 1562 (row 15, case 23): a client that left kept its blocks."""
    for moment, priority in itertools.product((0, 1, 2, 3, 4, 5, 7, 10), (-1, 1)):
        limits = dict(max_num_batched_tokens=5, max_num_seqs=4, preemption="swap" if priority > 0 else "recompute")
        llm = engine(block_size=4, num_kv_blocks=blocks, **limits)
        client = Client(llm)
        client.add("mate", [9, 8, 7], greedy(9))
        client.step()
        # with stop tokens, so that some completions are done while others run
        x = client.add("x", range(1, 12), drawn(8, moment, n=count, stop_token_ids=range(1, 20)), priority)
        client.add("later", [1, 2, 3, 4, 5, 60], greedy(3))
        for _ in range(moment):
            client.step()
        done = dict(client.ends)
        group = list(llm.requests["x"])
        for _ in range(2):
            llm.abort("x")
            llm.scheduler.check()
        assert "x" not in llm.requests and all(r.status is Status.FINISHED and not r.block_table for r in group)
        assert all(r.finish_reason == "abort" or (r.id, r.index) in done for r in group)
        again = client.add("x", x.tokens[:6], greedy(1))  # the name is free, and nothing of the old one comes
        for told in (client.ends, client.tokens, client.texts):
            for index in range(count):
                told.pop(("x", index), None)
        client.prove()
        assert again.num_output == 1 and len(client.tokens["mate", 0]) == 9


@pytest.mark.parametrize("written", [False, True])
def test_abort_while_the_model_runs(written: bool) -> None:
    """mini-sglang issue 111, sglang issues 18803 and 28374 (rows 14, 16): blocks of a request in flight were freed
    twice, or its unfinished keys went into the prefix cache."""
    for name, moment in itertools.product("abc", range(1, 9)):
        llm = engine(block_size=2, num_kv_blocks=13, max_num_batched_tokens=5)
        client = Client(llm)
        for i, other in enumerate("abc"):
            client.add(other, [9 * i + 1, 9 * i + 2, 9 * i + 3, 4], greedy(6, n=1 + i % 2))
        for _ in range(moment - 1):
            client.step()
        hook = llm.model.register_forward_hook if written else llm.model.register_forward_pre_hook
        with hook(lambda *_, name=name: (llm.abort(name), None)[1]):  # noqa: B023
            client.step()
        assert all(request.status is Status.FINISHED for request in client.groups[name])
        client.add("again", client.groups[name][0].tokens, greedy(3))
        client.prove()


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_may_be_left_at_any_moment(count: int) -> None:
    """ATOM pull request 1562 (row 15, case 23): a hang-up was not noticed, and the engine went on generating."""
    llm = counting(block_size=2, max_num_batched_tokens=4)
    for moment in range(9 * count):
        stream = llm.stream(list(range(10)), greedy(4, n=count))
        for _, _ in zip(range(moment), stream, strict=False):
            pass
        stream.close()
        stats = llm.stats()
        assert not (llm.requests or stats["blocks_used"] or stats["num_waiting"] or stats["num_running"])
        assert llm.step() == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_ends_once_when_it_is_aborted_and_a_call_that_breaks_off_leaves_nothing(count: int) -> None:
    """vLLM issues 57061 and 14326 (row 15): the state of a request that was ended from outside stayed for ever."""
    llm = counting(block_size=2, max_num_batched_tokens=4)
    for moment in range(1, 3 * count + 2):
        stream = llm.stream([1, 2, 3, 4, 5], greedy(4, n=count))
        told = list(itertools.islice(stream, moment))
        llm.abort(next(iter(llm.requests)))
        told += stream
        assert Counter(d.index for d in told if d.finish_reason) == dict.fromkeys(range(count), 1)
        assert all(d.finish_reason in (None, "abort", "length") for d in told) and not llm.requests
    for moment in range(1, 7):
        left = iter(range(1, moment))

        def fail(*_: object, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Broken

        with llm.model.register_forward_hook(fail), pytest.raises(Broken):
            llm.generate([[1, 2, 3]] * 3, greedy(9, n=count))
        assert not llm.requests and llm.stats()["blocks_used"] == 0 and llm.step() == []


def test_a_refused_request_leaves_nothing_behind() -> None:
    """vLLM issue 57061 (row 15): a request that failed between registration and queue stayed for ever."""
    for chunked in (True, False):
        limits = dict(num_kv_blocks=6, max_num_seqs=2, max_num_batched_tokens=5, enable_chunked_prefill=chunked)
        llm = counting(block_size=2, **limits)
        bad = [([1] * 13, greedy(1)), ([], greedy(1)), ([96], greedy(1)), ([1], greedy(1, n=3)), ("x", greedy(1))]
        bad += [([1], greedy(1, stop=["x"]))] + [([1] * 6, greedy(1))] * (not chunked)
        for prompt, params in bad:
            with pytest.raises(RequestError):
                llm.add_request(prompt, params, request_id="x")
            with pytest.raises(RequestError):
                next(llm.stream(prompt, params))
            assert llm.generate([prompt, [5]], [params, greedy(2)])[1].outputs[0].token_ids == [6, 7]
            assert not llm.requests and llm.step() == [] and llm.stats()["num_waiting"] == 0
        llm.add_request([1], greedy(1), request_id="x")


@pytest.mark.parametrize("size,count", [(1, 2), (3, 2), (4, 3)])
def test_completions_of_a_prompt_never_write_into_a_shared_block(size: int, count: int) -> None:
    """atlas issue 1193 (case 19): a half-filled block had two writers without copy-on-write, and both texts broke."""
    for length, blocks in itertools.product(range(1, 2 * size + 2), (64, -(-(2 * size + 9) // size) + 1)):
        way = "swap" if length % 3 else "recompute"
        llm = engine(block_size=size, num_kv_blocks=blocks, preemption=way)
        client = Client(llm, break_at=[4] if length % 2 else [])
        client.add("x", [4 + 9 * i for i in range(length)], drawn(8, length, n=count))
        client.step()
        assert llm.stats()["blocks_used"] == -(-length // size)
        if blocks == 64:
            client.step()
            merged = len({tuple(tokens[:1]) for tokens in client.tokens.values()})
            own = count if (length + 1) % size else merged  # full and equal blocks become one
            assert llm.stats()["blocks_used"] == length // size + own
        client.prove()
        assert len(client.ends) == count


@pytest.mark.parametrize("table", [[0, 0], [0, 1, 0], [1, 1, 1], [2], [0, 2]])
@pytest.mark.parametrize("refs", [1, 2])
def test_a_block_is_never_free_twice(table: list[int], refs: int) -> None:
    """vLLM issues 1556 and 42571 (case 18): a block listed twice was freed twice and then handed out twice."""
    pool = KVPool(4, 4)
    held = pool.allocate(2)
    for _ in range(refs - 1):
        pool.share(held)
    most = max(Counter(table).values())
    if most > refs or 2 in table:
        with pytest.raises(RuntimeError, match="freed twice"):
            pool.release(table)
    else:
        pool.release(table)
    assert len(set(pool.free)) == pool.num_free <= 4
    handed = pool.allocate(pool.num_free) or []
    assert len(set(handed)) == len(handed) and pool.allocate(1) is None


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_eviction_takes_the_end_of_the_least_recently_used(size: int, blocks: int) -> None:
    """llm-d-inference-sim issue 704 (case 22): the first block of a prefix was evicted, which strands the rest."""
    prompt, other = [range(start, start + blocks * size) for start in (1, 41)]
    for taken in range(1, blocks + 1):
        llm = counting(block_size=size, num_kv_blocks=blocks)
        llm.generate(list(prompt), greedy(0))
        llm.generate(list(other)[: taken * size], greedy(0))
        left = min(blocks - taken, (len(prompt) - 1) // size)
        assert llm.generate(list(prompt), greedy(0))[0].num_cached_tokens == left * size
        llm = counting(block_size=size, num_kv_blocks=2 * blocks)
        for tokens in (prompt, other, prompt):  # now `other` is the least recently used
            llm.generate(list(tokens), greedy(0))
        llm.generate([90] * (taken * size), greedy(0))
        assert [len(llm.pool.match([*tokens, 95])) for tokens in (prompt, other)] == [blocks, blocks - taken]
    if size > 1:  # a half-filled last block holds nothing that could be found: it goes before all cached ones
        llm = counting(block_size=size, num_kv_blocks=2 * blocks + 1)
        for tokens in ([*other], [*prompt, 90], [91]):
            llm.generate(tokens, greedy(0))
        assert [len(llm.pool.match([*tokens, 95])) for tokens in (prompt, other)] == [blocks, blocks]


# ---- scheduler


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("budget", [1, 2, 5, 40])
def test_chunks_cover_a_prompt_once_and_give_one_token(size: int, budget: int) -> None:
    """vllm-metal PR 200, tenstorrent/vllm PR 448, SharpMind issue 57, sglang issue 36344 (row 23, cases 25, 29):
    prompts hung, lost tokens between chunks, or took a last chunk of one token for a decode."""
    for mate in (0, 1) if budget > 1 else (0,):  # beside a decode, a chunk is one token shorter
        share = budget - mate
        for length in [1, 2, 3, share, share + 1, 2 * share, 2 * share + 1, 17]:
            client = Client(engine(block_size=size, num_kv_blocks=150, max_num_batched_tokens=budget))
            if mate:
                client.add("mate", [90], greedy(99))
                client.step()
            request, ends = client.add("x", [1 + i for i in range(length)], greedy(1)), []
            while request.num_computed < length and not request.output:
                client.step()
                ends.append(length if request.output else request.num_computed)
            assert ends == [*range(share, length, share), length]
            client.llm.abort("mate")
            client.prove()
            assert request.num_output == 1
    off = engine(block_size=size, max_num_batched_tokens=budget, enable_chunked_prefill=False)
    for length in (budget, budget + 1):
        client = Client(off)
        if length > budget:
            with pytest.raises(RequestError, match=rf"{length} tokens.*{budget}"):
                client.add("x", [1] * length, greedy(1))
        else:
            client.add("x", [1] * length, greedy(1))
            client.step()
            client.prove(1)
            off.abort("x")
    client = Client(off)
    for i, length in enumerate((budget, 1, budget, 2, budget // 2 + 1, 1)):
        client.add(str(i), [50 + i] * min(length, budget), greedy(2))
    while client.busy():
        client.step()
        for request in client.requests():
            done = request.status in (Status.WAITING, Status.FINISHED) or request.num_computed >= request.num_prompt
            assert done, "a prompt was cut although chunking is off"


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
@pytest.mark.parametrize("blocks", [5, 9])
def test_long_prompts_never_hold_what_they_wait_for(budget: int, blocks: int) -> None:
    """sglang issue 36458 (row 24): chunked prompts each held a part of the pool and waited for the rest."""
    for lengths in ([19, 19], [17, 3, 18], [5, 19, 5, 19, 9], [18, 18, 18, 18]):
        for seats in (1, 2, 9):
            llm = counting(block_size=4, num_kv_blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=seats)
            client = Client(llm)
            for i, length in enumerate(lengths):
                client.add(str(i), [(30 * i + j) % 90 for j in range(length)], greedy(1))
            client.drain(sum(-(-length // budget) for length in lengths))
            assert llm.stats()["preemptions"] == 0 and len(client.ends) == len(lengths)


@pytest.mark.parametrize("budget", [3, 4, 7, 16])
@pytest.mark.parametrize("late", [0, 1, 5])
def test_decodes_go_on_beside_any_number_of_prefills(budget: int, late: int) -> None:
    """DSpark issue 27, sglang issue 22984 (row 25): decodes starved behind several partial prefills."""
    client = Client(counting(block_size=4, num_kv_blocks=99, max_num_batched_tokens=budget))
    names = ["a", "b", "c"]
    for name, start in zip(names, (10, 30, 50), strict=True):
        client.add(name, [start], greedy(14))
    for _ in range(late):
        client.step()
    for i in range(3):
        client.add(f"long {i}", range(40 + i), greedy(2))
    while not all((name, 0) in client.tokens for name in names):
        client.step()
    while (busy := [n for n in names if (n, 0) not in client.ends]) and len(busy) == 3:
        counts = [len(client.tokens[n, 0]) for n in busy]
        client.step()
        assert [len(client.tokens[n, 0]) for n in busy] == [count + 1 for count in counts]
    client.drain()
    assert [client.tokens[n, 0][-1] for n in names] == [24, 44, 64]
    assert [client.tokens[f"long {i}", 0] for i in range(3)] == [[40 + i, 41 + i] for i in range(3)]


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_a_request_that_is_idle_in_a_step_gets_no_token(budget: int) -> None:
    """tt-xla issue 5830 (row 22): a request that sat out others' chunks got a bogus token."""
    client = Client(counting(block_size=4, max_num_batched_tokens=budget))
    for i in range(3):
        client.add(str(i), range(10 * i + 1, 10 * i + 8), greedy(5, n=2 + i % 2))
    client.drain()
    for name, index in client.ends:
        assert client.tokens[name, index] == [*range(10 * int(name) + 8, 10 * int(name) + 13)]


@pytest.mark.parametrize("seats", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 16])
@pytest.mark.parametrize("forks", [False, True])
def test_seats_come_back_and_arrival_order_is_kept(seats: int, budget: int, forks: bool) -> None:
    """vLLM issue 53130 (case 27): admission stopped for good although seats and memory were free."""
    for blocks in (40, 6):
        limits = dict(num_kv_blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=seats)
        client, firsts = Client(counting(block_size=2, **limits)), []
        counts = {f"{i}": (1 + i % 5, 1 + i % seats if forks else 1) for i in range(9)}
        for i, (name, (count, n)) in enumerate(counts.items()):
            client.add(name, [8 * i + 1, 8 * i + 2], greedy(count, n=n))
        most = sum(2 + count * n for count, n in counts.values()) + 60
        while client.busy():
            client.step()
            assert client.steps < most and client.llm.stats()["num_running"] <= seats
            firsts += [name for name, index in client.tokens if index == 0 and name not in firsts]
        client.drain()
        assert firsts == list(counts)
        for i, (name, (count, n)) in enumerate(counts.items()):
            made = [client.tokens[name, index] for index in range(n)]
            assert made == [[8 * i + 3 + j for j in range(count)]] * n


@pytest.mark.parametrize("budget", [1, 3, 16])
@pytest.mark.parametrize("blocks", [12, 40])
@pytest.mark.parametrize("where", ["first", "in a full engine", "with forks"])
def test_nobody_starves_while_others_keep_coming(budget: int, blocks: int, where: str) -> None:
    """vLLM issue 53130 (case 27): an early request waited for ever behind later, shorter ones."""
    client = Client(counting(block_size=4, num_kv_blocks=blocks, max_num_seqs=3, max_num_batched_tokens=budget))
    if where == "in a full engine":
        for i in range(5):
            client.add(f"before {i}", [70], greedy(3))
        client.step()
    client.add("long", range(30), greedy(6, n=2 if where == "with forks" else 1))
    for i in range(200):
        client.add(f"short {i}", [60], greedy(2))
        client.step()
        if ("long", 0) in client.ends:
            return
    pytest.fail("the long request never finished")


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("seeded", [True, False])
def test_preemption_changes_no_token_no_delta_and_no_draw(size: int, seeded: bool) -> None:
    """vllm-gaudi pull request 524, vLLM issue 16832 (case 28): tokens were doubled or lost on preemption."""
    prompts = [[20 * i + j for j in range(1, 7)] for i in range(4)]
    outcomes, preempted = [], 0
    tight = [(-(-room // size), [], way) for room in (14, 20) for way in ("recompute", "swap")]
    broken = [(64, [k, k + 2], "recompute") for k in (1, 2, 4, 7)]
    for blocks, moments, way in [(64, [], "recompute"), *tight, *broken]:
        llm = engine(tokenizer=Letters(), block_size=size, num_kv_blocks=blocks, preemption=way, num_swap_blocks=9)
        client = Client(llm, break_at=moments)
        for i, prompt in enumerate(prompts):
            client.add(str(i), prompt, drawn(8, 5 + i, stop=[chr(0x4E00) * 2]) if seeded else greedy(8))
        client.prove()
        preempted += llm.stats()["preemptions"] > 0
        outcomes.append((client.tokens, {k: "".join(t) for k, t in client.texts.items()}, client.ends))
    assert preempted == len(outcomes) - 1
    assert all(outcome == outcomes[0] for outcome in outcomes)


PENALTIES = dict(repetition_penalty=1.7, presence_penalty=0.5, min_tokens=4, stop_token_ids=range(1, 40), top_k=9)


@pytest.mark.parametrize("size,budget,count", [(1, 3, 0), (1, 64, 3), (4, 5, 1), (16, 64, 0)])
def test_scoring_gives_each_prompt_token_its_log_probability(size: int, budget: int, count: int) -> None:
    """llama.cpp issue 27174 (case 30): scoring returned entries of generated tokens only."""
    random = Random(size)
    for moments, blocks in (((), 64), ((2, 4, 5), 64), ((), -(-14 // size) + 1)):
        llm = engine(block_size=size, num_kv_blocks=blocks, max_num_batched_tokens=budget)
        for _ in range(2):  # the second round meets a warm cache
            client = Client(llm, break_at=moments)
            for i, prompt in enumerate(some_prompts(random, 4, 9)):
                scoring = greedy(count, prompt_logprobs=i, n=1 + (i == 2))
                client.add(str(i), prompt, scoring if i else drawn(4, 1, **PENALTIES))  # log probabilities are raw
            client.prove()
            for i in (1, 2, 3):
                request = llm.requests[str(i)][0]
                expected = plain(tuple(request.tokens[: request.num_prompt]))
                assert sorted(request.prompt_logprobs) == list(range(1, request.num_prompt))
                for place, entry in request.prompt_logprobs.items():
                    row, token = expected[place - 1], request.tokens[place]
                    assert set(entry) == {token, *row.topk(i).indices.tolist()}
                    assert all(value == pytest.approx(row[k].item(), abs=1e-4) for k, value in entry.items())
                assert request.num_output == count and request.num_cached == 0
            for name in client.groups:
                llm.abort(name)
        if moments or blocks == 64:
            out = llm.generate([5, 6, 7], greedy(count, prompt_logprobs=0))[0]
            assert [entry and set(entry) for entry in out.prompt_logprobs] == [None, {6}, {7}]
            assert out.outputs[0].finish_reason == "length" and len(out.outputs[0].logprobs) == count


# ---- sampling


def by_hand(table: Tensor, prompt: Sequence[int], params: SamplingParams, ends: set[int]) -> list[int]:
    """Greedy with penalties and min_tokens, slowly: position p of the text is followed by what table[p] says."""
    output: list[int] = []
    while len(output) < params.max_tokens:
        scores = table[len(prompt) + len(output) - 1].tolist()
        for token in {*prompt, *output}:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        for token, times in Counter(output).items():
            scores[token] -= params.presence_penalty + params.frequency_penalty * times
        allowed = [t for t in range(len(scores)) if not (t in ends and len(output) < params.min_tokens)]
        output.append(max(allowed, key=lambda t: (scores[t], -t)))
        if output[-1] in ends:
            break
    return output


@pytest.mark.parametrize("seed", range(8))
def test_penalties_and_min_tokens_by_hand(seed: int) -> None:
    """transformers issue 2302, lattice issue 312, sglang-omni issue 1360, vllm-metal issue 69, vLLM issues 1577, 21987,
    26317 and 32642 (rows 35, 36, case 36): wrong signs, wrong history, end tokens too early; alone and with mates."""
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(40, 96, generator=generator).mul(2).round(decimals=2)
    table[:, random.sample(range(96), 4)] += 3.0  # so that tokens come again
    table[:, 3] += 4.0 * (seed % 2)  # an end that wants to come at once
    table -= 12.0 * (seed % 4 > 1)  # all negative
    model = Scripted(lambda _, position: table[position], dataclasses.replace(TINY, eos_token_ids=(3, 7)))
    work = some_prompts(random, 5, 6)
    each, ends = [], []
    for i in range(5):
        own = random.sample(range(10, 96), 3)
        more = dict(stop_token_ids=own, ignore_eos=i == 3, min_tokens=random.randint(0, 8))
        more["repetition_penalty"] = random.choice((1.0, 0.7, 1.3, 2.5))
        more["presence_penalty"] = random.choice((0.0, 0.5, -0.7, 2.0))
        more["frequency_penalty"] = random.choice((0.0, 0.3, -0.4, 1.5))
        each.append(greedy(10, **more))
        ends.append({*own, *(() if i == 3 else (3, 7))})
    expected = [by_hand(table, *one) for one in zip(work, each, ends, strict=True)]
    assert seed % 2 == 0 or any(len(tokens) < 10 for tokens in expected)
    for blocks, budget, moments in ((64, 64, ()), (64, 3, (2, 5)), (10, 64, ())):
        client = Client(engine(model, block_size=2, num_kv_blocks=blocks, max_num_batched_tokens=budget), moments)
        for i in range(5):
            client.add(str(i), work[i], each[i])
        client.drain()
        assert [client.tokens[str(i), 0] for i in range(5)] == expected
    assert tokens_of(engine(model).generate(work, each)) == expected


@pytest.mark.parametrize("least", [0, 1, 2, 5])
@pytest.mark.parametrize("own", [(), (5,), (5, 6)])
@pytest.mark.parametrize("ignore", [False, True])
def test_end_tokens_come_after_min_tokens_and_not_later(least: int, own: tuple[int, ...], ignore: bool) -> None:
    """vLLM issues 4180, 4589, 21987, 26317, 32642 (row 35, case 43): only one end token counted; ignore_eos broke."""
    for eos in ((0,), (11, 12), (12, 11, 4)):
        config = dataclasses.replace(TINY, eos_token_ids=eos)
        ends = {*own, *(() if ignore else eos)}
        for wanted in sorted({*own, *eos}):  # the likeliest at every step; then token 50
            scores = one_hot(wanted) + 0.5 * one_hot(50)
            llm = engine(Scripted(lambda *_, scores=scores: scores, config))
            params = greedy(7, min_tokens=least, stop_token_ids=own, ignore_eos=ignore)
            plain, out = [o.outputs[0] for o in llm.generate([[9], [9]], [greedy(3, stop_token_ids=[50]), params])]
            assert out.token_ids == ([50] * least + [wanted] if wanted in ends else [wanted] * 7)
            assert out.finish_reason == ("stop" if wanted in ends else "length")
            assert plain.token_ids == [wanted] * 3


def test_greedy_is_the_first_of_the_largest_beside_any_mates() -> None:
    """nano-vllm pull request 249 (case 33): temperature 0 was refused, because the sampler divides by it."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(-3, 3, (60, 96), generator=generator).float()
    table *= 10.0 ** torch.randint(-3, 9, (60, 1), generator=generator)
    model = Scripted(lambda _, position: table[position])
    expected = [row.tolist().index(row.max().item()) for row in table]
    filters = ({}, {"top_k": 3, "top_p": 0.5})
    mates = [drawn(4, 1, temperature=t, **more) for t in (1e-45, 1e-6, 1.0, 1e38) for more in filters]
    for rows, place in itertools.product((1, 2, 9), (0, 1, 8)):
        if place < rows:
            each = (mates * 2)[: rows - 1]
            each.insert(place, greedy(4, ignore_eos=True))
            outs = engine(model).generate([[1, 2]] * rows, each)
            assert outs[place].outputs[0].token_ids == expected[1:5] and not any(o.error for o in outs)
            for one, out in zip(each, outs, strict=True):
                if 0 < one.temperature <= 1e-6:
                    largest = [table[1 + i, token] for i, token in enumerate(out.outputs[0].token_ids)]
                    assert largest == [table[1 + i].max() for i in range(4)]


def filtered(probs: dict[int, Fraction], params: SamplingParams) -> set[int]:
    """The ids that may be drawn, in exact arithmetic (temperature 1)."""
    order = sorted(probs, key=lambda t: (-probs[t], t))[: params.top_k or None]
    total, reached, kept = sum(probs[t] for t in order), Fraction(0), []
    for token in order:
        if reached < Fraction(params.top_p) * total or not kept:
            kept.append(token)
        reached += probs[token]
    return {t for t in kept if probs[t] >= Fraction(params.min_p) * probs[order[0]]}


WEIGHTS = [(4, 2, 1, 1), (2, 2, 2, 2), (8, 4, 2, 1, 1), (1, 1), (4, 4, 4, 2, 2), (3, 3, 2, 2, 2)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_filters_keep_exactly_what_they_should_in_any_batch(weights: tuple[int, ...]) -> None:
    """vLLM issue 50979, mlx-lm PR 388, tiny-llm PR 32, transformers issue 18976, llama.cpp PR 1953 (row 33, case 34):
    more than k survived ties, the border of top-p was off by one both ways, top-p after top-k removed everything."""
    ids = Random(len(weights)).sample(range(96), len(weights))
    probs = {token: Fraction(weight, sum(weights)) for token, weight in zip(ids, weights, strict=True)}
    scores = torch.full((96,), float("-inf"))
    for token, p in probs.items():
        scores[token] = torch.tensor(float(p), dtype=torch.float64).log().float()
    borders = [1 / 4, 1 / 2, 3 / 4, 7 / 8] if sum(weights) in (4, 8, 16) else []  # exact in float32

    def keeps(function: Callable[[Tensor, Tensor], Tensor], values: Sequence[float], name: str) -> None:
        kept = function(scores.repeat(len(values), 1), torch.tensor(values)).isfinite()
        for value, mask in zip(values, kept, strict=True):
            assert set(mask.nonzero().flatten().tolist()) == filtered(probs, SamplingParams(**{name: value})), value

    keeps(sampler.keep_top_k, list(range(len(weights) + 2)), "top_k")
    keeps(sampler.keep_top_p, [1e-46, 1e-9, 0.13, 0.26, 0.51, 0.76, 0.9, 1.0, *borders], "top_p")
    keeps(sampler.keep_min_p, [0.0, 0.1, 0.3, 0.6, 1.0], "min_p")
    asked = [dict(top_k=2, top_p=0.55), dict(top_k=3, top_p=0.7), dict(top_k=4, top_p=0.95), dict(top_k=1, top_p=0.3)]
    asked += [dict(top_k=3, top_p=0.8, min_p=0.6), dict(top_k=3, min_p=0.3), dict(top_p=0.7, min_p=0.6), dict(top_k=2)]
    each = [SamplingParams(max_tokens=1, seed=seed, ignore_eos=True, **more) for more in asked for seed in range(60)]
    llm = engine(Scripted(lambda *_: scores), max_num_seqs=999, num_kv_blocks=999)
    rows = tokens_of(llm.generate([[1]] * len(each), each))
    for i, more in enumerate(asked):
        found = {tokens[0] for tokens in rows[i * 60 : (i + 1) * 60]}
        assert found == filtered(probs, SamplingParams(**more)), more
    alone = tokens_of([llm.generate([1], each[i])[0] for i in range(0, len(each), 37)])
    assert alone == rows[::37], "a row depends on its batch"


def test_filters_work_on_what_the_temperature_left() -> None:
    """tiny-llm pull request 32 (row 33): a filter that ran before the temperature kept another set of tokens."""
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    scores = torch.cat([probs.log(), torch.full((92,), float("-inf"))])
    for temperature, more in itertools.product((0.5, 1.0, 2.0), (dict(top_p=0.6), dict(top_p=0.85), dict(min_p=0.4))):
        left = probs.double() ** (1 / temperature)
        left = left / left.sum()
        kept = left.cumsum(0) - left < more.get("top_p", 1.0)
        kept &= left >= more.get("min_p", 0.0) * left.max()
        each = [SamplingParams(max_tokens=1, seed=i, temperature=temperature, **more) for i in range(100)]
        found = {tokens[0] for tokens in tokens_of(engine(Scripted(lambda *_: scores)).generate([[1]] * 100, each))}
        assert found == set(kept.nonzero().flatten().tolist())


def test_top_k_keeps_k_of_any_ties_in_any_batch() -> None:
    """vLLM issue 50979 (row 33): more than k survived a tie, and batches of 8 took another path than smaller ones."""
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 2, 7, 8, 9, 33):
        logits = torch.randint(0, 4, (rows, 12), generator=generator).float()
        k = torch.randint(0, 14, (rows,), generator=generator)
        kept = sampler.keep_top_k(logits, k).isfinite()
        for row, count, mask in zip(logits.tolist(), k.tolist(), kept.tolist(), strict=True):
            order = sorted(range(12), key=lambda t: (-row[t], t))[: count or None]
            assert [t for t in range(12) if mask[t]] == sorted(order)


MATES = {
    "unseeded": lambda i: drawn(9),
    "seeded": lambda i: drawn(9, 42 + i),
    "the same seed": lambda i: drawn(9, 42),
    "greedy": lambda i: greedy(9),
    "filters": lambda i: drawn(9, i, top_k=2 + i, top_p=0.5, min_p=0.1, temperature=1.7),
    "penalties": lambda i: drawn(9, repetition_penalty=1.5, presence_penalty=1.0, min_tokens=3),
    "completions": lambda i: drawn(9, 42, n=3),
    "scoring": lambda i: drawn(9, prompt_logprobs=1),
}


@pytest.mark.parametrize("mate", MATES)
def test_a_seeded_request_does_not_see_its_mates(mate: str) -> None:
    """vLLM issue 51226, pull requests 1637 and 2514 (row 34, case 37): an unseeded mate changed a seeded request."""
    scores = torch.linspace(0, 2, 96)
    prompt, params = [1, 2, 3, 4, 5], drawn(9, 42, temperature=0.8)

    def made(before: int, after: int, moments: Sequence[int] = (), **options: object) -> list[int]:
        llm = engine(Scripted(lambda *_: scores), block_size=2, **options)
        client = Client(llm, moments)
        for i in range(before):
            client.add(f"before {i}", [7 + i], MATES[mate](i))
        if before:
            client.step()
        client.add("x", prompt, params)
        for i in range(after):
            client.add(f"after {i}", [9 + i] * 3, MATES[mate](i))
        return client.drain().tokens["x", 0]

    alone = made(0, 0)
    assert len(set(alone)) > 5
    for before, after in ((0, 1), (1, 0), (2, 0), (1, 2), (5, 5)):
        assert made(before, after) == alone
    assert made(1, 1, (3, 4)) == made(2, 1, num_kv_blocks=10) == made(1, 2, max_num_batched_tokens=3) == alone
    assert made(0, 0, seed=9) == made(3, 0, max_num_seqs=3) == alone


def test_completions_and_seeds_of_any_size_draw_apart() -> None:
    """vLLM issue 51226 (row 34): a seed that is cut or shared makes two requests draw the same tokens."""
    llm = engine(Scripted(lambda *_: torch.zeros(96)))
    seeds = [0, 1, 2, -5, 2**8, 2**16, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
    outs = llm.generate([[5]] * len(seeds), [drawn(12, seed, n=3) for seed in seeds])
    found = [tuple(c.token_ids) for out in outs for c in out.outputs]
    assert len(set(found)) == len(found) == 3 * len(seeds)
    free = llm.generate([[5]] * 8, drawn(12))
    assert len({tuple(tokens) for tokens in tokens_of(free)} | set(found)) == len(found) + 8


BAD = {"all": slice(None), "first": 0, "middle": 40, "last": 95}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", BAD)
def test_logits_that_are_no_numbers_end_one_request_with_an_error(place: str, value: float) -> None:
    """Qwen3 issue 761 (case 39): logits became NaN, and the argmax of NaN gave token 0 for ever."""
    harmless = value == float("-inf") and place != "all"  # some ids may be impossible
    for moment, where, count in itertools.product((0, 1, 3), (0, 1, 2), (1, 2)):

        def script(token: int, position: int, moment: int = moment) -> Tensor:
            scores = one_hot((token + 1) % 96)
            if token == 30 + moment:
                scores[BAD[place]] = value
            return scores

        llm = engine(Scripted(script), block_size=2, max_num_batched_tokens=6)
        client, names = Client(llm), ["mate", "other"]
        names.insert(where, "bad")
        prompts = {"mate": [27, 28, 29, 60], "other": [80], "bad": [27, 28, 29, 30]}  # two share their first block
        for name in names:
            client.add(name, prompts[name], greedy(6, n=count if name == "bad" else 1))
        group = llm.requests["bad"]
        client.drain()
        assert client.tokens["mate", 0] == [61, 62, 63, 64, 65, 66] and client.tokens["other", 0][-1] == 86
        for request in group:
            if harmless:
                assert request.output == [31, 32, 33, 34, 35, 36] and request.error is None
                continue
            assert request.finish_reason == "error" and "bad" in request.error and "finite" in request.error
            assert request.output == [31, 32, 33][:moment]
        later = Client(llm)
        again = later.add("again", [27, 28, 29, 30, *range(31, 31 + moment), 70], greedy(1))
        later.drain()
        assert harmless or again.num_cached <= 2, "what a broken request computed was used again"
        assert again.output == [71]


# ---- calls one after another


def test_any_sequence_of_calls_keeps_its_rows() -> None:
    """transformers issue 45943 (row 37): a second call of generate returned wrong or missing rows."""
    random, llm = Random(0), counting(block_size=2, max_num_batched_tokens=7, max_num_seqs=4)
    own = set()
    for call in range(25):
        starts = [random.randrange(60) for _ in range(random.choice((0, 1, 2, 5)))]
        counts = [random.randint(0, 6) for _ in starts]
        bad = [random.random() < 0.2 for _ in starts]
        each: list[SamplingParams] = [greedy(count, n=1 + call % 3) for count in counts]
        outs = llm.generate([[s] if not b else [s, 96] for s, b in zip(starts, bad, strict=True)], each)
        assert [o.error is not None for o in outs] == bad
        for start, count, wrong, out in zip(starts, counts, bad, outs, strict=True):
            if not wrong:
                assert out.prompt_token_ids == [start]
                assert [c.token_ids for c in out.outputs] == [[start + 1 + i for i in range(count)]] * (1 + call % 3)
                assert [c.index for c in out.outputs] == list(range(1 + call % 3))
        if call % 4 == 0:
            assert next(llm.stream([9], greedy(5))).token_ids == [10]
        if call % 6 == 0:
            own.add(llm.add_request([40], greedy(3)))  # it runs beside the next calls, and nobody takes its result
        assert len(llm.generate([70], greedy(1))) == 1
        assert set(llm.requests) == own
    while llm.step():
        pass
    assert all(llm.requests[name][0].output == [41, 42, 43] for name in own)


# ---- text


class Pieces:
    """A tokenizer whose token i is pieces[i - 2]; after them comes an end token that has text."""

    vocab_size, eos_ids = TINY.vocab_size, ()

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"", b"", *pieces, b"END"]

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""


def spoken(pieces: Sequence[bytes], stops: Sequence[str], least: int, ends: bool) -> tuple[list[str], str, bool]:
    """The slow reference, by characters: (what may be shown after each token, the text, whether it stopped).

    Stop strings are looked for in what comes after the first `least` tokens. ends: an end token follows.
    """
    shown, told, searched = [], "", ""
    for count in range(1, len(pieces) + 1):
        before, now = (b"".join(pieces[:end]).decode(errors="ignore") for end in (count - 1, count))
        whole = len(now)
        if count == len(pieces):
            now = b"".join(pieces).decode(errors="replace")  # the end: half a character becomes one U+FFFD
        for place in range(len(before), len(now)):
            char = now[place]
            told += char
            if count + (ends and place >= whole) > least:  # half a character shows at the end only
                searched += char
                if ended := [stop for stop in stops if searched.endswith(stop)]:
                    told = told[: -max(map(len, ended))]
                    return [*shown, told], told, True
        starts = [n for stop in stops for n in range(1, len(stop)) if searched.endswith(stop[:n])]
        shown.append(told[: len(told) - max(starts, default=0)])
    return [*shown[:-1], told], told, False


@pytest.mark.parametrize("seed", range(30))
def test_text_by_hand(seed: int) -> None:
    """vLLM issues 3574, 2577 and 51641, SwiftLM issue 126, koboldcpp PR 1031, vllm-mlx issue 109, ferrox issue 124, exo
    PR 1691, sglang issue 31598 (rows 31, 32, 35, cases 40, 41): leaked or lost stop strings, split characters."""
    random = Random(seed)
    words = ["A", "a", "ab", "\nUser:", "\n", "世界", "😀", "é", " "]
    data = "".join(random.choices(words, k=8)).encode()
    data = data[: len(data) - random.choice((0, 0, 1, 2))]  # perhaps cut inside a character
    cuts = sorted(random.sample(range(1, len(data)), k=random.randint(1, min(9, len(data) - 1))))
    pieces = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
    whole, last = data.decode(errors="replace"), len(pieces) + 2  # the end token
    model = Scripted(lambda token, _: one_hot(token + 1))
    client = Client(engine(model, Pieces(pieces), block_size=2, num_kv_blocks=12), [random.randint(1, 9)])
    expected: dict[str, tuple[list[str], str, bool, bool]] = {}
    for i in range(5):
        begin = [random.randrange(len(whole)) for _ in range(random.randint(0, 3))]
        stops = [whole[at : at + random.randint(1, 4)] + random.choice(["", "", "x"]) for at in begin]
        stops += [["\nUser:"], [], ["\ufffd"], ["aab", "ab"], ["😀a"]][i]
        least, ends = random.choice((0, 0, 2, len(pieces))), bool(i % 2)
        params = greedy(len(pieces) + ends, stop_token_ids=[last], stop=stops, min_tokens=least, n=1 + i // 4)
        client.add(str(i), [1], params)
        expected[str(i)] = (*spoken(pieces, stops, least, ends), ends)
    for request in client.drain().requests():
        shown, told, stopped, ends = expected[request.id]
        texts = client.texts[request.id, request.index]
        running = list(itertools.accumulate(texts))
        assert request.text == told and request.finish_reason == ("stop" if stopped or ends else "length")
        if ends and len(running) > len(pieces):  # only the end token shows that half a character stays half
            assert running[: len(pieces) - 1] == shown[:-1] and running[-1] == told
            assert request.output == [*range(2, last + 1)]
        else:
            assert running == shown and request.output == [*range(2, len(shown) + 2)]
        assert not any("\ufffd" in piece for piece in texts[:-1])


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("template", ["{{ bos_token }}[{{ messages[-1].content }}]", "[{{ messages[-1].content }}]"])
@pytest.mark.parametrize("content", ["hi", "<|im_start|>", "<|im_start|>hi", "a<|im_start|>b"])
def test_the_engine_sees_bos_once(adds: bool, template: str, content: str) -> None:
    """DeepSeek-R1 issue 151, vLLM PR 27515, llama.cpp PR 7107 (case 42): the template wrote BOS, and one more came."""
    bos = 260  # <|im_start|>
    tok = text.Tokenizer.from_gguf(
        byte_level(bos_token_id=bos, add_bos_token=adds) | {"tokenizer.chat_template": template}
    )
    config = dataclasses.replace(TINY, vocab_size=tok.vocab_size, hidden_size=8)
    llm = engine(Scripted(lambda *_: torch.zeros(tok.vocab_size), config), tok)
    messages = [{"role": "user", "content": content}]
    written = adds or "bos" in template
    for chat in ([messages], [messages, messages]):
        for out in llm.chat(chat if len(chat) > 1 else messages, greedy(1)):
            assert out.prompt_token_ids.count(bos) == written and (out.prompt_token_ids[0] == bos) == written
    for prompts in (content, [content, content]):
        for out in llm.generate(prompts, greedy(1)):
            start = content.startswith("<|im_start|>")
            assert out.prompt_token_ids.count(bos) == content.count("<|im_start|>") + (adds and not start)
            assert (out.prompt_token_ids[0] == bos) == (adds or start)


@pytest.mark.parametrize("end", ["eos", "eot", "eom"])
def test_every_end_token_that_the_tokenizer_knows_ends_the_text(end: str) -> None:
    """vLLM issue 4180 (case 43): a turn's end that only one of the files names was not seen, and the text ran on."""
    tok = text.Tokenizer.from_gguf(byte_level(eos_token_id=260, eot_token_id=261, eom_token_id=262))
    last = {"eos": 260, "eot": 261, "eom": 262}[end]
    config = dataclasses.replace(TINY, vocab_size=tok.vocab_size, hidden_size=8, eos_token_ids=(260,))
    scores = one_hot(last, tok.vocab_size)
    llm = engine(Scripted(lambda *_: scores, config), tok)
    out = llm.generate("hello", greedy(5, ignore_eos=False))[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.text) == ([last], "stop", "")
    assert llm.generate("hello", greedy(5))[0].outputs[0].token_ids == [last] * 5
