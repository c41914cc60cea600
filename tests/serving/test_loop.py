"""The loop: order of calls, streams that end in every way, one engine thread."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from jspec.config.limits import ServeLimits
from jspec.errors import (
    ConfigError,
    EngineClosedError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    RunnerError,
)
from jspec.messages.request import FinishKind, Request, SamplingParams, StreamChunk
from jspec.scheduler.scheduler import Scheduler
from jspec.serving.loop import EngineLoop
from jspec.serving.recovery import RestartLimits
from jspec.serving.streams.chunk_stream import ChunkStream
from jspec.serving.trace import TraceEvent, TraceKind
from tests.support.failing_runner import FailingRunner
from tests.support.fake_runner import FakeRunner, hash_token, small_limits
from tests.support.fake_text import FakeTextStream, expected_output, text_of

LONG = 100
STEP_SECONDS = 0.001


def make_request(name: str, *, max_new_tokens: int = 12, prompt_len: int = 5) -> Request:
    return Request(
        request_id=name,
        prompt_ids=(1,) * prompt_len,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        seed=int.from_bytes(name.encode(), "little"),
    )


def make_loop(
    limits: ServeLimits,
    runner: FakeRunner | None = None,
    trace: list[TraceEvent] | None = None,
    restarts: RestartLimits | None = None,
) -> EngineLoop:
    scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)
    return EngineLoop(scheduler, runner or FakeRunner(limits), trace=trace, restarts=restarts)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, timeout=120))


async def read(stream: ChunkStream) -> list[StreamChunk]:
    return [chunk async for chunk in stream]


async def until_idle(loop: EngineLoop) -> None:
    """Wait until no request runs or waits and no step is in flight; then all pages are free."""
    while (stats := loop.stats).num_running or stats.num_queued or stats.num_steps_in_flight:
        await asyncio.sleep(STEP_SECONDS)
    assert loop.stats.num_free_pages == loop.stats.num_pages


def check_output(request: Request, chunks: list[StreamChunk]) -> None:
    expected = expected_output(request, hash_token, max_new_tokens=request.sampling.wanted_tokens)
    assert tuple(token_id for chunk in chunks for token_id in chunk.new_ids) == expected.ids
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [expected.finish]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_many_requests_at_once(depth: int) -> None:
    async def main() -> None:
        loop = make_loop(small_limits(overlap_depth=depth, num_pages=40))
        requests = [make_request(f"r{i}", prompt_len=3 + 7 * i) for i in range(8)]
        streams = loop.submit(requests)
        outputs = await asyncio.gather(*(read(stream) for stream in streams))
        for request, chunks in zip(requests, outputs, strict=True):
            check_output(request, chunks)
        await until_idle(loop)
        await loop.close()

    run(main())


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_trace_shows_dispatch_ahead_of_collect(depth: int) -> None:
    trace: list[TraceEvent] = []

    async def main() -> None:
        loop = make_loop(small_limits(overlap_depth=depth), trace=trace)
        await read(loop.submit([make_request("a", max_new_tokens=60)])[0])
        await loop.close()

    run(main())
    order = [(event.kind, event.step) for event in trace]
    last = max(step for _, step in order)
    assert last > 10
    for step in range(1, last - depth):
        ahead = order.index((TraceKind.DISPATCH, step + depth))
        assert ahead < order.index((TraceKind.COLLECT, step))
        after = order.index((TraceKind.DISPATCH, step + depth + 1))
        assert after > order.index((TraceKind.COLLECT, step))
    assert all(
        first.started <= first.ended <= second.started
        for first, second in itertools.pairwise(trace)
    )


def test_the_event_loop_goes_on_while_the_device_works() -> None:
    async def main() -> None:
        limits = small_limits()
        loop = make_loop(limits, FakeRunner(limits, step_seconds=0.05))
        stream = loop.submit([make_request("a", max_new_tokens=2)])[0]
        reader = asyncio.create_task(read(stream))
        num_ticks = 0
        while not reader.done():
            await asyncio.sleep(0.001)
            num_ticks += 1
        assert num_ticks >= 10
        await loop.close()

    run(main())


def test_idle_time_is_not_busy_time() -> None:
    async def main() -> None:
        limits = small_limits()
        loop = make_loop(limits, FakeRunner(limits, step_seconds=0.01))
        assert loop.busy_seconds == 0.0
        for name in ("a", "b"):
            before = loop.busy_seconds
            await read(loop.submit([make_request(name)])[0])
            await until_idle(loop)
            await asyncio.sleep(0)  # the loop finds no work
            at_idle = loop.busy_seconds
            assert at_idle - before >= 0.02  # a prefill and a decode at the least
            await asyncio.sleep(0.05)
            assert loop.busy_seconds == at_idle
        await loop.close()
        at_end = loop.busy_seconds
        await asyncio.sleep(0.02)
        assert loop.busy_seconds == at_end

    run(main())


def test_refusals_are_raised_by_submit_itself() -> None:
    async def main() -> None:
        limits = small_limits(num_slots=1, max_queued_requests=1)
        loop = make_loop(limits)
        stream = loop.submit([make_request("a")])[0]
        with pytest.raises(QueueFullError, match="requests: 1 waiting, 1 new"):
            loop.submit([make_request("b")])
        with pytest.raises(RequestError, match="0 tokens"):
            loop.submit([make_request("c", prompt_len=0)])
        assert loop.request_ids == ("a",)
        await read(stream)
        await loop.close()

    run(main())


def test_abort_gives_a_last_chunk() -> None:
    async def main() -> None:
        loop = make_loop(small_limits())
        stream = loop.submit([make_request("a", max_new_tokens=LONG)])[0]
        first = await anext(stream)
        assert loop.abort("a") is True
        chunks = [first, *await read(stream)]
        assert chunks[-1].finish is not None
        assert chunks[-1].finish.kind is FinishKind.ABORT
        ids = tuple(token_id for chunk in chunks for token_id in chunk.new_ids)
        assert "".join(chunk.text for chunk in chunks) == text_of(ids)
        assert len(ids) < LONG
        assert loop.abort("a") is False
        await until_idle(loop)
        await loop.close()

    run(main())


def test_a_consumer_that_closes_its_stream_aborts() -> None:
    async def main() -> None:
        loop = make_loop(small_limits())
        stream = loop.submit([make_request("a", max_new_tokens=LONG)])[0]
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        assert await read(stream) == []
        assert loop.request_ids == ()
        await until_idle(loop)
        assert loop.stats.num_aborted == 1
        await loop.close()

    run(main())


def test_a_cancelled_consumer_aborts() -> None:
    async def main() -> None:
        limits = small_limits()
        loop = make_loop(limits, FakeRunner(limits, step_seconds=0.01))
        stream = loop.submit([make_request("a", max_new_tokens=LONG)])[
            0
        ]  # kept: no finaliser helps
        task = asyncio.create_task(read(stream))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(loop)
        assert loop.stats.num_aborted == 1
        assert await read(stream) == []
        await loop.close()

    run(main())


def test_a_stream_that_is_dropped_aborts_even_if_it_was_never_read() -> None:
    async def main() -> None:
        loop = make_loop(small_limits())
        loop.submit([make_request("never read", max_new_tokens=LONG)])
        async for _ in loop.submit([make_request("read once", max_new_tokens=LONG)])[0]:
            break
        gc.collect()
        await until_idle(loop)
        assert loop.stats.num_aborted == 2
        await loop.close()

    run(main())


def test_dropping_an_old_stream_spares_a_later_request_of_the_same_id() -> None:
    async def main() -> None:
        loop = make_loop(small_limits())
        old = loop.submit([make_request("a")])[0]
        await until_idle(loop)
        request = make_request("a", max_new_tokens=LONG)
        new = loop.submit([request])[0]
        del old
        gc.collect()
        check_output(request, await read(new))
        await loop.close()

    run(main())


def test_a_failing_runner_ends_every_stream_and_closes_the_loop() -> None:
    async def main() -> None:
        limits = small_limits(num_slots=1)
        runner = FailingRunner(limits, fails_at_collect=lambda plan: plan.step == 4)
        loop = make_loop(limits, runner, restarts=RestartLimits(most=0))
        streams = [loop.submit([make_request(name, max_new_tokens=LONG)])[0] for name in "ab"]
        for name, stream in zip("ab", streams, strict=True):
            with pytest.raises(EngineClosedError, match=f"'{name}'.*failed at step 4") as error:
                await read(stream)
            assert isinstance(error.value.__cause__, RunnerError)
        assert loop.is_closed
        with pytest.raises(EngineClosedError, match="failed at step 4"):
            loop.submit([make_request("c")])
        await loop.close()

    run(main())


def test_close_ends_the_streams_and_waits_for_the_steps_in_flight() -> None:
    async def main() -> None:
        limits = small_limits(overlap_depth=2)
        runner = FakeRunner(limits, step_seconds=STEP_SECONDS)
        loop = make_loop(limits, runner)
        stream = loop.submit([make_request("a", max_new_tokens=LONG)])[0]
        await anext(stream)
        await loop.close()
        with pytest.raises(EngineClosedError, match="'a' was not finished: it was closed"):
            await read(stream)
        assert runner.num_in_flight == 0
        assert loop.stats.num_free_pages == loop.stats.num_pages
        with pytest.raises(EngineClosedError, match="'b' came after"):
            loop.submit([make_request("b")])
        await loop.close()

    run(main())


def test_a_runner_of_other_limits_is_refused() -> None:
    scheduler = Scheduler(small_limits(num_slots=2), make_stream=FakeTextStream.for_request)
    with pytest.raises(ConfigError, match="num_slots=2"):
        EngineLoop(scheduler, FakeRunner(small_limits(num_slots=4)))


def test_what_nobody_reads_ends_and_others_do_not_notice(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = make_loop(small_limits(context_length=256, num_pages=200))
        request = make_request("other", max_new_tokens=LONG)
        left, other = (
            make_request("left", max_new_tokens=LONG),
            loop.submit([request], max_unread=5)[0],
        )
        unread = loop.submit([left], max_unread=5)[0]
        check_output(request, await read(other))  # who reads is never ended
        while "left" in loop.request_ids:
            await asyncio.sleep(STEP_SECONDS)
        assert loop.stats.num_slow_readers == loop.stats.num_aborted == 1
        await until_idle(loop)
        chunks = await read(unread)
        assert len(chunks) == 5 + 2  # one too many, and the end
        assert chunks[-1].finish is not None
        assert chunks[-1].finish.kind is FinishKind.ABORT
        ids = tuple(token_id for chunk in chunks for token_id in chunk.new_ids)
        assert ids == tuple(hash_token(left, 5 + i) for i in range(len(ids)))
        assert "".join(chunk.text for chunk in chunks) == text_of(ids)
        await loop.close()

    run(main())
    assert "request left was aborted: its reader left too much unread" in caplog.text


def test_who_waits_too_long_is_told_so_and_who_runs_goes_on() -> None:
    """One slot; the second never gets it in time, the third comes later under the same name."""

    async def main() -> None:
        limits = small_limits(num_slots=1, num_pages=200, context_length=400)
        scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)
        runner = FakeRunner(limits, step_seconds=STEP_SECONDS)
        loop = EngineLoop(scheduler, runner, queue_time_limit=0.02)
        first = make_request("a", max_new_tokens=300)
        running = loop.submit([first])[0]
        (waiting,) = loop.submit([make_request("b")])
        with pytest.raises(
            QueueTimeoutError, match=r"'b' waited for queue_time_limit, 0.02 s"
        ) as e:
            await read(waiting)
        assert e.value.retry_after_seconds == 0.02
        check_output(first, await read(running))
        again = make_request("b")
        check_output(again, await read(loop.submit([again])[0]))
        await until_idle(loop)
        assert loop.request_ids == ()
        await loop.close()

    run(main())


def test_a_call_waits_as_one() -> None:
    """Once one of its sequences runs, the others have no limit. A call of which none ran ends as a
    whole. There is one slot.
    """

    async def main() -> None:
        limits = small_limits(num_slots=1, num_pages=200, context_length=400)
        scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)
        loop = EngineLoop(
            scheduler, FakeRunner(limits, step_seconds=STEP_SECONDS), queue_time_limit=0.02
        )
        running = [make_request(f"a-{i}", max_new_tokens=100) for i in range(3)]
        waiting = [make_request(f"b-{i}") for i in range(3)]
        reads = [read(stream) for stream in loop.submit(running)]
        late = [read(stream) for stream in loop.submit(waiting)]
        found = await asyncio.gather(*reads, *late, return_exceptions=True)
        for request, chunks in zip(running, found[:3], strict=True):
            assert not isinstance(chunks, BaseException)
            check_output(request, chunks)
        assert [type(error) for error in found[3:]] == [QueueTimeoutError] * 3
        await until_idle(loop)
        assert loop.request_ids == ()
        await loop.close()

    run(main())
