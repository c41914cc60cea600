"""A stream that outlives the engine that runs its request.

The text is a function of (model, prompt, seed). So if an engine is lost, the request continues in
another one, after the ids that were already sent (`Request.former_ids`), and its reader notices
nothing.

    engine 1   prompt                       a b c, lost
    engine 2   prompt, former_ids (a b c)   d e, finish
    reader                                  a b c d e, finish
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from itertools import zip_longest
from typing import Protocol

from jspec.errors import EngineClosedError, JspecError, RequestFailedError
from jspec.messages.request import (
    DEFAULT_VERSION,
    FinishKind,
    FinishReason,
    Request,
    SpecCounters,
    StreamChunk,
)
from jspec.serving.streams.readers import SLOW_READER

LOGGER = logging.getLogger("jspec.distributed")
# Losses in a row, with fewer tokens between them, after which the request may be their cause. The
# number is large, because requests that only waited in the engine are counted too.
MOST_LOSSES, PROGRESS_TOKENS = 20, 8
PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.5, 8.0  # before a second attempt without progress; it doubles

# A stream's first item is () once the request is queued. A JspecError is its last item.
Item = tuple[StreamChunk, ...] | JspecError


class EngineLostError(JspecError):
    """Raised by a stream whose engine ended or cannot be reached."""


class Connect(Protocol):
    """Runs a request in some engine. Closing the generator aborts the request there."""

    def __call__(self, request: Request, *, waits: bool) -> AsyncGenerator[Item]:
        """Yield the stream. waits: wait for space in a full queue. Raises EngineLostError."""
        ...


class OutputRecord:
    """The output of a request so far, over all engines that ran it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._name = uuid.uuid4().hex
        self._num_engines = 0
        self._ids: list[int] = []
        self._cached_tokens: int | None = None
        self._earlier, self._counters = SpecCounters(), SpecCounters()
        self._earlier_retractions = self._num_retractions = 0
        self._weight_version = DEFAULT_VERSION

    @property
    def num_ids(self) -> int:
        return len(self._ids)

    def next_request(self) -> Request:
        """Return the request for the next engine."""
        # It gets a new id, because an engine that was only unreachable may still run the former
        # one.
        self._num_engines += 1
        self._earlier, self._earlier_retractions = self._counters, self._num_retractions
        name = f"{self._request.request_id}@{self._name}-{self._num_engines}"
        return replace(self._request, request_id=name, former_ids=tuple(self._ids))

    def add(self, chunk: StreamChunk) -> StreamChunk:
        """Return an engine's chunk with the counts of the whole stream."""
        self._ids += chunk.new_ids
        if self._cached_tokens is None:
            self._cached_tokens = chunk.cached_tokens
        self._counters = added(self._earlier, chunk.counters)
        self._num_retractions = self._earlier_retractions + chunk.num_retractions
        self._weight_version = chunk.weight_version
        return replace(
            chunk,
            request_id=self._request.request_id,
            num_retractions=self._num_retractions,
            cached_tokens=self._cached_tokens,
            counters=self._counters,
        )

    def aborted(self, why: str) -> StreamChunk:
        """Return a last chunk made here, without the text that the engine withheld."""
        return StreamChunk(
            request_id=self._request.request_id,
            new_ids=(),
            num_accepted=0,
            text="",
            finish=FinishReason(kind=FinishKind.ABORT, message=why),
            prompt_tokens=len(self._request.prompt_ids),
            num_retractions=self._num_retractions,
            cached_tokens=self._cached_tokens or 0,
            weight_version=self._weight_version,
            counters=self._counters,
        )


