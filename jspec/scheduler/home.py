"""Where an engine lives: one event loop, reachable from every other loop and thread.

All that touches the scheduler runs on this loop. Callers elsewhere hand coroutines over and wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from jspec.core.errors import EngineClosedError, RequestError
from jspec.core.request import StreamChunk
from jspec.scheduler.loop import ChunkStream

T = TypeVar("T")


class HomeLoop:
    """The event loop that an engine lives on: adopted from the first awaiter, or a thread's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two first callers must find one home
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        return self._loop is not None

    @property
    def is_running(self) -> bool:
        return self._loop is not None and self._loop.is_running()

    def start_thread(self) -> None:
        """Makes a background thread the home, unless there is one already."""
        with self._lock:
            if self._loop is not None:
                return
            loop, started = asyncio.new_event_loop(), threading.Event()
            loop.call_soon(started.set)
            self._thread = threading.Thread(target=loop.run_forever, name="jspec-loop", daemon=True)
            self._thread.start()
            started.wait()
            self._loop = loop

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` at home, from whatever loop the caller is on.

        Raises EngineClosedError if the home is not running any more.
        """
        here = asyncio.get_running_loop()
        with self._lock:
            if self._loop is None:
                self._loop = here
            home = self._loop
        if home is here:
            return await work
        if not home.is_running():
            work.close()
            raise EngineClosedError("the engine's event loop is not running")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` at home and waits. Raises EngineClosedError without a running home."""
        if self._loop is None or not self._loop.is_running():
            work.close()
            raise EngineClosedError("the engine's event loop is not running")
        if self._thread is None or threading.current_thread() is self._thread:
            try:
                on_home = asyncio.get_running_loop() is self._loop
            except RuntimeError:
                on_home = False
            if on_home:
                work.close()
                raise RequestError(
                    "this call would block the event loop that the engine lives on; "
                    "use async_generate() and `await close()` there"
                )
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        """Ends the background thread, if the home is one, after what was handed over ended."""
        if self._thread is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(_drain(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _drain(*, patience: float = 5.0) -> None:
    """Waits for all other tasks of this loop, and cancels those that outlast `patience` seconds."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=patience)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


class EngineStream(AsyncIterator[StreamChunk]):
    """The chunks of one submitted request, readable from any event loop.

    Closing it, or dropping the last reference to it, aborts the request unless it is finished.
    """

    def __init__(self, home: HomeLoop, stream: ChunkStream) -> None:
        self._home = home
        self._stream = stream

    async def __anext__(self) -> StreamChunk:
        chunk = await self._home.call(next_or_none(self._stream))
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """May be called twice, and after the engine was closed."""
        if self._home.is_running:
            # Shielded: whoever closes is often being cancelled, and the abort must still happen.
            await asyncio.shield(self._home.call(self._stream.aclose()))


async def next_or_none(stream: AsyncIterator[T]) -> T | None:
    """The next item, or None at the end (StopAsyncIteration cannot cross a thread)."""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


async def close_if_open(stream: AsyncIterator[Any]) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
