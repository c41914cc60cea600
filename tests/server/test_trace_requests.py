"""--trace-requests: refused requests leave no trace."""

from __future__ import annotations

import asyncio

import pytest

from jspec.errors import QueueFullError, RequestError
from jspec.messages.request import SamplingParams
from jspec.server.server_args import ServerArgs
from jspec.server.service import Service
from jspec.serving.engine import Engine
from jspec.serving.request_trace import RequestTrace
from jspec.text.intake import Prompt

from .helpers import wait_idle


def test_refused_requests_are_forgotten_and_do_not_disturb_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    trace = RequestTrace(lines.append)
    monkeypatch.setattr("jspec.server.service.open_trace", lambda _: trace)
    service = Service(engine, ServerArgs(trace_requests="trace.jsonl"))

    def call(rid: str, num_tokens: int = 4) -> Prompt:
        sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return Prompt(sampling=sampling, input_ids=(1, 2, 3), request_id=rid)

    async def run() -> None:
        most = engine.limits.scheduling.max_queued_requests
        full = await service.submit([call(f"r{i}", 64) for i in range(most)])
        with pytest.raises(QueueFullError):
            await service.submit([call(f"s{i}") for i in range(most)])
        assert (
            sorted(trace._open) == sorted(service._groups) == sorted(f"r{i}" for i in range(most))
        )
        await full.close()
        assert not trace._open
        work = await service.submit([call("a", 64)])
        with pytest.raises(RequestError, match="rid is 'a'; expected one that is not in use"):
            await service.submit([call("b"), call("a")])
        assert list(trace._open) == ["a"]
        assert "submitted" in trace._open["a"]
        assert (await service.abort("b")) == 0
        await work.close()
        assert not trace._open

    asyncio.run(run())
    wait_idle(engine)
    assert not lines  # no event was sent