class ContinuedStream(AsyncIterator[StreamChunk]):
    """The chunks of one request, like a ChunkStream; it belongs to one event loop."""

    def __init__(
        self, request: Request, connect: Connect, *, max_unread: int | None, waits: bool
    ) -> None:
        # max_unread: unread chunks after which the request is aborted. waits: wait for space in a
        # full queue, as a request that was queued once always does.
        self.request_id = request.request_id
        self._connect, self._max_unread, self._waits = connect, max_unread, waits
        self._record = OutputRecord(request)
        self._items: deque[StreamChunk | JspecError] = deque()
        self._changed = asyncio.Event()
        self._is_queued = self._is_read = False
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._on_end)

    @property
    def is_over(self) -> bool:
        """True once no engine runs it; its last chunks may be unread."""
        return self._task.done()

    async def queued(self) -> None:
        """Return once the request is queued. Raises the error that refuses it."""
        while not (self._is_queued or self._items):
            await self._wait()
        if not self._is_queued and isinstance(error := self._items[0], JspecError):
            raise error

    async def __anext__(self) -> StreamChunk:
        while not self._items:
            if self._is_read:
                raise StopAsyncIteration
            try:
                await self._wait()
            except asyncio.CancelledError:
                await self.aclose()
                raise
        item = self._items.popleft()
        self._is_read |= isinstance(item, JspecError) or item.finish is not None
        if isinstance(item, JspecError):
            raise item
        return item

    def ready(self) -> list[StreamChunk]:
        found: list[StreamChunk] = []
        while self._items and isinstance(self._items[0], StreamChunk):
            chunk = self._items[0]
            self._items.popleft()
            found.append(chunk)
            self._is_read |= chunk.finish is not None
        return found

    def abort(self, why: str) -> bool:
        """End the request; its reader gets a last chunk. Return False if it had ended."""
        if self._task.done() or self._task.cancelling():
            return False
        self._task.cancel()
        self._put(self._record.aborted(why))
        return True

    async def aclose(self) -> None:
        self._is_read = True
        self._items.clear()
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _put(self, item: StreamChunk | JspecError) -> None:
        self._items.append(item)
        self._changed.set()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._is_read |= task.cancelled() and not self._items
        error = None if task.cancelled() else task.exception()
        if error is not None:
            LOGGER.error("request %s was ended", self.request_id, exc_info=error)
            why = f"request {self.request_id!r} was ended by an internal error"
            self._put(RequestFailedError(why, f": {type(error).__name__}: {error}"))
        self._changed.set()

    async def _run(self) -> None:
        num_losses = 0
        while True:
            num_before = self._record.num_ids
            try:
                await self._read(self._record.next_request())
                return
            except EngineLostError as error:
                is_progress = self._record.num_ids - num_before >= PROGRESS_TOKENS
                num_losses = 1 if is_progress else num_losses + 1
                LOGGER.warning(
                    "request %s lost its engine after %d tokens (%s); it goes on in another",
                    *(self.request_id, self._record.num_ids, error),
                )
                if num_losses >= MOST_LOSSES:
                    why = f"request {self.request_id!r} ran when each of {num_losses} engines ended"
                    self._put(RequestFailedError(why, f"; the last time: {error}"))
                    return
            if num_losses > 1:
                pause = PAUSE_SECONDS * 2.0 ** (num_losses - 2)
                await asyncio.sleep(min(pause, MOST_PAUSE_SECONDS))

    async def _read(self, request: Request) -> None:
        waits = self._waits or self._is_queued
        async with aclosing(self._connect(request, waits=waits)) as items:
            async for item in items:
                if isinstance(item, EngineClosedError):
                    raise EngineLostError(str(item))
                if isinstance(item, JspecError):
                    self._put(item)
                    return
                if not self._is_queued:
                    self._is_queued = True
                    self._changed.set()
                for chunk in item:
                    self._put(self._record.add(chunk))
                    if chunk.finish is not None:
                        return
                if self._max_unread is not None and len(self._items) > self._max_unread:
                    LOGGER.warning("request %s was %s", self.request_id, SLOW_READER)
                    self._put(self._record.aborted(SLOW_READER))
                    return
        raise EngineLostError("its stream ended early")


def added(first: SpecCounters, then: SpecCounters) -> SpecCounters:
    histograms = zip_longest(first.accept_histogram, then.accept_histogram, fillvalue=0)
    return SpecCounters(
        verify_ct=first.verify_ct + then.verify_ct,
        num_accepted=first.num_accepted + then.num_accepted,
        num_proposed=first.num_proposed + then.num_proposed,
        accept_histogram=tuple(map(sum, histograms)),
        full_verify_ct=first.full_verify_ct + then.full_verify_ct,
        full_num_emitted=first.full_num_emitted + then.full_num_emitted,
    )
