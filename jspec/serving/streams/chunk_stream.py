"""The chunk stream of one request, for a reader on any event loop."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

from jspec.errors import EngineClosedError, JspecError, RequestFailedError
from jspec.messages.request import StreamChunk
from jspec.serving.streams.mailbox import Mailbox

LOGGER = logging.getLogger("jspec.scheduler")


class Abandons(Protocol):
    """Aborts the request of a reader that is gone; implemented by EngineLoop."""

    async def abandon(self, request_id: str, queue: Mailbox) -> None: ...

    def abandon_soon(
        self, event_loop: asyncio.AbstractEventLoop, request_id: str, queue: Mailbox
    ) -> None: ...


class ChunkStream(AsyncIterator[StreamChunk]):
    """The chunks of one request, up to and including the one with the finish reason.

    Calling aclose(), cancelling the wait for a chunk, or dropping the stream aborts the request.
    Raises, after the committed chunks, EngineClosedError if the engine ends first;
    QueueTimeoutError; RequestFailedError if its text cannot be made, it ran at repeated runner
    failures, or its state had an internal error.
    """

    def __init__(self, engine_loop: Abandons, request_id: str, queue: Mailbox) -> None:
        self._engine_loop = engine_loop
        self._request_id = request_id
        self._queue = queue
        self._is_done = False
        # It must not reference the stream, which could then never be collected.
        self._on_drop = weakref.finalize(
            self, engine_loop.abandon_soon, asyncio.get_running_loop(), request_id, queue
        )
        self._on_drop.atexit = False

    async def __anext__(self) -> StreamChunk:
        if self._is_done:
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        except Exception as error:
            raise self._broken(error) from error
        if isinstance(item, JspecError):
            self._end()
            raise item
        if item.finish is not None:
            self._end()
        return item

    def ready(self) -> list[StreamChunk]:
        """Return the chunks that are already available, without waiting."""
        try:
            chunks = [] if self._is_done else self._queue.get_ready()
        except Exception as error:
            raise self._broken(error) from error
        if chunks and chunks[-1].finish is not None:
            self._end()
        return chunks

    async def aclose(self) -> None:
        """Abort the request unless it is finished. Idempotent; any event loop may call it."""
        if not self._is_done:
            self._end()
            # Shielded, since the closing task is often being cancelled but must abort the request.
            with suppress(EngineClosedError):  # closed just now, which ended it
                await asyncio.shield(self._engine_loop.abandon(self._request_id, self._queue))

    def _broken(self, error: Exception) -> RequestFailedError:
        LOGGER.error("request %s was ended", self._request_id, exc_info=error)
        self._is_done = True
        self._on_drop()  # from whatever event loop this is
        return RequestFailedError(
            f"the text of request {self._request_id!r} could not be made",
            f": {type(error).__name__}: {error}",
        )

    def _end(self) -> None:
        self._is_done = True
        self._on_drop.detach()
