"""A first token's way: every border once, in order, for streams that began."""

from __future__ import annotations

import asyncio
import json

from jspec.scheduler.request_trace import Border, RequestTrace
from jspec.testing.fake_runner import small_limits

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
        await asyncio.gather(*(read(loop.submit(request)) for request in requests))
        await read(loop.submit(make_request("untraced")))
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
