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
