"""A runner that fails: running requests continue with the same text, others get an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.config.limits import ServeLimits, WindowSpace
from jspec.errors import EngineClosedError, RequestFailedError, RunnerError
from jspec.messages.plan import StepPlan
from jspec.messages.request import FinishKind, Request, SamplingParams, StreamChunk
from jspec.scheduler.scheduler import Scheduler
from jspec.serving.loop import EngineLoop
from jspec.serving.recovery import Recovery, RestartLimits
from jspec.serving.streams.chunk_stream import ChunkStream
from tests.support.failing_runner import FailingRunner
from tests.support.fake_runner import hash_token, small_limits
from tests.support.fake_text import FakeTextStream, expected_output

AT_ONCE = RestartLimits(first_pause=0.0)
LONG = 60


def make_request(name: str, *, max_new_tokens: int = LONG, prompt_len: int = 9) -> Request:
    return Request(
        request_id=name,
        prompt_ids=(1,) * prompt_len,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        seed=int.from_bytes(name.encode(), "little"),
    )


def loop_of(limits: ServeLimits, runner: FailingRunner, **options: Any) -> EngineLoop:
    scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)
    return EngineLoop(scheduler, runner, **{"restarts": AT_ONCE, **options})


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, timeout=120))


def works(loop: EngineLoop) -> bool:
    return not (loop.is_restarting or loop.is_closed)


async def read(stream: ChunkStream) -> list[StreamChunk]:
    return [chunk async for chunk in stream]


def check_output(request: Request, chunks: list[StreamChunk]) -> None:
    expected = expected_output(request, hash_token, max_new_tokens=request.sampling.wanted_tokens)
    assert tuple(token_id for chunk in chunks for token_id in chunk.new_ids) == expected.ids
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [expected.finish]


def at_steps(*steps: int) -> Callable[[StepPlan], bool]:
    """Fail at those steps, each once: step numbers are not used again."""
    return lambda plan: plan.step in steps


@settings(max_examples=10)
@given(
    steps=st.sets(st.integers(1, 30), max_size=1),
    dispatches=st.booleans(),
    depth=st.integers(0, 2),
    prefix_cache=st.booleans(),
    windows=st.sampled_from([(), (WindowSpace(8, 40),)]),
    rounds=st.integers(1, 2),
)
def test_text_is_the_same_whenever_the_runner_fails(
    steps: set[int],
    depth: int,
    rounds: int,
    windows: tuple[WindowSpace, ...],
    *,
    dispatches: bool,
    prefix_cache: bool,
) -> None:
    async def main() -> None:
        limits = small_limits(
            overlap_depth=depth,
            prefix_cache=prefix_cache,
            num_rounds=rounds,
            num_pages=40,
            windows=windows,
        )
        runner = FailingRunner(
            limits,
            fails_at_dispatch=at_steps(*steps if dispatches else ()),
            fails_at_collect=at_steps(*() if dispatches else steps),
        )
        loop = loop_of(limits, runner)
        requests = [make_request(name, prompt_len=5 + 7 * i) for i, name in enumerate("abcdef")]
        read_all = await asyncio.gather(*(read(loop.submit([each])[0]) for each in requests))
        for request, chunks in zip(requests, read_all, strict=True):
            check_output(request, chunks)
        while (stats := loop.stats).num_steps_in_flight:
            await asyncio.sleep(0)
        assert stats.num_restarts == runner.num_restarts
        assert runner.num_restarts == len(steps & {plan.step for plan in runner.plans})
        assert stats.num_free_pages == stats.num_pages
        assert stats.num_leaked_pages == 0
        assert stats.num_finished == len(requests)
        await loop.close()

    run(main())


def test_a_request_that_ran_in_two_failures_ends_and_others_go_on() -> None:
    async def main() -> None:
        limits = small_limits(num_slots=4)
        runner = FailingRunner(
            limits,
            fails_at_collect=lambda plan: any(
                admission.request.request_id == "poison" for admission in plan.admissions
            ),
        )
        loop = loop_of(limits, runner)
        poison = loop.submit([make_request("poison")])[0]
        with pytest.raises(RequestFailedError, match=r"'poison' ran each of 2 times.*failed at"):
            await read(poison)
        later = make_request("later")
        check_output(later, await read(loop.submit([later])[0]))
        assert not loop.is_closed
        assert loop.stats.num_restarts == runner.num_restarts == 2
        await loop.close()

    run(main())


def test_who_was_not_in_a_step_is_not_blamed() -> None:
    async def main() -> None:
        limits = small_limits(num_slots=1)
        runner = FailingRunner(limits, fails_at_collect=at_steps(3, 6))
        loop = loop_of(limits, runner)
        first, waiting = make_request("first"), make_request("waiting")
        streams = [loop.submit([first])[0], loop.submit([waiting])[0]]
        with pytest.raises(RequestFailedError, match="'first'"):
            await read(streams[0])
        check_output(waiting, await read(streams[1]))
        await loop.close()

    run(main())


def test_streams_can_be_left_and_requests_come_while_it_is_begun_anew() -> None:
    async def main() -> None:
        limits = small_limits(num_slots=2)
        runner = FailingRunner(limits, fails_at_collect=at_steps(3), num_bad_restarts=2)
        loop = loop_of(limits, runner, restarts=RestartLimits(first_pause=0.05))
        stays, leaves = make_request("stays"), make_request("leaves")
        reading = asyncio.ensure_future(read(loop.submit([stays])[0]))
        leaving = loop.submit([leaves])[0]
        while not loop.is_restarting:
            await asyncio.sleep(0)
        assert not loop.is_closed
        await leaving.aclose()
        later = make_request("later")
        chunks = await read(loop.submit([later])[0])
        check_output(later, chunks)
        check_output(stays, await reading)
        assert works(loop)
        assert (runner.num_restarts, loop.stats.num_aborted) == (1, 1)
        await loop.close()

    run(main())


def test_a_loss_is_noticed_while_nothing_runs() -> None:
    async def main() -> None:
        limits = small_limits(prefix_cache=True)
        runner = FailingRunner(limits)
        loop = loop_of(limits, runner)
        request = make_request("a")
        check_output(request, await read(loop.submit([request])[0]))
        assert loop.stats.num_cached_pages > 0
        loop.runner_ended("the process was killed")
        while not runner.num_restarts:
            await asyncio.sleep(0.001)
        assert loop.stats.num_cached_pages == 0
        again = make_request("a")
        check_output(again, await read(loop.submit([again])[0]))
        await loop.close()

    run(main())


def test_what_fails_always_ends_the_loop_after_so_many_restarts() -> None:
    async def main() -> None:
        limits = small_limits(num_slots=1)
        runner = FailingRunner(limits, fails_at_collect=lambda _: True)
        loop = loop_of(limits, runner, restarts=RestartLimits(most=3, first_pause=0.0))
        names = "abcde"
        streams = [loop.submit([make_request(name)])[0] for name in names]
        ends = [await asyncio.gather(read(each), return_exceptions=True) for each in streams]
        assert [type(end) for (end,) in ends] == [RequestFailedError] * 2 + [EngineClosedError] * 3
        assert "failed again after 3 restarts" in str(ends[-1][0])
        assert loop.is_closed
        assert runner.num_restarts == 3
        await loop.close()

    run(main())


def test_close_does_not_wait_for_a_pause() -> None:
    async def main() -> None:
        limits = small_limits()
        runner = FailingRunner(limits, fails_at_collect=at_steps(2), num_bad_restarts=100)
        loop = loop_of(limits, runner, restarts=RestartLimits(first_pause=1000, most_pause=1000))
        stream = loop.submit([make_request("a")])[0]
        while not loop.is_restarting:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(loop.close(), timeout=10)
        with pytest.raises(EngineClosedError, match="it was closed"):
            await read(stream)

    run(main())


def test_pauses_grow_and_are_forgotten_after_a_good_time() -> None:
    limits = RestartLimits(first_pause=1.0, most_pause=5.0)
    assert [limits.pause(i) for i in range(1, 7)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    now = 0.0
    recovery = Recovery(RestartLimits(most=2, first_pause=0.0), clock=lambda: now)
    num_restarts = 0

    async def restart() -> None:
        nonlocal num_restarts
        num_restarts += 1

    async def fail() -> None:
        await recovery.run(RunnerError("x"), restart, is_closing=lambda: False)

    async def main() -> None:
        nonlocal now
        for moment in (0.0, 10.0, 100.0, 110.0):  # the third comes after 90 good seconds
            now = moment
            await fail()
        assert num_restarts == 4
        with pytest.raises(RunnerError, match="failed again after 2 restarts: x"):
            await fail()

    run(main())


def test_attempts_that_take_long_to_fail_are_counted_too() -> None:
    now, num_attempts = 0.0, 0
    recovery = Recovery(RestartLimits(most=3, first_pause=0.0), clock=lambda: now)

    async def restart() -> None:
        nonlocal now, num_attempts
        num_attempts += 1
        now += 61.0
        raise RuntimeError("no memory")

    async def main() -> None:
        with pytest.raises(RunnerError, match="failed again after 3 restarts"):
            await recovery.run(RunnerError("x"), restart, is_closing=lambda: num_attempts > 9)

    run(main())
    assert num_attempts == 3


class BrokenText(FakeTextStream):
    """A text stream whose flush raises."""

    def watch(self) -> None:
        return None

    def flush(self) -> str:
        raise ValueError("no such bytes")


def test_who_is_aborted_ends_even_if_its_text_cannot() -> None:
    limits = small_limits(num_slots=4)
    bad, good = make_request("bad"), make_request("good")
    bad = replace(bad, sampling=replace(bad.sampling, stop=("@@",)))  # so the loop makes its text

    def stream_of(request: Request) -> FakeTextStream:
        return BrokenText(()) if request is bad else FakeTextStream.for_request(request)

    async def main() -> None:
        loop = EngineLoop(Scheduler(limits, make_stream=stream_of), FailingRunner(limits))
        streams = loop.submit([bad])[0], loop.submit([good])[0]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await asyncio.sleep(0)
        loop.abort("bad")
        (*_, last), chunks = await asyncio.gather(*reading)
        assert last.finish is not None
        assert last.finish.kind is FinishKind.ABORT
        assert str(last.finish.message).endswith("; its text could not be made (ValueError)")
        check_output(good, chunks)
        await loop.close()

    run(main())


def test_an_aborted_request_is_not_counted_as_failed() -> None:
    async def main() -> None:
        limits = small_limits(num_slots=1)
        runner = FailingRunner(limits, fails_at_collect=at_steps(4), step_seconds=0.001)
        loop = loop_of(limits, runner)
        stream = loop.submit([make_request("a")])[0]
        await anext(stream)
        loop.abort("a")
        last = (await read(stream))[-1]
        assert last.finish is not None
        assert last.finish.kind is FinishKind.ABORT
        other = make_request("b")
        check_output(other, await read(loop.submit([other])[0]))
        await loop.close()

    run(main())
