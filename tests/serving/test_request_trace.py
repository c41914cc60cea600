"""A first token's stages: every border once, in order, for streams that started."""

from __future__ import annotations

import asyncio
import json

from jspec.messages.plan import StepPlan
from jspec.scheduler.scheduler import Scheduler
from jspec.serving.loop import EngineLoop
from jspec.serving.recovery import RestartLimits
from jspec.serving.request_trace import Border, RequestTrace
from tests.support.failing_runner import FailingRunner
from tests.support.fake_runner import small_limits
from tests.support.fake_text import FakeTextStream

from .test_loop import make_loop, make_request, read

ENGINES_OWN = [
    *(Border.SUBMITTED, Border.PLANNED, Border.DISPATCHED, Border.ENQUEUED, Border.COLLECTED),
    Border.COMMITTED,
]
SERVERS = [border for border in Border if border not in ENGINES_OWN]


def test_the_loop_marks_its_borders_in_order() -> None:
    lines: list[str] = []
    trace = RequestTrace(lines.append)

    async def main() -> None:
        loop = make_loop(small_limits(chunk_size=4))
        loop.trace_requests(trace)
        requests = [make_request(name, prompt_len=length) for name, length in (("a", 11), ("b", 3))]
        for request in requests:
            trace.begin(request.request_id)
        await asyncio.gather(*(read(loop.submit([request])[0]) for request in requests))
        await read(loop.submit([make_request("untraced")])[0])
        await loop.close()

    asyncio.run(main())
    for border in SERVERS:
        trace.mark(("a", "b"), border, 0.0)
    trace.end("a")
    trace.end("b")
    assert [json.loads(line)["request_id"] for line in lines] == ["a", "b"]
    for line in lines:
        marks = json.loads(line)
        assert list(marks)[1:] == [border.value for border in Border]
        times = [marks[border.value] for border in ENGINES_OWN]
        assert times == sorted(times)
        assert times[0] > 0


def test_what_did_not_pass_all_borders_is_forgotten() -> None:
    lines: list[str] = []
    trace = RequestTrace(lines.append)
    trace.begin("a")
    trace.mark(("a", "nobody"), Border.RECEIVED, 1.0)
    trace.end("a")
    trace.end("nobody")
    assert lines == []


def test_rows_that_end_in_prefill_and_steps_that_are_lost_leave_nothing_behind() -> None:
    limits = small_limits(chunk_size=4, overlap_depth=2)

    async def main() -> None:
        prompts_to_fail = 1

        def fails(plan: StepPlan) -> bool:
            nonlocal prompts_to_fail
            is_last = any(chunk.is_final for chunk in plan.chunks)
            prompts_to_fail -= is_last
            return is_last and prompts_to_fail == 0

        runner = FailingRunner(limits, fails_at_collect=fails)
        scheduler = Scheduler(limits, make_stream=FakeTextStream.for_request)
        loop = EngineLoop(scheduler, runner, restarts=RestartLimits(first_pause=0.0))
        loop.trace_requests(RequestTrace(lambda _: None))
        for i in range(30):
            stream = loop.submit([make_request(f"r{i}", prompt_len=50)])[0]
            while not loop.stats.num_running:
                await asyncio.sleep(0)
            await stream.aclose()
        await asyncio.gather(*(read(loop.submit([make_request(f"s{i}")])[0]) for i in range(8)))
        while loop.stats.num_steps_in_flight:
            await asyncio.sleep(0)
        calls = loop._calls
        assert runner.num_restarts == 1
        assert calls.first_tokens is not None
        assert len(calls.first_tokens._names) <= limits.pool.num_slots
        assert not calls.first_tokens._by_step
        assert not loop._in_flight
        await loop.close()

    asyncio.run(main())
