"""Which request computes how many tokens in the next step.

There are no phases. A request needs `request.need` tokens; a step has a budget of tokens; `plan` hands it out and
`commit` books what was computed. Running requests come first, those that need least before those that need more, so a
long prompt never holds up the others' next token. Then waiting requests are admitted, in the order of a policy, while
budget, seats and blocks last. *When* requests may be admitted is the whole difference between the three ways to batch:

static       when nothing runs and a full batch waits (or the first of it has waited `batch_delay` seconds)
dynamic      when nothing runs: the batch is what waits by then
continuous   always: a seat that becomes free is filled in the next step (Yu et al. 2022, Orca, OSDI), and long prompts
             are computed in chunks (Agrawal et al. 2024, arXiv:2403.02310)

Static and dynamic batches are rectangles, as in the servers that work like this: the seats of finished requests are
computed on, as padding, until the last one is done.

If a running request cannot get a block, the least important one is preempted. Either its blocks are freed, its tokens
kept, and it is computed again later ("recompute"), or its blocks are copied to the host's memory and back ("swap"). A
request's blocks are freed in two places only: `_preempt` and `finish`.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .blocks import KVPool
from .config import EngineConfig
from .errors import RequestError
from .request import Request, Status


@dataclass
class Chunk:
    """One request's share of a step: the tokens at positions start..end-1.

    num_logits: how many of its last positions need logits.
    """

    request: Request
    start: int
    end: int
    num_logits: int


@dataclass
class Move:
    """Copy one block before the step: inside the cache (copy-on-write), "out" to the host's memory, or back "in"."""

    kind: Literal["copy", "out", "in"]
    source: int
    target: int


@dataclass
class Plan:
    """One step. The moves are done first, in order. num_padding: dead tokens that a padded batch computes too."""

    chunks: list[Chunk] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    num_padding: int = 0

    def drop(self, request: Request) -> int:
        """Take a request out again; returns the tokens it had been given."""
        for chunk in self.chunks:
            if chunk.request is request:
                self.chunks.remove(chunk)
                return chunk.end - chunk.start
        return 0


def by_arrival(request: Request) -> tuple:
    """First come, first served."""
    return (request.order, request.index)


def by_priority(request: Request) -> tuple:
    """The lowest number first; among equals, first come, first served."""
    return (request.priority, request.order, request.index)


def by_deadline(request: Request) -> tuple:
    """Earliest deadline first within a priority; requests without one after those that have one."""
    # exercise 07.3
    deadline = float("inf") if request.deadline is None else request.deadline
    return (request.priority, deadline, request.order, request.index)
    # end exercise 07.3


# Who comes first in the queue, and who is preempted last: the smallest key. It must not change while a request waits.
Policy = Callable[[Request], tuple]


def pick_policy(policy: str | Policy) -> Policy:
    """The policy of this name, or the reader's own."""
    return (
        policy if callable(policy) else {"fcfs": by_arrival, "priority": by_priority, "deadline": by_deadline}[policy]
    )


def padding(chunk_lens: Sequence[int], num_seats: int) -> int:
    """Dead tokens that a padded batch computes in a step, beside the real ones.

    chunk_lens: tokens of each request that is still alive; num_seats: requests that the batch began with. Prompts
    (lengths above 1) are padded to the longest of them; the seat of a finished request costs one token.
    """
    # exercise 06.2
    prompts = [length for length in chunk_lens if length > 1]
    short = sum(max(prompts) - length for length in prompts) if prompts else 0
    return short + num_seats - len(chunk_lens)
    # end exercise 06.2


