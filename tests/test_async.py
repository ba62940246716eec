"""AsyncLLM: everyone gets an answer, whoever leaves, whatever breaks, and nothing leaks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from tiny import TINY, tiny_llm

from minillm import AsyncLLM, SamplingParams
from minillm.async_engine import EngineDeadError
from minillm.errors import RequestError

ENDLESS = replace(TINY, eos_token_ids=(), max_position_embeddings=4096)


def params(count: int = 6, **more: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, "temperature": 0.0} | more)


async def collect(stream) -> tuple[list[int], str | None]:
    tokens, reason = [], None
    async for delta in stream:
        tokens += delta.token_ids
        reason = delta.finish_reason or reason
    return tokens, reason


def in_engine(engine: AsyncLLM) -> int:
    return len(engine.llm.pool.blocks) - engine.llm.pool.num_free


async def settled(engine: AsyncLLM) -> None:
    """Until the engine's thread has done what it was sent, or half a minute has passed."""
    end = time.perf_counter() + 30.0
    while (in_engine(engine) or engine._callers) and time.perf_counter() < end:
        await asyncio.sleep(0.002)


def test_many_at_once_equal_generate() -> None:
    prompts = [[5, 6, 7], [9] * 20, list(range(1, 40)), [3]]
    expected = [o.outputs[0].token_ids for o in tiny_llm(ENDLESS, num_kv_blocks=64).generate(prompts, params())]

    async def main() -> None:
        async with AsyncLLM(tiny_llm(ENDLESS, num_kv_blocks=64)) as engine:
            got = await asyncio.gather(*(collect(engine.generate(p, params())) for p in prompts))
            assert got == [(tokens, "length") for tokens in expected]
            assert (await engine.stats())["num_running"] == 0

    asyncio.run(main())


def test_n_completions() -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm(ENDLESS, num_kv_blocks=64)) as engine:
            seen: dict[int, int] = {}
            async for delta in engine.generate([1, 2, 3], params(5, n=3, temperature=1.0)):
                seen[delta.index] = seen.get(delta.index, 0) + len(delta.token_ids)
            assert seen == {0: 5, 1: 5, 2: 5}

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancel", "leave", "abort"])
def test_who_leaves_frees_the_blocks_within_two_steps(how) -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm(ENDLESS, num_kv_blocks=300)) as engine:
            send, waited = engine._send, []

            def counted(work) -> None:
                """How many steps begin between a message and the moment when it is read."""
                box: list[int] = []
                send(lambda: (waited.append(engine.llm.scheduler.num_steps - box[0]) if box else None, work()))
                box.append(engine.llm.scheduler.num_steps)

            engine._send = counted  # type: ignore[method-assign]
            other = asyncio.create_task(collect(engine.generate([8, 8], params(40))))
            stream = engine.generate([1, 2, 3], params(2000), request_id="x")
            count = 0
            if how == "abort":
                async for news in stream:
                    count, delta = count + 1, news
                    if count == 3:
                        await engine.abort("x")
                assert delta.finish_reason == "abort" and count < 100
            elif how == "leave":
                async for _ in stream:
                    break
                await stream.aclose()
            else:
                task = asyncio.create_task(collect(stream))
                while "x" not in engine._callers:
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert len((await other)[0]) == 40
            await settled(engine)
            assert max(waited, default=0) <= 2
            assert in_engine(engine) == 0 and not engine.llm.requests

    asyncio.run(main())


def test_bad_input_and_the_same_id_twice() -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm(ENDLESS, num_kv_blocks=300)) as engine:
            with pytest.raises(RequestError, match="empty"):
                await collect(engine.generate([], params()))
            with pytest.raises(RequestError, match="SamplingParams"):
                await collect(engine.generate([1], "greedy"))  # type: ignore[arg-type]
            first = asyncio.create_task(collect(engine.generate([1], params(60), request_id="a")))
            await asyncio.sleep(0)  # its message is sent now
            with pytest.raises(RequestError, match="running already"):
                await collect(engine.generate([2], params(), request_id="a"))
            assert len((await first)[0]) == 60
            await engine.abort("unknown")
            assert len((await collect(engine.generate([2], params())))[0]) == 6

    asyncio.run(main())


def test_an_error_in_a_step_reaches_everyone_and_the_engine_goes_on() -> None:
    async def main() -> None:
        llm = tiny_llm(ENDLESS, num_kv_blocks=300)
        run, calls = llm.runner.run, 0

        def breaks(plan):
            nonlocal calls
            calls += 1
            if calls == 5:
                raise ValueError("the device is gone")
            return run(plan)

        llm.runner.run = breaks  # type: ignore[method-assign]
        async with AsyncLLM(llm) as engine:
            tasks = [collect(engine.generate([i, i], params(50))) for i in range(1, 6)]
            got = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(g, ValueError) for g in got) >= 1
            assert all(isinstance(g, ValueError) or len(g[0]) == 50 for g in got)
            assert len((await collect(engine.generate([2], params())))[0]) == 6
            await settled(engine)
            assert in_engine(engine) == 0

    asyncio.run(main())


def test_one_bad_request_does_not_harm_the_others() -> None:
    async def main() -> None:
        llm = tiny_llm(ENDLESS, num_kv_blocks=300)
        run = llm.runner.run

        def poisoned(plan):
            hidden, row = run(plan).clone(), 0
            for chunk in plan.chunks:
                if chunk.request.id == "bad":
                    hidden[row : row + chunk.num_logits] = float("nan")
                row += chunk.num_logits
            return hidden

        llm.runner.run = poisoned  # type: ignore[method-assign]
        async with AsyncLLM(llm) as engine:
            good = asyncio.create_task(collect(engine.generate([4, 5], params(30))))
            with pytest.raises(RequestError, match="not finite"):
                await collect(engine.generate([6, 7], params(30), request_id="bad"))
            assert len((await good)[0]) == 30

    asyncio.run(main())


