"""The home loop: one for all first callers, reachable from threads, drained before it stops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jspec.core.errors import EngineClosedError, RequestError
from jspec.scheduler.home import HomeLoop


async def loop_id() -> int:
    return id(asyncio.get_running_loop())


def test_first_callers_from_many_threads_find_one_home() -> None:
    for _ in range(40):
        home, found = HomeLoop(), []
        barrier = threading.Barrier(4)

        def call(home: HomeLoop = home, found: list[int] = found, at: object = barrier) -> None:
            at.wait()  # type: ignore[attr-defined]
            home.start_thread()
            found.append(home.run(loop_id()))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(found)) == 1
        home.stop()


def test_stop_waits_for_what_was_handed_over() -> None:
    home, done = HomeLoop(), []
    home.start_thread()

    async def slow() -> None:
        for _ in range(20):
            await asyncio.sleep(0.005)
        done.append(True)

    thread = threading.Thread(target=lambda: home.run(slow()))
    thread.start()
    while not asyncio.all_tasks(home._loop):
        pass
    home.stop()
    thread.join(timeout=5)
    assert done == [True]
    assert not thread.is_alive()


def test_a_stopped_home_refuses_calls_and_leaves_nothing_unawaited() -> None:
    home = HomeLoop()
    home.start_thread()
    home.stop()
    with pytest.raises(EngineClosedError, match="not running"):
        home.run(loop_id())
    with pytest.raises(EngineClosedError, match="not running"):
        asyncio.run(home.call(loop_id()))


def test_blocking_the_home_from_itself_is_refused() -> None:
    home = HomeLoop()

    async def adopt_and_block() -> None:
        await home.call(loop_id())
        home.run(loop_id())

    with pytest.raises(RequestError, match="would block the event loop"):
        asyncio.run(adopt_and_block())