class Scheduler:
    """Queues, seats and the token budget. Knows no tensors and no text."""

    def __init__(self, config: EngineConfig, pool: KVPool, max_model_len: int, num_swap_blocks: int = 0) -> None:
        self.config, self.pool, self.max_model_len = config, pool, max_model_len
        self.policy = pick_policy(config.scheduling_policy)
        self.swap = KVPool(num_swap_blocks, pool.block_size, enable_prefix_caching=False)  # blocks in host memory
        self.waiting: list[Request] = []  # in the order of the policy
        self.running: list[Request] = []
        self.hurried: dict[Request, None] = {}  # those of both with a deadline
        self.num_seats = 0  # those that a static or dynamic batch began with
        self.num_steps = self.num_preemptions = self.num_swaps = 0
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
        if request.deadline is not None:
            self.hurried[request] = None
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=self.policy)

    def overdue(self, now: float) -> list[Request]:
        """Requests in any state whose deadline has passed."""
        return [request for request in self.hurried if request.deadline is not None and now >= request.deadline]

    def plan(self) -> Plan:
        """Hand out the next step's tokens. An empty plan with requests waiting: a static batch waits to be full."""
        plan, budget = Plan(), self.config.max_num_batched_tokens
        self.num_steps += 1
        if not self.running:
            self.num_seats = 0
        budget, preempted = self._serve_running(plan, budget)
        if not preempted and self.may_admit():
            self._fill(plan, budget)
        for chunk in plan.chunks:
            chunk.request.last_step = self.num_steps
        if self.config.scheduling != "continuous":
            seats = sum(1 + r.num_forks for r in self.running)
            self.num_seats = max(self.num_seats, seats)
            lengths = [chunk.end - chunk.start for chunk in plan.chunks]
            plan.num_padding = padding(lengths, len(lengths) + self.num_seats - seats)
        return plan

    def _serve_running(self, plan: Plan, budget: int) -> tuple[int, bool]:
        """Give running requests their tokens. Returns what is left of the budget, and whether one was preempted.

        Least need first; among equals the one that was served longest ago, so that nobody starves where the budget
        does not even reach all decodes.
        """
        preempted = False
        for request in sorted(self.running, key=lambda r: (r.need, r.last_step)):
            if budget == 0:
                break
            if request.status is not Status.RUNNING:
                continue  # preempted below, for one before it
            end = request.num_computed + self.share(request.need, budget)
            while (copies := self.pool.extend(request.block_table, request.num_computed, end)) is None:
                victim = self.victim()
                budget += plan.drop(victim)
                self._preempt(victim, plan)
                preempted = True
                if victim is request:
                    break
            if copies is not None:
                plan.moves += [Move("copy", source, target) for source, target in copies]
                plan.chunks.append(self._chunk(request, end))
                budget -= end - request.num_computed
        return budget, preempted

    def share(self, need: int, budget: int) -> int:
        """How many of the `need` tokens of one request this step computes, if `budget` are left.

        No more than `long_prefill_token_threshold` (0: no such limit), so that a long prompt leaves room for others.
        """
        # exercise 07.1
        limit = self.config.long_prefill_token_threshold
        return min(need, budget, limit) if limit else min(need, budget)
        # end exercise 07.1

    def victim(self) -> Request:
        """Who is preempted when the pool is full: the running request that the policy puts last."""
        # exercise 07.2
        return max(self.running, key=self.policy)
        # end exercise 07.2

    def may_admit(self) -> bool:
        """Whether waiting requests may join now. This is what tells static, dynamic and continuous batching apart."""
        # exercise 06.1
        if self.config.scheduling == "continuous":
            return True
        if self.running:
            return False
        return self.config.scheduling == "dynamic" or self.hold() == 0.0
        # end exercise 06.1

    def hold(self) -> float:
        """Seconds that a static batch which is not full still waits for more requests; 0.0 if it may start."""
        seats = sum(1 + request.num_forks for request in self.waiting)
        if self.config.scheduling != "static" or not seats or seats >= self.config.max_num_seqs:
            return 0.0
        oldest = min(request.metrics.arrival for request in self.waiting)
        return max(0.0, oldest + self.config.batch_delay - time.perf_counter())

    def _fill(self, plan: Plan, budget: int) -> None:
        """Admit waiting requests, first one first, while there is budget. One that does not fit holds up the rest."""
        # exercise 06.3
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if not self._admit(request, budget, plan):
                break
            end = request.num_computed + self.share(request.need, budget)
            plan.chunks.append(self._chunk(request, end))
            budget -= end - request.num_computed
        # end exercise 06.3

    def _chunk(self, request: Request, end: int) -> Chunk:
        start, last = request.num_computed, end == len(request.tokens)
        num_logits = int(last)
        if request.params.prompt_logprobs is not None and start < request.num_prompt:
            num_logits = end - start
        return Chunk(request, start, end, num_logits)

    def _admit(self, request: Request, budget: int, plan: Plan) -> bool:
        """Move the first waiting request to running, if a seat, its blocks and (unchunked) its tokens are there.

        Blocks are taken for all its tokens at once, also where the step computes only the first chunk: what is
        promised is then no longer free, and two long prompts cannot starve each other half way.
        """
        seats = sum(1 + r.num_forks for r in self.running) + 1 + request.num_forks
        if seats > self.config.max_num_seqs:
            return False
        if request.swap_table:
            if not self._fits_padded(plan, request.need):
                return False
            table = self.pool.admit([], len(request.tokens))
            if table is None:
                return False
            plan.moves += [Move("in", s, t) for s, t in zip(request.swap_table, table, strict=False)]
            self.swap.release(request.swap_table)
            request.swap_table, request.block_table = [], table
            self._run_first()
            return True
        scores_prompt = request.params.prompt_logprobs is not None  # needs the logits of all positions
        hits = [] if scores_prompt else self.pool.match(request.tokens)
        num_hit = len(hits) * self.pool.block_size
        whole = not self.config.enable_chunked_prefill and request.status is Status.WAITING
        if whole and len(request.tokens) - num_hit > budget:
            return False  # a preempted request may have outgrown any budget: it is recomputed in chunks all the same
        if not self._fits_padded(plan, len(request.tokens) - num_hit):
            return False
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
        self._run_first()
        return True

    def _fits_padded(self, plan: Plan, length: int) -> bool:
        """Whether the step stays within the budget with one more prompt, if the batch is padded."""
        lengths = [length, *(chunk.end - chunk.start for chunk in plan.chunks)]
        padded = self.config.scheduling != "continuous" and len(lengths) > 1
        return not padded or len(lengths) * max(lengths) <= self.config.max_num_batched_tokens

    def _run_first(self) -> None:
        request = self.waiting.pop(0)
        request.status = Status.RUNNING
        self.running.append(request)

    def ahead(self, plan: Plan) -> Plan | None:
        """The step after `plan`, before it is known which tokens `plan` samples; None if it could depend on them.

        It cannot while every running request decodes, nobody can be admitted and the pool has blocks for all. A request
        that turns out to have ended has computed one token in vain.
        """
        live = [chunk for chunk in plan.chunks if chunk.request.status is Status.RUNNING]
        decoding = all(chunk.end == len(chunk.request.tokens) for chunk in live) and len(live) == len(self.running)
        full = len(self.running) >= self.config.max_num_seqs
        room = self.pool.num_free >= len(live)
        if self.config.scheduling != "continuous" or not decoding or not room or (self.waiting and not full):
            return None
        after = Plan()
        for chunk in live:
            request, end = chunk.request, chunk.end + 1
            if request.num_output + 1 >= request.params.max_tokens or end >= self.max_model_len:
                continue  # its token is its last one
            copies = self.pool.extend(request.block_table, chunk.end, end)
            assert copies is not None  # there is room for one block each
            after.moves += [Move("copy", source, target) for source, target in copies]
            after.chunks.append(Chunk(request, chunk.end, end, 1))
        return after if after.chunks else None

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
        if child.deadline is not None:
            self.hurried[child] = None

    def restart(self) -> None:
        """After a step that broke off: what it had done is unknown, so all that was begun is computed again."""
        for request in self.waiting:
            self._free(request)
        for request in list(self.running):
            self._preempt(request)

    def _preempt(self, request: Request, plan: Plan | None = None) -> None:
        """Back to the queue. With a plan and room in host memory its blocks are swapped out, else it is recomputed.

        (Recomputing finds again what the prefix cache still holds by then.)
        """
        used = request.block_table[: -(-request.num_computed // self.pool.block_size)]
        table = self.swap.allocate(len(used)) if plan is not None and self.config.preemption == "swap" else None
        num_computed = request.num_computed
        self.running.remove(request)
        self._free(request)
        if table and plan is not None:
            plan.moves += [Move("out", s, t) for s, t in zip(used, table, strict=True)]
            request.swap_table, request.num_computed = table, num_computed
            self.num_swaps += 1
        request.status = Status.PREEMPTED
        self.num_preemptions += 1
        self._enqueue(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in any state. Ending it twice is harmless."""
        if request.status is Status.FINISHED:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._free(request)
        self.hurried.pop(request, None)
        request.status, request.finish_reason = Status.FINISHED, reason

    def _free(self, request: Request) -> None:
        self.pool.release(request.block_table)
        self.swap.release(request.swap_table)
        request.block_table, request.swap_table, request.digests, request.num_computed = [], [], [], 0

    def check(self) -> None:
        """Prove that every block, table and queue agrees. Raises AssertionError."""
        self.pool.check([r.block_table for r in self.running])
        self.swap.check([r.swap_table for r in self.waiting])
        for request in self.running:
            size, table = self.pool.block_size, request.block_table
            ok = len(table) * size >= request.num_computed and len(request.digests) <= request.num_computed // size
            if not ok or request.status is not Status.RUNNING or request.swap_table:
                raise AssertionError(f"request {request.id}: table, digests or status do not fit its tokens")
        for request in self.waiting:
            held = len(request.swap_table) * self.pool.block_size
            if request.block_table or request.num_computed > held:
                raise AssertionError(f"request {request.id} waits, but holds blocks")
        if self.waiting != sorted(self.waiting, key=self.policy):
            raise AssertionError("the queue is not in the order of the policy")
        if len(self.running) > self.config.max_num_seqs:
            raise AssertionError("more requests run than max_num_seqs")
