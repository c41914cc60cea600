"""Work that must run between two steps, while none is in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from jspec.errors import EngineClosedError

# Runs a function on the engine thread.
OnEngineThread = Callable[[Callable[[], None]], Awaitable[None]]
Update = Callable[[OnEngineThread], Awaitable[None]]


class WeightUpdateGate:
    """A queue of updates that run in order between steps, on one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Update, asyncio.Future[None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def ask(self, update: Update) -> Awaitable[None]:
        """Queue an update; the result ends with the update and raises its error. Cancelling it
        drops an update that has not started; a started one cannot be undone."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_heard)  # also if the caller no longer waits
        entry = (update, done)
        self._waiting.append(entry)
        return self._ended(entry)

    async def _ended(self, entry: tuple[Update, asyncio.Future[None]]) -> None:
        _, done = entry
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                await asyncio.wait({done})
            raise

    async def run_next(self, on_engine_thread: OnEngineThread) -> None:
        """Run the next update. Raises EngineClosedError if no step can run after it."""
        update, done = self._waiting.popleft()
        try:
            await update(on_engine_thread)
        except EngineClosedError as error:
            done.set_exception(error)
            raise
        except Exception as error:
            done.set_exception(error)
        except BaseException:  # the event loop ends
            done.cancel()
            raise
        else:
            done.set_result(None)

    def refuse(self, error: Callable[[], Exception]) -> None:
        while self._waiting:
            self._waiting.popleft()[1].set_exception(error())


def _heard(done: asyncio.Future[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it as never retrieved."""
    if not done.cancelled():
        done.exception()
