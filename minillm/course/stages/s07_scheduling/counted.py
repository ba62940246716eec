"""The engine's scheduler without a model. Time is counted in ticks, so that every run gives the same numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.blocks import KVPool
from minillm.config import EngineConfig
from minillm.metrics import RequestMetrics
from minillm.request import Request, SamplingParams
from minillm.scheduler import Scheduler


@dataclass
class Job:
    """A request that will arrive: at `arrival` ticks, with so many tokens in and out. It ends `timeout` ticks later."""

    name: str
    arrival: float
    prompt: int
    output: int
    priority: int = 0
    timeout: float | None = None


@dataclass
class Run:
    """What happened. shares[i]: the tokens that each request was given in step i; times are in ticks."""

    requests: dict[str, Request] = field(default_factory=dict)
    shares: list[dict[str, int]] = field(default_factory=list)
    ticks: float = 0.0
    computed: int = 0
    preemptions: int = 0
    swaps: int = 0

    @property
    def in_time(self) -> list[str]:
        """Those that finished, not by a timeout."""
        return [name for name, request in self.requests.items() if request.finish_reason == "length"]


def run_counted(jobs: Sequence[Job], step: float = 1.0, token: float = 0.0, limit: int = 5000, **options) -> Run:
    """Run the engine's own scheduler on these jobs. A step takes `step` ticks, and `token` more for each token in it.

    options: those of the engine. limit: stops after so many steps, so that a livelock ends.
    """
    config = EngineConfig(**{"num_kv_blocks": 256, "enable_prefix_caching": False, **options})
    assert config.num_kv_blocks is not None
    pool = KVPool(config.num_kv_blocks, config.block_size, config.enable_prefix_caching)
    swap = config.num_kv_blocks if config.preemption == "swap" else 0
    scheduler = Scheduler(config, pool, config.num_kv_blocks * config.block_size, swap)
    run, now, coming = Run(), 0.0, sorted(jobs, key=lambda job: job.arrival)
    while (coming or scheduler.waiting or scheduler.running) and len(run.shares) < limit:
        while coming and coming[0].arrival <= now:
            job = coming.pop(0)
            request = Request(
                job.name,
                list(range(job.prompt)),
                SamplingParams(max_tokens=job.output, ignore_eos=True),
                RequestMetrics(job.arrival),
                order=len(run.requests),
                priority=job.priority,
                deadline=None if job.timeout is None else job.arrival + job.timeout,
                num_prompt=job.prompt,
            )
            run.requests[job.name] = request
            scheduler.add(request)
        for request in scheduler.overdue(now):
            scheduler.finish(request, "timeout")
            request.metrics.finished = now
        plan = scheduler.plan()
        if not plan.chunks:
            now = coming[0].arrival if coming else now
            continue
        run.shares.append({chunk.request.id: chunk.end - chunk.start for chunk in plan.chunks})
        count = sum(run.shares[-1].values())
        now += step + token * count
        run.computed += count
        scheduler.commit(plan)  # a model would run here
        for chunk in plan.chunks:
            request = chunk.request
            if request.num_computed == len(request.tokens):  # all is computed: a new token comes out
                request.tokens.append(0)
                request.metrics.token_times.append(now)
                if request.num_output == request.params.max_tokens:
                    scheduler.finish(request, "length")
                    request.metrics.finished = now
    run.ticks, run.preemptions, run.swaps = now, scheduler.num_preemptions, scheduler.num_swaps
    return run


def mixed_jobs(seed: int = 0, count: int = 240, gap: float = 3.0) -> list[Job]:
    """A busy hour: chats (priority 0, soon due), reports (1, due later) and background jobs (2, never due).

    gap: mean ticks between arrivals.
    """
    draw, now, jobs = random.Random(seed), 0.0, []
    for i in range(count):
        now += draw.expovariate(1 / gap)
        kind = draw.choices(("chat", "report", "job"), (6, 3, 1))[0]
        if kind == "chat":
            jobs.append(Job(f"chat{i}", now, draw.randint(8, 24), draw.randint(6, 12), 0, 30.0))
        elif kind == "report":
            jobs.append(Job(f"report{i}", now, draw.randint(30, 60), draw.randint(14, 22), 1, 90.0))
        else:
            jobs.append(Job(f"job{i}", now, draw.randint(40, 80), draw.randint(20, 30), 2))
    return jobs
