"""An abort that comes before the engine has its request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from jspec.errors import QueueFullError
from jspec.messages.request import Request, SamplingParams
from jspec.server.control.early_aborts import EarlyAborts
from jspec.serving.loop_thread import EngineStream


def make_request(name: str) -> Request:
    return Request(request_id=name, prompt_ids=(1,), sampling=SamplingParams(), seed=0)


class SlowEngine:
    """Has a request once `compiled` is set."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.compiled = asyncio.Event()
        self.is_full = is_full
        self.running: list[str] = []

    async def submit(
        self, requests: Sequence[Request], /, *, max_unread: int | None = None
    ) -> tuple[EngineStream, ...]:
        assert max_unread == 7
        await self.compiled.wait()
        if self.is_full:
            raise QueueFullError("full")
        self.running += [request.request_id for request in requests]
        return ()

    async def abort(self, request_id: str, /) -> int:
        if request_id not in self.running:
            return 0
        self.running.remove(request_id)
        return 1

    async def abort_all(self) -> int:
        count = len(self.running)
        self.running.clear()
        return count


def run(abort: Callable[[EarlyAborts], Awaitable[int]], **options: Any) -> tuple[int, list[str]]:
    """How many an abort found while "a" and "b" were on their way and "c" ran; what runs then."""

    async def main() -> tuple[int, list[str]]:
        engine = SlowEngine(**options)
        engine.running.append("c")
        aborts = EarlyAborts(engine)
        requests = [make_request("a"), make_request("b")]
        submitting = asyncio.create_task(aborts.submit(requests, max_unread=7))
        await asyncio.sleep(0)
        count = await abort(aborts)
        engine.compiled.set()
        if engine.is_full:
            with pytest.raises(QueueFullError):
                await submitting
            assert await aborts.abort("a") == 0
        else:
            await submitting
        return count, engine.running

    return asyncio.run(main())


def test_one_on_its_way_ends_once_it_is_there() -> None:
    assert run(lambda aborts: aborts.abort("a")) == (1, ["c", "b"])


def test_one_that_runs_ends_at_once_and_an_unknown_one_is_none() -> None:
    assert run(lambda aborts: aborts.abort("c")) == (1, ["a", "b"])
    assert run(lambda aborts: aborts.abort("d")) == (0, ["c", "a", "b"])


def test_all_are_those_on_their_way_too() -> None:
    assert run(lambda aborts: aborts.abort_all()) == (3, [])


def test_a_name_that_stands_twice_is_the_engines_to_refuse() -> None:
    async def main() -> None:
        engine = SlowEngine(is_full=True)
        engine.compiled.set()
        with pytest.raises(QueueFullError):
            await EarlyAborts(engine).submit([make_request("a")] * 2, max_unread=7)

    asyncio.run(main())


def test_nothing_is_kept_of_what_was_refused() -> None:
    assert run(lambda aborts: aborts.abort("a"), is_full=True) == (1, ["c"])
