"""`LLMEngine`: requests in, tokens out. One step is plan, run, commit, sample, accept; all else is around it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from . import kv, roofline, runner, sampler, text
from .blocks import KVPool
from .config import EngineConfig, ModelConfig
from .errors import RequestError
from .metrics import RequestMetrics, StepRecord
from .model import Transformer
from .request import (
    Delta,
    Prompt,
    Request,
    SamplingParams,
    Status,
    check_id,
    check_timeout,
    prompt_tokens,
)
from .runner import Flight
from .scheduler import Chunk, Plan, Scheduler

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
SCORED_AT_ONCE = 64  # rows: log probabilities take 4 bytes for each id of the vocabulary


class LLMEngine:
    """Serves requests, one step at a time: `add_request`, `step` until `is_done`, `abort` to forget it.

    `requests[id]` holds a request's completions. An engine belongs to one thread.
    """

    def __init__(
        self, config: ModelConfig, model: Transformer, tokenizer: text.Tokenizer | None, engine: EngineConfig
    ) -> None:
        self.config, self.engine_config, self.model, self.tokenizer = config, engine, model, tokenizer
        weight = model.embed.weight
        length = min(engine.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
        num_blocks = engine.num_kv_blocks or runner.default_num_blocks(config, engine, length, model)
        self.max_model_len = min(length, num_blocks * engine.block_size)
        num_swap = 0
        if engine.preemption == "swap":
            num_swap = engine.num_swap_blocks or runner.default_num_swap_blocks(
                config, engine, num_blocks, weight.dtype
            )
        kind = runner.cache_dtype(engine.kv_cache_dtype, weight.dtype)
        with runner.fits(
            f"{num_blocks} KV blocks", num_blocks * runner.block_bytes(config, engine, weight.dtype), weight.device
        ):
            self.cache = kv.KVCache(config, num_blocks, engine.block_size, kind, weight.device)
        host = kv.KVCache(config, num_swap, engine.block_size, kind, "cpu")
        self.pool = KVPool(num_blocks, engine.block_size, engine.enable_prefix_caching)
        self.scheduler = Scheduler(engine, self.pool, self.max_model_len, num_swap)
        self.num_ids = min(config.vocab_size, tokenizer.vocab_size if tokenizer else config.vocab_size)
        self.runner = runner.make_runner(model, self.cache, host, engine, self.max_model_len, self.num_ids)
        self.windows = [config.window(layer) for layer in range(config.num_layers)]
        self._flight: Flight | None = None  # a step that was started and not looked at yet
        self.eos_ids = (*config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ()))  # either may know more
        self.requests: dict[str, list[Request]] = {}  # by id: the n completions of each live request
        self._listeners: dict[str, deque[Delta]] = {}
        self._count = 0  # requests so far
        totals = ("steps", "computed_tokens", "padding_tokens", "output_tokens", "seconds", "bytes")
        self._totals = dict.fromkeys(totals, 0.0)
        self.timeline: list[StepRecord] | None = None  # set it to [] to record every step

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        arrival: float | None = None,
    ) -> str:
        """Queue a request for the coming steps and return its id. Raises RequestError if it cannot be served.

        priority: lower runs first. timeout: seconds after its arrival when it ends, done or not, with what it has by
        then and the finish reason "timeout". arrival: `time.perf_counter` when it came, if that was before now.
        Each `step` returns what is new; `requests[request_id]` holds the completions until `abort` forgets them.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}.")
        if request_id is None:
            names = (f"request-{k}" for k in itertools.count(self._count))
            request_id = next(name for name in names if name not in self.requests)
        check_id(request_id)
        if request_id in self.requests and not self.is_done(request_id):
            raise RequestError(f"a request with the id {request_id!r} is running already.")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority must be a whole number, got {priority!r}.")
        check_timeout(timeout)
        tokens = prompt_tokens(prompt, self.tokenizer, self.num_ids)
        arrival = time.perf_counter() if arrival is None else arrival
        eos = () if params.ignore_eos else self.eos_ids
        stop_ids = frozenset(t for t in (*eos, *params.stop_token_ids) if 0 <= t < self.config.vocab_size)
        if params.min_tokens and len(stop_ids) >= self.num_ids:
            raise RequestError("min_tokens cannot be met: every token is a stop token.")
        # without a seed of its own, a request gets one that nobody would choose
        seed = params.seed if params.seed is not None else ((self.engine_config.seed + 1) << 40) + self._count
        request = Request(
            id=request_id,
            tokens=tokens,
            params=params,
            metrics=RequestMetrics(arrival),
            order=self._count,
            priority=priority,
            deadline=None if timeout is None else arrival + timeout,
            prompt=prompt if isinstance(prompt, str) else None,
            num_prompt=len(tokens),
            num_forks=params.n - 1,
            seed=seed % 2**63,
            stop_ids=stop_ids,
        )
        self._start_text(request)
        self.scheduler.add(request)
        self._count += 1
        self.requests[request_id] = [request]
        return request_id

    def abort(self, request_id: str) -> list[Delta]:
        """End a request in any state and forget it; its stream ends. An unknown one is left alone.

        Returns the last delta of each completion that had not ended.
        """
        news = []
        for request in [r for r in self.requests.get(request_id, []) if r.status is not Status.FINISHED]:
            self.scheduler.finish(request, "abort")
            news += [self._tell(request, Delta("", [], "abort", request.index)), *self._never_begun(request, "abort")]
        self.requests.pop(request_id, None)
        return [delta for _, delta in news]

    def is_done(self, request_id: str) -> bool:
        """Whether all completions of a request have ended (an unknown request is done)."""
        return all(r.status is Status.FINISHED for r in self.requests.get(request_id, []))

    def _start_text(self, request: Request) -> None:
        if self.tokenizer is not None:
            request.detokenizer = text.IncrementalDetokenizer(self.tokenizer)
            if request.params.stop:
                request.stop_strings = text.StopStrings(list(request.params.stop))
        elif request.params.stop:
            raise RequestError("stop strings need a tokenizer, and this engine has none.")

    # ---- one step

    def step(self) -> list[tuple[Request, Delta]]:
        """Run one step; returns what is new for each request that got a token, or ended.

        An exception leaves the engine usable: its requests are queued again and go on with the next step.
        """
        try:
            return self._step()
        except BaseException:
            self._flight = None
            self.scheduler.restart()
            raise

    def _step(self) -> list[tuple[Request, Delta]]:
        start = time.perf_counter()
        news = [one for r in self.scheduler.overdue(start) for one in self._quit(r, "timeout")]
        flight, self._flight = self._flight, None
        if flight is None:
            hold = self.scheduler.hold()  # before the plan is made: later it may be over
            plan = self.scheduler.plan()
            if not plan.chunks:
                if self.scheduler.waiting and not hold and self.scheduler.may_admit():
                    raise RuntimeError(
                        "no request can be scheduled, although some wait: this is a bug in the scheduler"
                    )
                time.sleep(min(hold, 0.005))  # a static batch waits to be full
                return news
            if not self._sampled_on_device(plan):
                news += self._advance(plan, self.runner.run(plan))
                self._account(plan, start, time.perf_counter())
                return news
            flight = self.runner.start(plan)
        after = self.scheduler.ahead(flight.plan)
        if after is not None:  # the CPU's work on this step then hides behind the GPU's on the next
            self._flight = self.runner.start(after, flight)
        news += self._land(flight)
        self._account(flight.plan, start, time.perf_counter())
        return news

    def _sampled_on_device(self, plan: Plan) -> bool:
        """Whether all that is wanted of this step is a token for each request, and the runner can sample it."""
        return self.runner.samples and all(c.request.needs_only_token for c in plan.chunks)

    def _land(self, flight: Flight) -> list[tuple[Request, Delta]]:
        """Book a step whose tokens were sampled on the device. Requests that ended while it ran are left out."""
        rows = list(zip(flight.rows, flight.tokens(), strict=True))
        running = [(request, token) for request, token in rows if request.status is Status.RUNNING]
        news = [one for request, token in running if token < 0 for one in self._fail(request, NOT_FINITE)]
        flight.plan.chunks = [chunk for chunk in flight.plan.chunks if chunk.request.status is Status.RUNNING]
        self.scheduler.commit(flight.plan)
        now = time.perf_counter()
        for request, token in running:
            if token >= 0:
                news.append(self._tell(request, self._accept(request, token, None, now)))
        return news

    def _tell(self, request: Request, delta: Delta) -> tuple[Request, Delta]:
        """Hand a delta to the request's stream, if there is one."""
        if request.id in self._listeners:
            self._listeners[request.id].append(delta)
        return request, delta

    def _advance(self, plan: Plan, hidden: Tensor) -> list[tuple[Request, Delta]]:
        """Book a step that gave hidden states; sample a token for each request whose tokens are all computed."""
        news = []
        asked = [chunk for chunk in plan.chunks if chunk.num_logits]
        ends = list(itertools.accumulate(chunk.num_logits for chunk in asked))
        logits = self.runner.logits(hidden[[end - 1 for end in ends]])
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        rows: dict[Request, int] = {}
        for row, (chunk, end) in enumerate(zip(asked, ends, strict=True)):
            good = finite[row] and self._score_prompt(chunk, hidden[end - chunk.num_logits : end])
            if good:
                rows[chunk.request] = row
            elif chunk.request.status is Status.RUNNING:
                news += self._fail(chunk.request, NOT_FINITE)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.request.status is Status.RUNNING]
        self.scheduler.commit(plan)  # without those that failed just now, or were aborted meanwhile
        owners: list[Request] = []
        picked: list[int] = []
        for chunk in plan.chunks:
            request = chunk.request
            if request.num_computed < len(request.tokens):
                continue
            siblings = [request, *self._fork(request)]
            if request.params.max_tokens == 0:
                news += [self._tell(one, self._end(one, "length")) for one in siblings]
                continue
            owners += siblings
            picked += [rows[request]] * len(siblings)
        if owners:
            wanted = logits if picked == list(range(len(logits))) else logits[picked]
            tokens = self.runner.sample(wanted, owners, self.num_ids)
            scores = self._score_output(owners, tokens, wanted)
            now = time.perf_counter()
            for row, (request, token) in enumerate(zip(owners, tokens, strict=True)):
                news.append(self._tell(request, self._accept(request, token, scores.get(row), now)))
        return news

    def _fork(self, request: Request) -> list[Request]:
        """The other completions of a prompt that was just computed; they share its blocks."""
        children = self._children(request)
        for child in children:
            self._start_text(child)
            self.requests[request.id].append(child)
            self.scheduler.fork(request, child)
        return children

    def _children(self, request: Request) -> list[Request]:
        """The completions of a prompt that are not split off yet."""
        children = []
        for index in range(1, request.num_forks + 1):
            child = Request(
                id=request.id,
                tokens=list(request.tokens),
                params=request.params,
                metrics=RequestMetrics(arrival=request.metrics.arrival),
                order=request.order,
                priority=request.priority,
                deadline=request.deadline,
                index=index,
                num_prompt=request.num_prompt,
                num_cached=request.num_cached,
                seed=(request.seed + index * 0x9E3779B9) % 2**63,
                stop_ids=request.stop_ids,
            )
            children.append(child)
        return children

    def _accept(self, request: Request, token: int, scores: dict[int, float] | None, now: float) -> Delta:
        """Add a sampled token to its request: log probabilities, text, stop conditions."""
        params = request.params
        request.tokens.append(token)
        request.metrics.token_times.append(now)
        self._totals["output_tokens"] += 1
        if scores is not None:
            request.logprobs.append(scores)
        count = request.num_output
        if token in request.stop_ids:
            return self._end(request, "stop", [token])
        new, hit = request.detokenizer.push(token) if request.detokenizer else "", False
        if request.stop_strings and count > params.min_tokens:
            new, hit = request.stop_strings.push(new)
        request.text += new
        if hit:
            self.scheduler.finish(request, "stop")
            request.metrics.finished = time.perf_counter()
            return Delta(new, [token], "stop", request.index)
        if count >= params.max_tokens or len(request.tokens) >= self.max_model_len:
            delta = self._end(request, "length", [token])
            return Delta(new + delta.text, [token], delta.finish_reason, request.index)
        return Delta(new, [token], None, request.index)

    def _end(self, request: Request, reason: str, tokens: Sequence[int] = ()) -> Delta:
        """Finish a request; the delta holds the text that was held back until now."""
        rest = request.detokenizer.flush() if request.detokenizer else ""
        if request.stop_strings and request.num_output > request.params.min_tokens:
            rest, hit = request.stop_strings.push(rest)
            reason = "stop" if hit else reason
            rest += "" if hit else request.stop_strings.flush()
        request.text += rest
        self.scheduler.finish(request, reason)
        request.metrics.finished = time.perf_counter()
        return Delta(rest, list(tokens), reason, request.index)

    def _quit(self, request: Request, reason: str) -> list[tuple[Request, Delta]]:
        """End a request early, and with it the completions that would have been split off from it."""
        return [self._tell(request, self._end(request, reason)), *self._never_begun(request, reason)]

    def _never_begun(self, request: Request, reason: str) -> list[tuple[Request, Delta]]:
        news = []
        for child in self._children(request):
            child.status, child.finish_reason, child.error = Status.FINISHED, reason, request.error
            child.metrics.finished = time.perf_counter()
            self.requests[child.id].append(child)
            news.append(self._tell(child, Delta("", [], reason, child.index)))
        request.num_forks = 0
        return news

    def _fail(self, request: Request, why: str) -> list[tuple[Request, Delta]]:
        """End one request with an error. Blocks that it computed are never matched again."""
        request.error = f"request {request.id}: {why}"
        self.pool.discard(request.block_table)
        return self._quit(request, "error")

    def _score_output(
        self, requests: Sequence[Request], tokens: Sequence[int], logits: Tensor
    ) -> dict[int, dict[int, float]]:
        """Log probabilities by row, of the rows that want them. Row r of the logits gave tokens[r] of requests[r]."""
        wanted = [r for r, request in enumerate(requests) if request.params.logprobs is not None]
        found: dict[int, dict[int, float]] = {}
        for first in range(0, len(wanted), SCORED_AT_ONCE):
            rows = wanted[first : first + SCORED_AT_ONCE]
            counts = [requests[r].params.logprobs or 0 for r in rows]
            scores = sampler.top_logprobs(logits[rows].log_softmax(-1), [tokens[r] for r in rows], counts)
            found.update(zip(rows, scores, strict=True))
        return found

    def _score_prompt(self, chunk: Chunk, hidden: Tensor) -> bool:
        """Log probabilities of the prompt's tokens, if they are wanted: position p scores token p + 1.

        False if some are not finite.
        """
        request, count = chunk.request, chunk.request.params.prompt_logprobs
        if count is None or chunk.start >= request.num_prompt:
            return True
        for first in range(0, len(hidden), SCORED_AT_ONCE):
            scores = self.runner.logits(hidden[first : first + SCORED_AT_ONCE]).log_softmax(-1)
            if not torch.isfinite(scores.amax()):
                return False
            place = chunk.start + first + 1
            tokens = request.tokens[place : min(place + len(scores), request.num_prompt)]
            if tokens:
                found = sampler.top_logprobs(scores[: len(tokens)], tokens, [count] * len(tokens))
                request.prompt_logprobs.update(enumerate(found, place))
        return True

    # ---- numbers

    def _account(self, plan: Plan, start: float, end: float) -> None:
        totals, element = self._totals, self.cache.data.element_size()
        totals["steps"] += 1
        totals["seconds"] += end - start
        totals["computed_tokens"] += sum(chunk.end - chunk.start for chunk in plan.chunks)
        totals["padding_tokens"] += plan.num_padding
        if self.timeline is not None:
            work = [(c.request.id, c.request.index, c.start, c.end) for c in plan.chunks]
            used, queue = len(self.pool.blocks) - self.pool.num_free, len(self.scheduler.waiting)
            self.timeline.append(StepRecord(start, end, work, plan.num_padding, used, queue))
        lengths: list[float] = [chunk.end for chunk in plan.chunks]
        if any(self.windows):  # a layer reads no more than its window; the mean over the layers counts
            lengths = [sum(min(end, w or end) for w in self.windows) / len(self.windows) for end in lengths]
        totals["bytes"] += roofline.step_bytes(self.config, lengths, self.model.embed.weight.element_size(), element)

    def stats(self) -> dict[str, float]:
        """Counters since the engine was made. Rates are per second of step time; bytes are weights and KV read."""
        totals, pool = self._totals, self.pool
        seconds = totals["seconds"] or float("nan")
        return {
            "num_waiting": len(self.scheduler.waiting),
            "num_running": len(self.scheduler.running),
            "blocks_total": len(pool.blocks),
            "blocks_used": len(pool.blocks) - pool.num_free,
            "kv_bytes_per_token": self.cache.bytes_per_token,
            "preemptions": self.scheduler.num_preemptions,
            "swaps": self.scheduler.num_swaps,
            "prefix_hit_rate": self.scheduler.num_hit_tokens / max(1, self.scheduler.num_queried_tokens),
            "steps": totals["steps"],
            "computed_tokens": totals["computed_tokens"],
            "padding_tokens": totals["padding_tokens"],
            "output_tokens": totals["output_tokens"],
            "seconds": totals["seconds"],
            "bytes_moved": totals["bytes"],
            "tokens_per_second": totals["output_tokens"] / seconds,
            "gb_per_second": totals["bytes"] / seconds / 1e9,
        }
