"""Which request computes how many tokens in the next step.

There are no phases. A request needs `request.need` tokens; a step has a budget of tokens; `plan` hands it out and
`commit` books what was computed. Running requests come first, those that need least before those that need more, so a
long prompt never holds up the others' next token. Then waiting requests are admitted while budget, seats and blocks
last: continuous batching (Yu et al. 2022, Orca, OSDI) with chunked prefill (Agrawal et al. 2024, arXiv:2403.02310).
If a running request cannot get a block, the least important one is preempted: its blocks are freed, its tokens kept,
and it waits to be computed again. A request's blocks are freed in two places only: `_preempt` and `finish`.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from .blocks import KVPool
from .config import EngineConfig
from .errors import RequestError
from .request import Request, Status


@dataclass
class Chunk:
    """One request's share of a step: the tokens at positions start..end-1.

    num_logits: how many of its last positions need logits. copies: block copies to make before (copy-on-write).
    """

    request: Request
    start: int
    end: int
    num_logits: int
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Plan:
    """One step."""

    chunks: list[Chunk] = field(default_factory=list)

    def drop(self, request: Request) -> int:
        """Take a request out again; returns the tokens it had been given."""
        for chunk in self.chunks:
            if chunk.request is request:
                self.chunks.remove(chunk)
                return chunk.end - chunk.start
        return 0


class Scheduler:
    """Queues, seats and the token budget. Knows no tensors and no text."""

    def __init__(self, config: EngineConfig, pool: KVPool, max_model_len: int) -> None:
        self.config, self.pool, self.max_model_len = config, pool, max_model_len
        self.waiting: list[Request] = []  # sorted by Request.sort_key
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_queried_tokens = self.num_hit_tokens = 0  # first admissions only: recomputing is no hit

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it could never run, however long it waited."""
        config, length = self.config, len(request.tokens)
        room = self.max_model_len - (request.params.max_tokens > 0)
        if length > room:
            raise RequestError(
                f"the prompt has {length} tokens, but at most {room} fit: the limit is {self.max_model_len} tokens for "
                "prompt and output (max_model_len, or what the KV cache holds). Shorten the prompt or raise the limit."
            )
        if not config.enable_chunked_prefill and length > config.max_num_batched_tokens:
            raise RequestError(
                f"the prompt has {length} tokens, but a step takes at most {config.max_num_batched_tokens} "
                "(max_num_batched_tokens) and chunked prefill is off. Turn it on or raise the limit."
            )
        if request.params.n > config.max_num_seqs:
            raise RequestError(f"n={request.params.n} is more than max_num_seqs={config.max_num_seqs}.")
        bisect.insort(self.waiting, request, key=lambda r: r.sort_key)

    def plan(self) -> Plan:
        """Hand out the next step's tokens."""
        plan, budget = Plan(), self.config.max_num_batched_tokens
        preempted = False
        for request in sorted(self.running, key=lambda r: r.need):
            if budget == 0:
                break
            if request.status is not Status.RUNNING:
                continue  # preempted below, for one before it
            start = request.num_computed
            end = start + min(request.need, budget)
            while (copies := self.pool.extend(request.block_table, start, end)) is None:
                victim = max(self.running, key=lambda r: r.sort_key)
                budget += plan.drop(victim)
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if copies is not None:
                plan.chunks.append(self._chunk(request, end, copies))
                budget -= end - start
        while self.waiting and budget and not preempted:
            request = self.waiting[0]
            if not self._admit(request, budget):
                break
            end = request.num_computed + min(request.need, budget)
            plan.chunks.append(self._chunk(request, end, []))
            budget -= end - request.num_computed
        return plan

    def _chunk(self, request: Request, end: int, copies: list[tuple[int, int]]) -> Chunk:
        start, last = request.num_computed, end == len(request.tokens)
        num_logits = int(last)
        if request.params.prompt_logprobs is not None and start < request.num_prompt:
            num_logits = end - start
        return Chunk(request, start, end, num_logits, copies)

    def _admit(self, request: Request, budget: int) -> bool:
        """Move the first waiting request to running, if a seat, its blocks and (unchunked) its tokens are there.

        Blocks are taken for all its tokens at once, also where the step computes only the first chunk: what is
        promised is then no longer free, and two long prompts cannot starve each other half way.
        """
        seats = sum(1 + r.num_forks for r in self.running) + 1 + request.num_forks
        if seats > self.config.max_num_seqs:
            return False
        scores_prompt = request.params.prompt_logprobs is not None  # needs the logits of all positions
        hits = [] if scores_prompt else self.pool.match(request.tokens)
        num_hit = len(hits) * self.pool.block_size
        whole = not self.config.enable_chunked_prefill and request.status is Status.WAITING
        if whole and len(request.tokens) - num_hit > budget:
            return False  # a preempted request may have outgrown any budget: it is recomputed in chunks all the same
        table = self.pool.admit(hits, len(request.tokens))
        if table is None:
            return False
        if request.status is Status.WAITING:  # after a preemption a hit only saves what was computed before
            request.num_cached = num_hit
            self.num_queried_tokens += 0 if scores_prompt else request.num_prompt
            self.num_hit_tokens += num_hit
        request.block_table = table
        request.digests = [self.pool.blocks[number].digest or b"" for number in hits]
        request.num_computed = num_hit
        request.status = Status.RUNNING
        self.running.append(self.waiting.pop(0))
        return True

    def commit(self, plan: Plan) -> None:
        """Book a step that was computed: its keys and values are in the cache now."""
        for chunk in plan.chunks:
            request = chunk.request
            request.num_computed = chunk.end
            self.pool.publish(request.block_table, request.digests, request.tokens, request.num_computed)

    def fork(self, request: Request, child: Request) -> None:
        """Start `child`, a copy of `request` at this moment, on the same blocks."""
        self.pool.share(request.block_table)
        child.block_table, child.digests = list(request.block_table), list(request.digests)
        child.num_computed, child.status = request.num_computed, Status.RUNNING
        request.num_forks -= 1
        self.running.append(child)

    def restart(self) -> None:
        """After a step that broke off: what it had done is unknown, so everything that runs is computed again."""
        for request in list(self.running):
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        """Back to the queue. Its KV is recomputed later (what the prefix cache still holds by then is found again)."""
        self.running.remove(request)
        self._free(request)
        request.status = Status.PREEMPTED
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=lambda r: r.sort_key)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in any state. Ending it twice is harmless."""
        if request.status is Status.FINISHED:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._free(request)
        request.status, request.finish_reason = Status.FINISHED, reason

    def _free(self, request: Request) -> None:
        self.pool.release(request.block_table)
        request.block_table, request.digests, request.num_computed = [], [], 0

    def check(self) -> None:
        """Prove that every block, table and queue agrees. Raises AssertionError."""
        self.pool.check([r.block_table for r in self.running])
        for request in self.running:
            size, table = self.pool.block_size, request.block_table
            ok = len(table) * size >= request.num_computed and len(request.digests) <= request.num_computed // size
            if not ok or request.status is not Status.RUNNING:
                raise AssertionError(f"request {request.id}: table, digests or status do not fit its tokens")
        for request in self.waiting:
            if request.block_table or request.num_computed:
                raise AssertionError(f"request {request.id} waits, but holds blocks")
        if len(self.running) > self.config.max_num_seqs:
            raise AssertionError("more requests run than max_num_seqs")
