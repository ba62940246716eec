"""A load generator: send requests as a workload says, and report what users and the operator see.

Three ways to load a system. *Offline*: everything is there at the start; throughput counts. *Open loop*
(`request_rate`): requests arrive by a Poisson process, whether the system keeps up or not, as users do. *Closed loop*
(`concurrency`): so many users, each of whom sends the next request when the last is answered; it can never overload the
system, so it hides queueing.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

from . import metrics
from .errors import RequestError
from .llm import LLM
from .metrics import RequestMetrics, StepRecord
from .request import Request, RequestOutput, SamplingParams

PERCENTILES = (50, 90, 99)


@dataclass
class Item:
    """One request of a workload. arrival: seconds after the start; a closed loop leaves it out."""

    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0
    priority: int = 0
    timeout: float | None = None


def workload(
    num_requests: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    vocab_size: int,
    request_rate: float | None = None,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[Item]:
    """Random prompts of token ids: the first `prefix_len` tokens are the same in all, the rest are each one's own.

    input_len, output_len: (least, most), uniform; input_len does not count the prefix. request_rate: mean arrivals per
    second; the gaps are exponential (a Poisson process). None: all arrive at 0.
    """
    draw, now = random.Random(seed), 0.0
    prefix = [draw.randrange(vocab_size) for _ in range(prefix_len)]
    items = []
    for _ in range(num_requests):
        own = [draw.randrange(vocab_size) for _ in range(draw.randint(*input_len))]
        items.append(Item(prefix + own, draw.randint(*output_len), now))
        now += draw.expovariate(request_rate) if request_rate else 0.0
    return items


@dataclass
class Report:
    """What a run measured. Times in seconds; `percentiles[name][p]` for ttft, tpot, itl (inter-token latency), e2e."""

    seconds: float
    num_requests: int
    num_refused: int
    num_timed_out: int
    input_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    percentiles: dict[str, dict[int, float | None]]
    goodput: float | None  # requests per second within the SLO
    kv_usage_mean: float  # share of the pool's blocks in use, over the steps' time
    kv_usage_max: float
    prefix_hit_rate: float
    preemptions: float
    useful_share: float
    gb_per_second: float
    requests: list[RequestMetrics] = field(repr=False, default_factory=list)
    timeline: list[StepRecord] = field(repr=False, default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the single requests and steps."""
        return {name: value for name, value in asdict(self).items() if name not in ("requests", "timeline")}


def run(
    llm: LLM,
    items: Sequence[Item],
    params: SamplingParams | None = None,
    concurrency: int | None = None,
    slo: tuple[float, float] | None = None,
    progress: bool = False,
) -> Report:
    """Send the workload and wait for the last answer.

    params: what all requests share (default: greedy, end tokens ignored); max_tokens comes from each item.
    concurrency: closed loop with so many users; arrivals are then ignored. slo: (largest TTFT, largest TPOT), seconds.
    """
    shared = asdict(params or SamplingParams(temperature=0.0, ignore_eos=True)) | {"max_tokens": 0}
    before, hits, queried = llm.stats(), llm.scheduler.num_hit_tokens, llm.scheduler.num_queried_tokens
    llm.timeline, todo = [], sorted(items, key=lambda item: item.arrival)[::-1]
    live: dict[str, list[Request]] = {}
    done: list[list[Request]] = []
    refused, start = 0, time.perf_counter()
    try:
        with tqdm(total=len(items), unit="request", disable=not progress) as bar:
            while todo or live:
                now = time.perf_counter() - start
                while todo and (len(live) < concurrency if concurrency else todo[-1].arrival <= now):
                    item = todo.pop()
                    one = SamplingParams(**shared | {"max_tokens": item.max_tokens, "min_tokens": 0})
                    try:
                        # it counts from when it should have come, also if a step was under way
                        arrival = None if concurrency else start + item.arrival
                        name = llm.add_request(item.prompt, one, None, item.priority, item.timeout, arrival)
                    except RequestError:
                        refused += 1
                        bar.update()
                        continue
                    live[name] = llm.requests[name]
                if not live:
                    time.sleep(max(0.0, todo[-1].arrival - now) if todo else 0.0)
                    continue
                for name in {request.id: None for request, delta in llm.step() if delta.finish_reason}:
                    if name in live and llm.is_done(name):
                        done.append(live.pop(name))
                        llm.abort(name)
                        bar.update()
        seconds = time.perf_counter() - start
    finally:
        for name in live:
            llm.abort(name)
        timeline, llm.timeline = llm.timeline, None
    after = llm.stats()
    steps = sum(step.end - step.start for step in timeline) or 1.0
    usage = [step.blocks_used / len(llm.pool.blocks) for step in timeline]
    each = [r for requests in done for r in requests]  # completion by completion
    times = [r.metrics.token_times for r in each]
    found: dict[str, list[float | None]] = {
        "ttft": [r.metrics.ttft for r in each],
        "tpot": [r.metrics.tpot for r in each if r.num_output > 1],  # one token has no gap to another
        "e2e": [r.metrics.e2e for r in each],
        "itl": [b - a for one in times for a, b in itertools.pairwise(one)],
    }
    percentiles: dict[str, dict[int, float | None]] = {}
    for name, values in found.items():
        known = [value for value in values if value is not None]
        percentiles[name] = {p: metrics.percentile(known, p) if known else None for p in PERCENTILES}
    output_tokens = sum(r.num_output for r in each)
    whole = [RequestOutput.of(one).metrics for one in done if all(r.finish_reason in ("stop", "length") for r in one)]
    return Report(
        seconds=seconds,
        num_requests=len(items),
        num_refused=refused,
        num_timed_out=sum(any(r.finish_reason == "timeout" for r in one) for one in done),
        input_tokens=sum(one[0].num_prompt for one in done),
        output_tokens=output_tokens,
        output_tokens_per_second=output_tokens / seconds,
        requests_per_second=len(whole) / seconds,
        percentiles=percentiles,
        goodput=metrics.goodput(whole, seconds, *slo) if slo else None,
        kv_usage_mean=sum(u * (step.end - step.start) for u, step in zip(usage, timeline, strict=True)) / steps,
        kv_usage_max=max(usage, default=0.0),
        prefix_hit_rate=(llm.scheduler.num_hit_tokens - hits) / max(1, llm.scheduler.num_queried_tokens - queried),
        preemptions=after["preemptions"] - before["preemptions"],
        useful_share=metrics.useful_share(timeline),
        gb_per_second=(after["bytes_moved"] - before["bytes_moved"]) / steps / 1e9,
        requests=[r.metrics for r in each],
        timeline=timeline,
    )
