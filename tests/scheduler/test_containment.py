"""A broken invariant costs at most one request: others go on with the same text.

The fake runner refuses any wrong plan after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.errors import (
    EngineClosedError,
    InvariantError,
    RequestFailedError,
    SequenceError,
)
from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.request import Request, StreamChunk
from jspec.scheduler.pages.cache_spaces import CacheSpaces
from jspec.scheduler.scheduler import Scheduler
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.scheduler.stats import SchedulerStats
from jspec.serving.loop import EngineLoop
from tests.scheduler.test_window_sharing import with_windows
from tests.serving.test_recovery import check_output, loop_of, make_request, read, run
from tests.support.failing_runner import FailingRunner
from tests.support.fake_runner import FakeRunner, Handle, small_limits
from tests.support.fake_text import FakeTextStream
from tests.support.flat_limits import with_limits

LIMITS = with_windows(small_limits(num_pages=40, prefix_cache=True, overlap_depth=2), 8, spare=20)

# The calls that change a row's state: a plan, a result, its end.
PLACES = [
    (CacheSpaces, "admit"),
    (CacheSpaces, "grow"),
    (CacheSpaces, "publish"),
    (CacheSpaces, "trim"),
    (CacheSpaces, "keep"),
    (CacheSpaces, "release"),
    (CacheSpaces, "_trim"),
    (Sequence, "absorb"),
]


def breaks(
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[type, str],
    *,
    when: Callable[[str, int], bool],
    error: Exception,
    is_late: bool = False,
) -> None:
    """Make calls raise for which when(request id, number of the call for it) is true.

    is_late: raise after the call's work, so that the state has changed.
    """
    kind, name = place
    real: Callable[..., Any] = getattr(kind, name)
    counts: dict[str, int] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        whose = args[0] if isinstance(args[0], Tenancy) else self
        sequence = whose.sequence if isinstance(whose, Tenancy) else whose
        request_id = sequence.request.request_id
        counts[request_id] = counts.get(request_id, 0) + 1
        fails = when(request_id, counts[request_id])
        found = real(self, *args, **kwargs) if is_late or not fails else None
        if fails:
            raise error
        return found

    monkeypatch.setattr(kind, name, call)


async def outcomes(
    loop: EngineLoop, requests: list[Request]
) -> dict[str, list[StreamChunk] | BaseException]:
    """Return the chunks of each request, or its error."""
    streams = [read(loop.submit([request])[0]) for request in requests]
    found = await asyncio.gather(*streams, return_exceptions=True)
    return {each.request_id: got for each, got in zip(requests, found, strict=True)}


async def check_idle(loop: EngineLoop) -> SchedulerStats:
    """Check that no page or slot is in use, and that the engine serves a request."""
    after = make_request("after")
    check_output(after, await read(loop.submit([after])[0]))
    while (stats := loop.stats).num_steps_in_flight:
        await asyncio.sleep(0)
    assert (stats.num_leaked_pages, stats.num_free_pages) == (0, stats.num_pages)
    sizes = tuple(space.num_pages for space in LIMITS.pool.windows)
    assert stats.num_free_window_pages == sizes
    assert (stats.num_running, stats.num_queued) == (0, 0)
    await loop.close()
    return stats


REQUESTS = [make_request(name, prompt_len=5 + 7 * i) for i, name in enumerate("abcdef")]


@settings(max_examples=25)
@given(
    place=st.sampled_from(PLACES),
    name=st.sampled_from("abcdef"),
    call=st.integers(1, 5),
    depth=st.integers(0, 2),
    error=st.sampled_from([InvariantError("planted"), KeyError(7)]),
    is_late=st.booleans(),
)
def test_one_request_at_most_ends_and_the_others_have_the_same_text(
    place: tuple[type, str], name: str, call: int, depth: int, error: Exception, *, is_late: bool
) -> None:
    async def main() -> None:
        limits = with_limits(LIMITS, overlap_depth=depth)
        loop = loop_of(limits, FailingRunner(limits))
        found = await outcomes(loop, REQUESTS)
        for request in REQUESTS:
            got = found[request.request_id]
            if request.request_id == name and isinstance(got, RequestFailedError):
                assert "planted" in str(got) or "KeyError: 7" in str(got)
                assert loop.stats.num_faults == 1
            elif request.request_id == name and place == (Sequence, "absorb"):
                pass  # its last chunk says so
            else:
                assert isinstance(got, list), got
                check_output(request, got)
        stats = await check_idle(loop)
        assert stats.num_faults <= 1
        assert stats.num_restarts == 0

    with pytest.MonkeyPatch.context() as monkeypatch:
        breaks(
            monkeypatch,
            place,
            when=lambda request_id, number: (request_id, number) == (name, call),
            error=error,
            is_late=is_late,
        )
        run(main())


@pytest.mark.parametrize("place", PLACES[:5])
def test_a_request_whose_every_call_fails_ends(
    monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    error = InvariantError("planted")
    breaks(monkeypatch, place, when=lambda name, _: name == "c", error=error)

    async def main() -> None:
        loop = loop_of(LIMITS, FailingRunner(LIMITS))
        found = await outcomes(loop, REQUESTS)
        failed = found.pop("c")
        if place[1] not in ("trim", "keep"):
            assert isinstance(failed, RequestFailedError)
            assert "request 'c' was ended by an internal error: request 'c': planted" in str(failed)
        for name, got in found.items():
            assert isinstance(got, list), got
            check_output(REQUESTS["abcdef".index(name)], got)
        await check_idle(loop)

    run(main())


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("num_lost", [12, 31, 40])
def test_pages_that_are_lost_are_found_again_and_nobody_ends(num_lost: int, depth: int) -> None:
    """Too few pages remain for one request: a row that runs alone lacks some, or none is
    admitted."""

    async def main() -> None:
        limits = with_limits(LIMITS, overlap_depth=depth)
        scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)
        loop = EngineLoop(scheduler, FakeRunner(limits))
        scheduler._ranks.all[0].pages.spaces[0].allocate(num_lost)
        assert loop.stats.num_leaked_pages == num_lost
        requests = [make_request(name, prompt_len=40, max_new_tokens=80) for name in "abc"]
        found = await outcomes(loop, requests)
        for request in requests:
            got = found[request.request_id]
            assert isinstance(got, list), got
            check_output(request, got)
        assert (await check_idle(loop)).num_faults == 1

    run(main())


def test_an_error_that_names_no_request_and_comes_again_ends_who_ran_and_then_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It must not become an endless loop."""

    def plan(_: Scheduler) -> StepPlan | None:
        raise InvariantError("planted")

    async def main() -> None:
        loop = loop_of(LIMITS, FailingRunner(LIMITS))
        with monkeypatch.context() as context:
            context.setattr(Scheduler, "plan", plan)
            found = await outcomes(loop, REQUESTS[:2])
            for got in found.values():
                assert isinstance(got, RequestFailedError | EngineClosedError), got
            while not loop.is_closed:
                await asyncio.sleep(0)
        await loop.close()

    run(main())


