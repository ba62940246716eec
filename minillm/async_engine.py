"""`AsyncLLM`: the engine for asyncio. One thread owns the `LLM` and runs its steps; coroutines talk to it by messages.

Whatever happens, a caller gets an answer: its deltas, its error, or the error that ended the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from .errors import MinillmError, RequestError
from .llm import LLM
from .request import Delta, Prompt, SamplingParams, check_id, check_timeout


class EngineDeadError(MinillmError):
    """The engine's thread has ended; nothing can be generated any more."""


@dataclass
class _Caller:
    """A coroutine that waits for deltas: its event loop, what it has not taken yet, and a bell to wake it."""

    loop: asyncio.AbstractEventLoop
    bell: asyncio.Event
    inbox: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # Delta | Exception | None (the end)

    def tell(self, *news: Delta | BaseException | None) -> None:
        """From the engine's thread."""
        for one in news:
            self.inbox.put(one)
        with contextlib.suppress(RuntimeError):  # the caller's event loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.bell.set)


class AsyncLLM:
    """Generate from coroutines, many at a time.

    Takes `LLM`'s arguments, or an `LLM` that nothing else uses from then on. max_pending: back-pressure; so many
    requests of an event loop may be in the engine, further calls wait for one to end. Use it as
    `async with AsyncLLM(...) as engine`, or call `close`.
    """

    def __init__(self, model: Any = "smollm2-135m", *, max_pending: int = 1024, **options: Any) -> None:
        if not isinstance(max_pending, int) or isinstance(max_pending, bool) or max_pending < 1:
            raise RequestError(f"max_pending must be a whole number of at least 1, got {max_pending!r}.")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.dead: BaseException | None = None
        self._names = (f"async-{k}" for k in itertools.count())
        self.max_pending = max_pending
        # a semaphore belongs to one event loop, an engine may outlive it
        self._seats: MutableMapping[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
        self._callers: dict[str, _Caller] = {}  # changed by the engine's thread only
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="minillm", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[Delta]:
        """Yield deltas as they are generated; with n > 1 `delta.index` says of which completion.

        Leaving the loop, or cancelling the task, aborts the request: its blocks are free after the step under way.
        timeout: seconds, the time spent waiting for a seat included; the last delta then says "timeout".
        RequestError: bad input, or the request failed. Other errors of a step are raised as they are.
        """
        check_timeout(timeout)
        if request_id is not None:
            check_id(request_id)
        loop = asyncio.get_running_loop()
        seats, begun = self._seats.setdefault(loop, asyncio.Semaphore(self.max_pending)), loop.time()
        try:
            async with asyncio.timeout(timeout):
                await seats.acquire()
        except TimeoutError:
            yield Delta("", [], "timeout")
            return
        try:
            names = (name for name in self._names if name not in self._callers)  # a user may have chosen one of them
            name = next(names) if request_id is None else request_id
            caller = _Caller(loop, asyncio.Event())
            left = None if timeout is None else max(1e-9, timeout - (loop.time() - begun))
            self._send(lambda: self._add(name, caller, prompt, params or SamplingParams(), priority, left))
            try:
                while True:
                    await self._wait(caller)
                    while not caller.inbox.empty():
                        news = caller.inbox.get()
                        if news is None:
                            return
                        if isinstance(news, BaseException):
                            raise news
                        yield news
            finally:
                self._send(lambda: self._forget(name, caller))
        finally:
            seats.release()

    async def abort(self, request_id: str) -> None:
        """End a request in any state; its stream ends with the reason "abort". An unknown one is left alone."""
        check_id(request_id)
        self._send(lambda: self._abort(request_id))

    async def stats(self) -> dict[str, float]:
        """`LLM.stats`, between two steps."""
        answer: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # as in `_Caller.tell`
                loop.call_soon_threadsafe(answer.set_result, self.llm.stats())

        self._send(tell)
        while not answer.done():
            if self.dead:
                raise EngineDeadError(f"the engine has ended: {self.dead!r}") from self.dead
            await asyncio.wait([answer], timeout=0.1)
        return answer.result()

    async def close(self) -> None:
        """End the thread. Requests under way get `EngineDeadError`."""
        self._todo.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _wait(self, caller: _Caller) -> None:
        """Until there is news. Looks up from time to time, so that a dead thread can never leave it waiting."""
        while caller.inbox.empty():
            if self.dead is not None:
                raise EngineDeadError(f"the engine has ended: {self.dead!r}") from self.dead
            try:
                async with asyncio.timeout(1.0):
                    await caller.bell.wait()
            except TimeoutError:
                continue
            caller.bell.clear()

    def _send(self, work: Callable[[], None]) -> None:
        self._todo.put(work)

    # ---- in the engine's thread

    def _work(self) -> None:
        try:
            while True:
                busy = bool(self._callers)
                while not (self._todo.empty() and busy):
                    work = self._todo.get()  # waits, if there is nothing to compute
                    if work is None:
                        raise EngineDeadError("it was closed")
                    work()
                    busy = bool(self._callers)
                self._step()
        except BaseException as error:
            self.dead = error
            self._fail(error)

    def _step(self) -> None:
        try:
            news = self.llm.step()
        except Exception as error:  # which request is to blame is unknown, so all are told; the engine goes on
            self._fail(error)
            return
        for request, delta in news:
            if caller := self._callers.get(request.id):
                caller.tell(delta)
        for name in [name for name in self._callers if self.llm.is_done(name)]:
            errors = [r.error for r in self.llm.requests.get(name, []) if r.error]
            self.llm.abort(name)
            self._callers.pop(name).tell(RequestError(errors[0]) if errors else None)

    def _add(
        self, name: str, caller: _Caller, prompt: Prompt, params: SamplingParams, priority: int, timeout: float | None
    ) -> None:
        try:
            if name in self._callers:
                raise RequestError(f"a request with the id {name!r} is running already.")
            self.llm.add_request(prompt, params, name, priority, timeout)
            self._callers[name] = caller
        except Exception as error:
            caller.tell(error)

    def _abort(self, name: str) -> None:
        news = self.llm.abort(name)
        if caller := self._callers.pop(name, None):
            caller.tell(*news, None)

    def _forget(self, name: str, caller: _Caller) -> None:
        """The caller has gone. If its request still runs, nobody wants it."""
        if self._callers.get(name) is caller:
            self.llm.abort(name)
            del self._callers[name]

    def _fail(self, error: BaseException) -> None:
        for name, caller in self._callers.items():
            self.llm.abort(name)
            caller.tell(error)
        self._callers.clear()
