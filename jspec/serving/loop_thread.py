"""An engine's event loop in its own thread, usable from any loop and thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent import futures
from typing import Any, TypeVar

from jspec.errors import EngineClosedError, RequestError

T = TypeVar("T")
# Seconds that work may take to end when the loop stops, or after it is cancelled.
PATIENCE = 5.0
WOULD_BLOCK = (
    "this call would block the event loop that the engine runs on; "
    "use async_generate() and `await close()` there"
)


class LoopThread:
    """An event loop in a background thread, on which all of an engine's tasks run, so that the
    engine outlives a caller's asyncio.run.

    The thread starts with the first call. Work submitted before the stop is finished, later work is
    refused.
    """

    def __init__(
        self, *, new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    ) -> None:
        self._new_loop = new_loop
        # Concurrent first callers must get one loop. It is reentrant, because a finalizer may
        # submit work on a thread that has acquired it; the loop's thread never waits for it.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._ending: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        return self._loop is not None

    @property
    def is_running(self) -> bool:
        return self._loop is not None and self._loop.is_running()

    def start_thread(self) -> None:
        with self._lock:
            if self._loop is not None:
                return
            loop, started = self._new_loop(), threading.Event()
            loop.call_soon(started.set)
            self._thread = threading.Thread(
                target=_run, args=(loop,), name="jspec-loop", daemon=True
            )
            self._thread.start()
            started.wait()
            self._loop = loop

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on this loop, from any loop. Raises EngineClosedError once it has ended."""
        self.start_thread()
        if self._is_here():
            return await work
        future = self._hand_over(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineClosedError("the engine was closed during this call") from None

    async def ask(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return await self.call(run())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on this loop and wait; interrupting the wait cancels the work. Raises
        EngineClosedError if the loop is not running, RequestError on its own thread."""
        if self._is_here():
            work.close()
            raise RequestError(WOULD_BLOCK)
        future = self._hand_over(work)
        try:
            return future.result()
        except futures.CancelledError:
            raise EngineClosedError("the engine was closed during this call") from None
        except BaseException:
            if not future.done():  # not an error of the work
                self._cancel(work, future)
            raise

    def iterate(self, stream: AsyncGenerator[T]) -> Iterator[T]:
        """Iterate over a generator that runs on this loop, and close it at the end."""
        try:
            while True:
                item = self.run(next_or_none(stream))
                if item is None:
                    return
                yield item
        finally:
            # Refused once the loop has stopped, or on its own thread; the generator then ends too.
            with contextlib.suppress(EngineClosedError, RequestError):
                self.run(close_unless_running(stream))

    def stop(self) -> None:
        """End the thread after the submitted work. Raises RequestError on its own thread."""
        if self._thread is None or self._loop is None:
            return
        if self._is_here():
            raise RequestError(WOULD_BLOCK)
        self.stop_soon()
        self._thread.join()

    def stop_soon(self) -> None:
        """Request the stop without waiting. Any thread may call it, even the loop's own."""
        if self._loop is None:
            return
        with self._lock:
            self._is_stopping = True
        # Repeated on each call: an earlier one may have been interrupted here.
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end_soon)

    def _end_soon(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(_drain_and_stop())

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _hand_over(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        with self._lock:
            loop = self._loop
            if loop is not None and loop.is_running() and not self._is_stopping:
                with contextlib.suppress(RuntimeError):  # closed concurrently
                    future = asyncio.run_coroutine_threadsafe(work, loop)
                    # If the loop is closed by now, work that is not done will never run.
                    if future.done() or not loop.is_closed():
                        return future
        work.close()
        raise EngineClosedError("the engine is closed")

    def _cancel(self, work: Coroutine[Any, Any, T], future: futures.Future[T]) -> None:
        """Cancel submitted work and await its cleanup, which a cancelled future does not show."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_cancel_task_of, work)
            futures.wait((future,), timeout=PATIENCE)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _cancel_task_of(work: Coroutine[Any, Any, Any]) -> None:
    for task in asyncio.all_tasks():
        if task.get_coro() is work:
            task.cancel()


async def _drain_and_stop() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, late = await asyncio.wait(others, timeout=PATIENCE)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.stop)  # after the callbacks that notify callers of finished tasks


async def next_or_none(stream: AsyncIterator[T]) -> T | None:
    """Return the next item, or None at the end (StopAsyncIteration cannot cross a thread)."""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


async def close_unless_running(stream: AsyncGenerator[Any]) -> None:
    """Close a generator, unless it is running: then it was cancelled and ends by itself."""
    if not getattr(stream, "ag_running", False):
        await stream.aclose()