def test_a_result_that_cannot_be_begins_the_runner_anew() -> None:
    class Lying(FailingRunner):
        """Its third result is of another step."""

        def collect(self, dispatched: Handle) -> StepResult:
            result = super().collect(dispatched)
            return replace(result, step=99) if result.step == 3 else result

    async def main() -> None:
        runner = Lying(LIMITS)
        loop = loop_of(LIMITS, runner)
        found = await outcomes(loop, REQUESTS)
        for request in REQUESTS:
            got = found[request.request_id]
            assert isinstance(got, list), got
            check_output(request, got)
        stats = await check_idle(loop)
        assert (stats.num_restarts, runner.num_restarts, stats.num_faults) == (1, 1, 0)

    run(main())


def test_an_invariant_of_the_runner_begins_it_anew() -> None:
    class Strict(FailingRunner):
        def dispatch(self, plan: StepPlan) -> Handle:
            handle = super().dispatch(plan)
            if plan.step == 4:
                raise InvariantError("no program is ready")
            return handle

    async def main() -> None:
        loop = loop_of(LIMITS, Strict(LIMITS))
        found = await outcomes(loop, REQUESTS)
        for request in REQUESTS:
            got = found[request.request_id]
            assert isinstance(got, list), got
            check_output(request, got)
        assert (await check_idle(loop)).num_restarts == 1

    run(main())


def test_an_end_that_fails_ends_the_request_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, (CacheSpaces, "keep"), when=lambda name, _: name == "b", error=KeyError(3))

    async def main() -> None:
        loop = loop_of(LIMITS, FailingRunner(LIMITS))
        streams = {each.request_id: loop.submit([each])[0] for each in REQUESTS[:3]}
        await anext(streams["b"])
        assert not loop.abort("b")
        with pytest.raises(RequestFailedError, match="'b' was ended by an internal error"):
            await read(streams["b"])
        for request in (REQUESTS[0], REQUESTS[2]):
            check_output(request, await read(streams[request.request_id]))
        await check_idle(loop)

    run(main())


def test_an_error_says_whose_state_is_broken() -> None:
    error = SequenceError("a", SequenceError("b", KeyError(1)))
    assert (str(error), error.request_id) == ("request 'a': request 'b': KeyError: 1", "a")