def test_a_dead_thread_leaves_nobody_waiting() -> None:
    class Fatal(BaseException):
        pass

    async def main() -> None:
        llm = tiny_llm(ENDLESS, num_kv_blocks=300)

        def dies(plan):
            raise Fatal

        llm.runner.run = dies  # type: ignore[method-assign]
        engine = AsyncLLM(llm)
        tasks = [asyncio.create_task(collect(engine.generate([i], params(50)))) for i in range(1, 4)]
        done, waiting = await asyncio.wait(tasks, timeout=60.0)
        assert not waiting and all(task.exception() is not None for task in done)
        with pytest.raises(EngineDeadError):
            await collect(engine.generate([1], params()))
        with pytest.raises(EngineDeadError):
            await engine.stats()
        await engine.close()

    asyncio.run(main())


def test_closing_tells_those_who_wait() -> None:
    async def main() -> None:
        engine = AsyncLLM(tiny_llm(ENDLESS, num_kv_blocks=300))
        task = asyncio.create_task(collect(engine.generate([1], params(3000))))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await task

    asyncio.run(main())


def test_timeout_while_running_and_while_waiting_for_a_seat() -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm(ENDLESS, num_kv_blocks=300), max_pending=1) as engine:
            first = asyncio.create_task(collect(engine.generate([1], params(4000), timeout=1.0)))
            await asyncio.sleep(0)
            assert await collect(engine.generate([2], params(), timeout=0.05)) == ([], "timeout")
            tokens, reason = await first
            assert reason == "timeout" and 0 < len(tokens) < 4000
            await settled(engine)
            assert in_engine(engine) == 0

    asyncio.run(main())


def test_stats_for_a_loop_that_is_closed_harm_nobody() -> None:
    engine = AsyncLLM(tiny_llm(ENDLESS))
    engine._send(lambda: time.sleep(0.3))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(engine.stats(), 0.05))
    time.sleep(0.5)
    assert engine.dead is None
    asyncio.run(engine.close())


@pytest.mark.parametrize("timeout", [0, -1.0, "5", True])
def test_a_timeout_that_is_none_is_refused(timeout) -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm(ENDLESS)) as engine:
            with pytest.raises(RequestError, match="timeout must be"):
                await collect(engine.generate([1], params(), timeout=timeout))
            assert await collect(engine.generate([1], params(), request_id="async-1"))
            assert (await collect(engine.generate([1], params())))[1] == "length"

    asyncio.run(main())


def test_max_pending_holds_callers_back() -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm(ENDLESS, num_kv_blocks=300), max_pending=2) as engine:
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, len(engine._callers))
                    await asyncio.sleep(0)

            watcher = asyncio.create_task(watch())
            got = await asyncio.gather(*(collect(engine.generate([i], params(10))) for i in range(1, 9)))
            watcher.cancel()
            assert [len(tokens) for tokens, _ in got] == [10] * 8 and most <= 2
            with pytest.raises(RequestError, match="max_pending"):
                AsyncLLM(engine.llm, max_pending=0)

    asyncio.run(main())


@pytest.mark.parametrize("name", [["job", 7], {"id": 1}, 7, b"x"])
def test_an_id_that_is_no_text_harms_only_its_caller(name: object) -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_llm(ENDLESS, num_kv_blocks=64)) as engine:
            good = asyncio.create_task(collect(engine.generate([4, 5], params(30))))
            with pytest.raises(RequestError, match="request_id must be a string"):
                await collect(engine.generate([1, 2], params(), request_id=name))
            with pytest.raises(RequestError, match="request_id must be a string"):
                await engine.abort(name)
            assert len((await good)[0]) == 30 and engine.dead is None

    asyncio.run(main())
    with pytest.raises(RequestError, match="request_id must be a string"):
        tiny_llm(ENDLESS).add_request([1], params(), request_id=name)


def test_an_engine_serves_one_event_loop_after_another() -> None:
    """A semaphore belongs to the loop in which somebody first waited for it."""

    async def three() -> None:
        got = await asyncio.gather(*(collect(engine.generate([i], params())) for i in (1, 2, 3)))
        assert [len(tokens) for tokens, _ in got] == [6, 6, 6]

    engine = AsyncLLM(tiny_llm(ENDLESS, num_kv_blocks=64), max_pending=1)
    asyncio.run(three())
    asyncio.run(three())
    asyncio.run(engine.close())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_every_completion_has_an_end(how: str, begun: bool) -> None:
    """Also those of a prompt that was not computed yet: they were never split off."""

    async def main() -> None:
        llm = tiny_llm(ENDLESS, num_kv_blocks=300, max_num_batched_tokens=4)
        async with AsyncLLM(llm) as engine:
            length, ends = (2 if begun else 3000), []
            timeout = 0.3 if how == "timeout" else None
            stream = engine.generate([5] * length, params(4000 - length, n=3), request_id="x", timeout=timeout)
            if how == "abort":
                asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(engine.abort("x")))
            async for delta in stream:
                ends += [(delta.index, delta.finish_reason)] if delta.finish_reason else []
            assert sorted(ends) == [(i, how) for i in range(3)]
            await settled(engine)
            assert in_engine(engine) == 0 and not llm.requests

    asyncio.run(main())
