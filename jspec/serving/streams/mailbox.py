"""Transport of chunks from the engine's loop to readers on any event loop. After a step, each loop
with waiting readers is woken once, since waking costs a system call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from jspec.errors import EngineClosedError, QueueTimeoutError, RequestFailedError
from jspec.messages.request import StreamChunk
from jspec.scheduler.outputs.token_history import Piece

Failure = EngineClosedError | QueueTimeoutError | RequestFailedError
Waiting = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class Mailbox:
    """The pieces of one request for its single reader, who turns them into chunks, without a lock.

    The reader announces that it waits and then checks again; the writer puts and then checks for a
    waiting reader, so at least one notices the other. Only the reader writes `_waiting`.
    """

    def __init__(self, max_unread: int | None = None) -> None:
        self._max_unread = max_unread
        self._items: deque[Piece | Failure] = deque()
        self._waiting: Waiting | None = None

    def put(self, item: Piece | Failure) -> Waiting | None:
        """Add an item, on the engine's loop, and return the reader to `wake`. Never blocks."""
        self._items.append(item)
        waiting = self._waiting
        return None if waiting is None or waiting[1].done() else waiting

    @property
    def is_full(self) -> bool:
        return self._max_unread is not None and len(self._items) > self._max_unread

    async def get(self) -> StreamChunk | Failure:
        while not self._items:
            event_loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = event_loop.create_future()
            self._waiting = event_loop, woken
            if not self._items:
                await woken
        item = self._items.popleft()
        return item.chunk() if isinstance(item, Piece) else item

    def get_ready(self) -> list[StreamChunk]:
        """Return the available chunks, up to an error, which stays for `get`."""
        chunks: list[StreamChunk] = []
        while self._items:
            item = self._items[0]
            if not isinstance(item, Piece):
                break
            self._items.popleft()
            chunks.append(item.chunk())
        return chunks


def wake(readers: Iterable[Waiting | None]) -> None:
    """Wake readers with one call per event loop, and directly on the caller's own."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiting in readers:
        if waiting is not None:
            by_loop.setdefault(waiting[0], []).append(waiting[1])
    own = _running_loop() if by_loop else None
    for event_loop, futures in by_loop.items():
        if event_loop is own:
            _wake(futures)
            continue
        with suppress(RuntimeError):  # the reader's loop was closed
            event_loop.call_soon_threadsafe(_wake, futures)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
