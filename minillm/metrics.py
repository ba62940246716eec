"""What the user of a serving system feels, as numbers. Times are in seconds.

The names are the field's: TTFT (time to first token), TPOT (time per output token), E2E (end to end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def ttft(arrival: float, token_times: Sequence[float]) -> float:
    """Time to first token: from the request's arrival to its first output token, waiting in the queue included.

    token_times: when each output token came out, ascending; at least one.
    """
    # exercise 00.1
    return token_times[0] - arrival
    # end exercise 00.1


def tpot(token_times: Sequence[float]) -> float:
    """Time per output token: the mean gap between output tokens, the first token's wait not included.

    n tokens have n - 1 gaps. With fewer than two tokens there is no gap: 0.0.
    """
    # exercise 00.2
    if len(token_times) < 2:
        return 0.0
    return (token_times[-1] - token_times[0]) / (len(token_times) - 1)
    # end exercise 00.2


def throughput(num_tokens: Sequence[int], spans: Sequence[tuple[float, float]]) -> float:
    """Output tokens per second of the system: all tokens over the wall time from the first start to the last end.

    num_tokens[i]: output tokens of request i; spans[i]: its (arrival, finish). Requests may overlap, so the time of
    each is not added up, and rates are not averaged.
    """
    # exercise 00.3
    wall = max(end for _, end in spans) - min(start for start, _ in spans)
    return sum(num_tokens) / wall
    # end exercise 00.3


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile (0 to 100) of values, linear between neighbours, as numpy's default. Empty: 0.0."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100.0
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def cost_per_million_tokens(price_per_hour: float, tokens_per_second: float) -> float:
    """What a million output tokens cost on a machine that is rented by the hour and produces at this rate.

    Same currency as `price_per_hour`. An idle machine costs the same and produces nothing, so use the rate that is
    sustained, not the peak.
    """
    # exercise 00.4
    return price_per_hour / (tokens_per_second * 3600) * 1_000_000
    # end exercise 00.4


@dataclass
class RequestMetrics:
    """When things happened to one request (seconds, `time.perf_counter`)."""

    arrival: float
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there was none."""
        return ttft(self.arrival, self.token_times) if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds between output tokens; None if there was no token."""
        return tpot(self.token_times) if self.token_times else None

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end; None while it runs."""
        return None if self.finished is None else self.finished - self.arrival

    def as_dict(self) -> dict[str, float | None]:
        return {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}


@dataclass
class StepRecord:
    """One step of the engine, for timelines: who ran in it.

    work: (request id, completion index, first position, end position) of each request in the step; padding: dead
    tokens computed beside them; blocks_used and num_waiting: the pool and the queue after the step. Times are
    `time.perf_counter`.
    """

    start: float
    end: float
    work: list[tuple[str, int, int, int]]
    padding: int
    blocks_used: int
    num_waiting: int


def useful_share(timeline: Sequence[StepRecord]) -> float:
    """Share of all computed tokens, padding included, that belonged to a living request. Nothing computed: 1.0."""
    # exercise 06.4
    real = sum(end - start for step in timeline for _, _, start, end in step.work)
    padded = sum(step.padding for step in timeline)
    return real / (real + padded) if real + padded else 1.0
    # end exercise 06.4


def goodput(
    requests: Sequence[RequestMetrics], seconds: float, max_ttft: float, max_tpot: float, max_e2e: float | None = None
) -> float:
    """Requests per second that kept every limit of the SLO, over a run of `seconds`.

    A request that did not finish, or gave no token, did not keep them. A limit counts as kept when it is just reached.
    (The word is DistServe's, arXiv:2401.09670, section 1; there it is the highest such rate that a GPU can take.)
    """
    # exercise 07.4
    good = 0
    for request in requests:
        if request.ttft is None or request.tpot is None or request.e2e is None:
            continue
        in_time = max_e2e is None or request.e2e <= max_e2e
        good += request.ttft <= max_ttft and request.tpot <= max_tpot and in_time
    return good / seconds
    # end exercise 07.4
