"""What a user asks for (`SamplingParams`), a request on its way (`Request`) and what comes back (`RequestOutput`)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral

from .errors import RequestError
from .metrics import RequestMetrics
from .text import IncrementalDetokenizer, StopStrings, Tokenizer

Prompt = str | Sequence[int]


@dataclass
class SamplingParams:
    """How to choose tokens and when to stop. Names, meaning and defaults are vLLM's.

    max_tokens: most tokens to generate; 0 only scores the prompt. min_tokens: no end token before so many.
    temperature: 0 is greedy. top_k: 0 is off; then top_p, then min_p look at what is left (vLLM's V1 engine takes min_p
    first). seed: draws depend on (seed, position) only, not on batch mates.
    n: completions for each prompt. stop: strings that end the text and are not part of it. stop_token_ids: added to
    the model's own end tokens. logprobs: for each generated token, its log probability and those of the so many
    likeliest, from the model's raw logits. prompt_logprobs: the same for the prompt's tokens (the first has none).
    repetition_penalty counts prompt and output; presence_ and frequency_penalty count the output only.
    A stop string counts if it begins after min_tokens. The values are read while the request runs: do not change them.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), (list, tuple, range, set, frozenset, type(None))):
                raise RequestError(f"{name} must be a list, got {getattr(self, name)!r}.")
        self.stop, self.stop_token_ids = list(self.stop), tuple(self.stop_token_ids or ())
        for name in ("max_tokens", "min_tokens", "top_k", "n", "logprobs", "prompt_logprobs"):
            value, least = getattr(self, name), int(name == "n")
            if value is None and name.endswith("logprobs"):
                continue
            if not _whole(value) or value < least:
                raise RequestError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.seed is not None and not _whole(self.seed):
            raise RequestError(f"seed must be a whole number or None, got {self.seed!r}.")
        limits = {
            "temperature": (0.0, math.inf),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.0, math.inf),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not low <= value <= high:
                raise RequestError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}.")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise RequestError(f"{name} must be above 0.")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}).")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop must be one or more strings that are not empty, got {self.stop!r}.")
        if not all(_whole(token) for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids must be whole numbers, got {self.stop_token_ids!r}.")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer | None, num_ids: int) -> list[int]:
    """A prompt as token ids, each below num_ids. Raises RequestError if that cannot be."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("this engine has no tokenizer: give token ids instead of text.")
        tokens = tokenizer.encode(prompt)
    else:
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(prompt, (list, tuple)):
            raise RequestError(f"a prompt must be text or a list of token ids, got {type(prompt).__name__}.")
        tokens = [_token(t) for t in prompt]
    if not tokens:
        raise RequestError("the prompt is empty: there is nothing to continue.")
    if min(tokens) < 0 or max(tokens) >= num_ids:
        wrong = next(t for t in tokens if not 0 <= t < num_ids)
        raise RequestError(f"the prompt holds {wrong}, but token ids go from 0 to {num_ids - 1}.")
    return tokens


def _token(value: object) -> int:
    """A token id as a plain int. Raises RequestError where it is none (True, 1.0, "1")."""
    if type(value) is int:  # nearly always, and checked a thousand times for each prompt
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"the prompt holds {value!r}, but token ids are whole numbers.")
    return int(value)


def check_id(request_id: object) -> None:
    """RequestError if it is no string."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id must be a string, got {request_id!r}.")


def check_timeout(timeout: object) -> None:
    """RequestError if it is neither None nor a positive number of seconds."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):  # type: ignore[operator]
        raise RequestError(f"timeout must be a number of seconds above 0, got {timeout!r}.")


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; its tokens are kept, its KV is dropped or in host memory
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine.

    `tokens` is prompt plus output. `num_computed` of them have their keys and values in the cache. What is left,
    `need`, is all that the scheduler has to know: a new prompt, a chunk of one, a prefix hit, a decode step and a
    preempted request differ only in these numbers.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    order: int = 0  # arrival number: first come, first served
    priority: int = 0  # lower runs first
    deadline: float | None = None  # `time.perf_counter` at which it ends, done or not
    index: int = 0  # which of the n completions
    prompt: str | None = None
    num_prompt: int = 0
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    swap_table: list[int] = field(default_factory=list)  # its blocks in host memory, while it is swapped out
    last_step: int = 0  # the last step that computed something of it
    draft: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: str | None = None  # "stop", "length", "abort", "timeout", "error"
    error: str | None = None
    num_cached: int = 0  # prompt tokens that the prefix cache saved, at first admission
    num_forks: int = 0  # completions still to be split off when the prompt is done
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()  # end tokens of the model and stop_token_ids
    text: str = ""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: dict[int, dict[int, float]] = field(default_factory=dict)
    detokenizer: IncrementalDetokenizer | None = None
    stop_strings: StopStrings | None = None

    @property
    def need(self) -> int:
        """Tokens whose keys and values are not computed yet."""
        return len(self.tokens) + len(self.draft) - self.num_computed

    @property
    def needs_only_token(self) -> bool:
        """Whether a step need not give more than its next token: no log probabilities, penalties or forks."""
        p = self.params
        scores = p.logprobs is not None or p.prompt_logprobs is not None
        early = self.num_output < p.min_tokens or p.max_tokens == 0
        return not (p.has_penalties or scores or early or self.num_forks)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass
class CompletionOutput:
    """One completion. `logprobs[i]` maps token ids to log probabilities at output token i, the chosen one included."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None = None


@dataclass
class RequestOutput:
    """All completions of one prompt. `error` says why there is none, or why one ended early."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: str | None = None

    @classmethod
    def of(cls, requests: Sequence[Request]) -> RequestOutput:
        """From all completions of a prompt, when they have ended."""
        first = requests[0]
        scores: list[dict[int, float] | None] | None = None
        if first.params.prompt_logprobs is not None:
            scores = [first.prompt_logprobs.get(place) for place in range(first.num_prompt)]
        scored = first.params.logprobs is not None
        return cls(
            request_id=first.id,
            prompt=first.prompt,
            prompt_token_ids=first.tokens[: first.num_prompt],
            outputs=[
                CompletionOutput(r.index, r.text, r.output, r.finish_reason, r.logprobs if scored else None)
                for r in requests
            ],
            num_cached_tokens=first.num_cached,
            metrics=RequestMetrics(
                first.metrics.arrival, first.metrics.token_times, max(r.metrics.finished or 0.0 for r in requests)
            ),
            prompt_logprobs=scores,
            error=next((r.error for r in requests if r.error), None),
        )

    @classmethod
    def refused(cls, prompt: object, why: str) -> RequestOutput:
        """For a prompt that never became a request."""
        return cls(
            request_id="refused",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(prompt) if isinstance(prompt, (list, tuple)) else [],
            outputs=[CompletionOutput(0, "", [], "error")],
            num_cached_tokens=0,
            metrics=RequestMetrics(arrival=time.perf_counter()),
            error=why,
        )


@dataclass
class Delta:
    """What is new in one completion since the last delta. `finish_reason` is set on the last one."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    index: int = 0
