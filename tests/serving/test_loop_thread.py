"""The thread of the loop: one for all first callers, and drained before it stops."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from jspec.errors import EngineClosedError, RequestError
from jspec.serving.loop_thread import LoopThread
from jspec.serving.method_forms import forwarded, mirrored
from tests.support.interruption import interruption


async def loop_id() -> int:
    return id(asyncio.get_running_loop())


def test_first_callers_from_many_threads_find_one_loop() -> None:
    for _ in range(40):
        loop_thread = LoopThread()
        found: list[int] = []
        barrier = threading.Barrier(4)

        def call(
            loop_thread: LoopThread = loop_thread, found: list[int] = found, at: object = barrier
        ) -> None:
            at.wait()  # type: ignore[attr-defined]
            loop_thread.start_thread()
            found.append(loop_thread.run(loop_id()))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(found)) == 1
        loop_thread.stop()


def test_stop_waits_for_what_was_handed_over() -> None:
    loop_thread, done = LoopThread(), []
    loop_thread.start_thread()

    async def slow() -> None:
        for _ in range(20):
            await asyncio.sleep(0.005)
        done.append(True)

    thread = threading.Thread(target=lambda: loop_thread.run(slow()))
    thread.start()
    while not asyncio.all_tasks(loop_thread._loop):
        pass
    loop_thread.stop()
    thread.join(timeout=5)
    assert done == [True]
    assert not thread.is_alive()


def test_a_stopped_loop_refuses_calls_and_leaves_nothing_unawaited() -> None:
    loop_thread = LoopThread()
    loop_thread.start_thread()
    loop_thread.stop()
    with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
        loop_thread.run(loop_id())
    with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
        asyncio.run(loop_thread.call(loop_id()))


def test_blocking_the_loop_from_itself_is_refused() -> None:
    loop_thread = LoopThread()

    async def block() -> None:
        loop_thread.run(loop_id())

    with pytest.raises(RequestError, match="would block the event loop"):
        asyncio.run(loop_thread.call(block()))
    loop_thread.stop()


def test_every_event_loop_finds_the_same_one() -> None:
    loop_thread = LoopThread()
    found = [asyncio.run(loop_thread.call(loop_id())), asyncio.run(loop_thread.call(loop_id()))]
    assert {*found, loop_thread.run(loop_id())} == {id(loop_thread._loop)}
    loop_thread.stop()


def ends(target: Callable[[], object], *, seconds: float = 10.0) -> bool:
    """Return True if a call returns or raises EngineClosedError."""
    came_back = threading.Event()

    def run() -> None:
        with suppress(EngineClosedError):
            target()
        came_back.set()

    threading.Thread(target=run, daemon=True).start()
    return came_back.wait(seconds)


@pytest.mark.parametrize("via", ["run", "call"])
def test_what_is_handed_over_while_it_stops_is_done_or_refused(via: str) -> None:
    for _ in range(6):
        loop_thread = LoopThread()
        loop_thread.start_thread()
        refused: list[bool] = []

        def hand_over(loop_thread: LoopThread = loop_thread, refused: list[bool] = refused) -> None:
            try:
                while True:
                    work = asyncio.sleep(0, True)
                    assert (
                        loop_thread.run(work)
                        if via == "run"
                        else asyncio.run(loop_thread.call(work))
                    )
            except EngineClosedError:
                refused.append(True)

        threads = [threading.Thread(target=hand_over, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        loop_thread.stop()
        for thread in threads:
            thread.join(timeout=5)
        assert refused == [True] * 4


def test_stopping_twice_and_by_many_is_stopping_once() -> None:
    loop_thread = LoopThread()
    loop_thread.stop()  # nothing to stop yet
    loop_thread.start_thread()
    stopping = [threading.Thread(target=loop_thread.stop, daemon=True) for _ in range(4)]
    for thread in stopping:
        thread.start()
    for thread in stopping:
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert ends(loop_thread.stop)
    assert not loop_thread.is_running


def test_stopping_the_loop_from_itself_is_refused() -> None:
    loop_thread = LoopThread()
    loop_thread.start_thread()

    async def stop() -> None:
        loop_thread.stop()

    with pytest.raises(RequestError, match="would block the event loop"):
        loop_thread.run(stop())
    assert loop_thread.run(loop_id()) == id(loop_thread._loop)
    assert ends(loop_thread.stop)


def test_a_finaliser_may_hand_over_in_the_midst_of_a_hand_over() -> None:
    found: list[int] = []

    class Interrupted(asyncio.SelectorEventLoop):
        """Garbage is collected at any time: here, once, while a callback is submitted."""

        def call_soon_threadsafe(  # type: ignore[override]
            self, callback: Any, *args: Any, **options: Any
        ) -> Any:
            if threading.current_thread() is not loop_thread._thread and not found:
                found.append(0)
                found.append(loop_thread.run(loop_id()))
            return super().call_soon_threadsafe(callback, *args, **options)

    loop_thread = LoopThread(new_loop=Interrupted)
    loop_thread.start_thread()
    assert ends(lambda: found.append(loop_thread.run(loop_id())))
    assert found == [0, id(loop_thread._loop), id(loop_thread._loop)]
    loop_thread.stop()


def test_an_interrupted_wait_cancels_its_work_and_no_other() -> None:
    loop_thread, started = LoopThread(), threading.Event()
    loop_thread.start_thread()
    ended: list[str] = []

    async def work(name: str) -> None:
        started.set()
        try:
            await asyncio.sleep(0.5)
            ended.append(f"{name} done")
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # what a cancelled request has to clear up
            ended.append(f"{name} cancelled")
            raise

    other = threading.Thread(target=loop_thread.run, args=(work("other"),))
    other.start()
    started.wait(10)
    started.clear()
    with interruption(partial(started.wait, 10)):
        loop_thread.run(work("mine"))
    assert ended == ["mine cancelled"]
    other.join(timeout=60)
    assert ended == ["mine cancelled", "other done"]
    assert loop_thread.run(loop_id()) == id(loop_thread._loop)
    loop_thread.stop()


def test_an_error_of_the_work_is_the_callers() -> None:
    loop_thread = LoopThread()
    loop_thread.start_thread()

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        loop_thread.run(fail())
    loop_thread.stop()


class Doubler:
    """An object with a part, and with calls in both forms."""

    def __init__(self) -> None:
        self._loop_thread = LoopThread()
        self._numbers = [1, 2]

    async def async_double(self, number: int, *, stream: bool = False) -> Any:
        """Double a number; an iterator if `stream`."""

        async def both() -> AsyncGenerator[int]:
            for _ in range(2):
                yield number

        return both() if stream else 2 * number

    double = mirrored(async_double)
    number_of = forwarded("_numbers", list[int].index)


def test_a_synchronous_call_is_the_mirror_of_an_asynchronous_one() -> None:
    doubler = Doubler()
    assert doubler.double(3) == asyncio.run(doubler.async_double(3)) == 6
    assert list(doubler.double(3, stream=True)) == [3, 3]
    assert (doubler.double.__name__, doubler.double.__doc__) == (
        "double",
        Doubler.async_double.__doc__,
    )
    assert "stream" in inspect.signature(doubler.double).parameters
    assert doubler.number_of(2) == 1
    doubler._loop_thread.stop()
    with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
        doubler.double(3)
