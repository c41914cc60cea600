"""Requests before the engine's loop has them: aborts, and a full queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from jspec.engine.programs.program_growth import BuildError
from jspec.engine.programs.program_keys import describe_ready
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import QueueFullError, RequestError
from jspec.messages.request import FinishKind, Request, SamplingParams
from jspec.scheduler.scheduler import ABORTED
from jspec.serving.live_weights import LiveWeights
from jspec.serving.loop import EngineLoop
from jspec.serving.loop_thread import LoopThread
from jspec.serving.submission import Preparation, Submission
from tests.support.fake_runner import small_limits

from .test_loop import LONG, make_loop, make_request, read, run


class SlowPreparation(Preparation):
    """Prepares requests once `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def check(self, sampling: SamplingParams) -> None:
        del sampling

    async def run(self, requests: Sequence[Request]) -> Sequence[Request]:
        await self.may_end.wait()
        return requests


def with_loop(
    body: Callable[[Submission, EngineLoop, SlowPreparation], Awaitable[None]], **limits: Any
) -> None:
    """Run `body` on the loop's own thread, with nothing running."""
    thread = LoopThread()

    async def on_the_loop() -> None:
        loop, preparation = make_loop(small_limits(**limits)), SlowPreparation()
        weights = LiveWeights(thread, loop, cast(Any, None))
        await body(Submission(thread, loop, preparation, weights), loop, preparation)
        await loop.close()

    async def main() -> None:
        await thread.call(on_the_loop())

    run(main())
    thread.stop()


@pytest.mark.parametrize(
    ("name", "count", "aborted"),
    [("a", 1, "a"), ("c", 1, "c"), ("d", 0, ""), (None, 3, "abc")],
)
def test_an_abort_finds_requests_that_run_and_those_being_prepared(
    name: str | None, count: int, aborted: str
) -> None:
    """While "a" and "b" are prepared and "c" runs. One being prepared ends once it is queued."""

    async def body(submission: Submission, loop: EngineLoop, preparation: SlowPreparation) -> None:
        (running,) = loop.submit([make_request("c")])
        requests = [make_request("a"), make_request("b")]
        submitting = asyncio.create_task(submission.submit(requests))
        await asyncio.sleep(0)
        if name is None:
            assert await submission.abort_all() == count
        else:
            assert await submission.abort(name) == count
        assert set(loop.request_ids) == {"c"} - {*aborted}
        preparation.may_end.set()
        streams = dict(zip("abc", (*await submitting, running), strict=True))
        for each, stream in streams.items():
            finish = (await read(stream))[-1].finish
            assert finish is not None
            assert (finish.kind is FinishKind.ABORT) == (each in aborted)
            assert finish.message == (ABORTED if each in aborted else None)

    with_loop(body)


def test_nothing_is_kept_of_what_was_refused() -> None:
    async def body(submission: Submission, _: EngineLoop, preparation: SlowPreparation) -> None:
        submitting = asyncio.create_task(submission.submit([make_request("a")] * 2))
        await asyncio.sleep(0)
        assert await submission.abort("a")
        preparation.may_end.set()
        with pytest.raises(RequestError, match="request_id is 'a'"):
            await submitting
        assert not await submission.abort("a")

    with_loop(body)


def test_those_that_wait_for_space_get_it_in_order_and_others_are_refused() -> None:
    async def body(submission: Submission, loop: EngineLoop, preparation: SlowPreparation) -> None:
        preparation.may_end.set()
        (running,) = loop.submit([make_request("running", max_new_tokens=LONG)])
        await anext(running)
        loop.pause()  # so that it cannot end by itself
        (queued,) = await submission.submit([make_request("queued")])
        waiting = [
            asyncio.create_task(submission.submit([make_request(name)], wait=True))
            for name in "abc"
        ]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFullError, match="requests: 1 waiting, 1 new"):
            await submission.submit([make_request("d")])
        assert await submission.abort("b")  # while it waits
        await running.aclose()
        loop.resume()
        await read(queued)
        kinds = []
        for each in waiting:
            (stream,) = await each
            finish = (await read(stream))[-1].finish
            kinds.append(finish and finish.kind)
        assert kinds == [FinishKind.LENGTH, FinishKind.ABORT, FinishKind.LENGTH]

    with_loop(body, num_slots=1, max_queued_requests=1, num_pages=200, context_length=256)


class SlowRunner:
    """Has no program for a grammar until `may_end` is set; then it has, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.limits = small_limits()
        self.ready_programs: tuple[ProgramKey, ...] = ()
        self.may_end, self._error = threading.Event(), error

    def ensure(self, keys: tuple[ProgramKey, ...]) -> None:
        self.may_end.wait(30)
        if self._error is not None:
            raise self._error
        self.ready_programs = keys


@pytest.mark.parametrize("error", [None, BuildError("no")])
def test_programs_that_a_request_waits_for_are_told_and_do_not_stop_others(
    error: BuildError | None,
) -> None:
    runner = SlowRunner(error)
    preparation = Preparation(cast(Any, None), cast(Any, runner))

    def lines() -> tuple[str, ...]:
        return describe_ready(runner.limits, runner.ready_programs, building=preparation.building)[
            1:
        ]

    asks = replace(make_request("a"), sampling=SamplingParams(return_draft_trees=True))
    later = "compiled at the first request for them"

    async def main() -> None:
        assert lines() == (f"grammars and draft trees: {later}", f"hidden states: {later}")
        waits = asyncio.create_task(preparation.run([asks]))
        while not preparation.building:
            await asyncio.sleep(0.001)
        now = "being compiled; requests for them wait, others go on"
        assert lines() == (f"grammars and draft trees: {now}", f"hidden states: {later}")
        assert await preparation.run([make_request("b")])  # at once
        assert not waits.done()
        runner.may_end.set()
        if error is None:
            await waits
        else:
            with pytest.raises(BuildError):
                await waits
        when = later if error else "compiled"
        assert lines() == (f"grammars and draft trees: {when}", f"hidden states: {later}")

    run(main())
