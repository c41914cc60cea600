"""Streaming: merging the chunks of several sequences, and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jspec.errors import JspecError
from jspec.messages.request import StreamChunk
from jspec.messages.response import Completion
from jspec.server.http.event_json import encode_event
from jspec.server.http.exchange import (
    ClientGoneError,
    error_body,
    public_message,
    status_of,
    unless_gone,
)

Observe = Callable[[Completion, StreamChunk], None]
DONE = b"data: [DONE]\n\n"


class ChunkSource(Protocol):
    """The chunks of one submitted request, as ChunkStream has them."""

    def __aiter__(self) -> AsyncIterator[StreamChunk]: ...

    def ready(self) -> list[StreamChunk]: ...

    async def aclose(self) -> None: ...


async def merge(sources: Sequence[ChunkSource]) -> AsyncGenerator[list[tuple[int, StreamChunk]]]:
    """Yield new chunks of all sources, each with its source's index, never an empty list. The first
    error ends all. Closing it early cancels the readers, not the sources."""
    if len(sources) == 1:  # no reader task, which would cost a switch per chunk
        async for chunk in sources[0]:
            yield [(0, chunk), *((0, further) for further in sources[0].ready())]
        return
    queue: asyncio.Queue[list[tuple[int, StreamChunk]] | BaseException | None]
    queue = asyncio.Queue(maxsize=1)

    async def read(index: int, source: ChunkSource) -> None:
        try:
            async for chunk in source:
                await queue.put([(index, chunk), *((index, more) for more in source.ready())])
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    readers = [asyncio.ensure_future(read(i, source)) for i, source in enumerate(sources)]
    try:
        num_open = len(readers)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)


async def grown(
    sources: Sequence[ChunkSource], completions: Sequence[Completion], observe: Observe
) -> AsyncGenerator[list[int]]:
    """Add new chunks to their completions; yield the indexes of those that grew."""
    async with aclosing(merge(sources)) as batches:
        async for chunks in batches:
            for index, chunk in chunks:
                observe(completions[index], chunk)
                completions[index].add(chunk)
            yield list(dict.fromkeys(index for index, _ in chunks))


async def close_all(sources: Sequence[ChunkSource]) -> None:
    for source in sources:
        await source.aclose()


def failure_event(error: JspecError) -> bytes:
    return encode_event(error_body(public_message(error), status_of(error)))


async def events_of(
    sources: Sequence[ChunkSource],
    completions: Sequence[Completion],
    *,
    interval: int,
    event: Callable[[int, Completion], Mapping[str, Any] | bytes | None],
    last: Callable[[], Mapping[str, Any] | None] = lambda: None,
    failure: Callable[[JspecError], bytes] = failure_event,
    observe: Observe = lambda *_: None,
    sent: Callable[[Completion], None] = lambda _: None,
) -> AsyncGenerator[bytes]:
    """Yield an event per chunk, or per `interval` ids, and always the last one of a sequence.

    Chunks that arrived while a slow client read become one event per sequence. `event` may return
    None to send nothing; `last` is sent when all are finished. An error after the start of the
    answer becomes the event `failure`. The caller closes the sources.
    """
    try:
        async with aclosing(grown(sources, completions, observe)) as growth:
            async for indexes in growth:
                for index in indexes:
                    completion = completions[index]
                    if completion.num_new_ids >= interval or completion.finish is not None:
                        body = event(index, completion)
                        if body is not None:
                            yield body if isinstance(body, bytes) else encode_event(body)
                            sent(completion)
        body = last()
        if body is not None:
            yield encode_event(body)
    except JspecError as error:
        yield failure(error)


class EventStream(Response):
    """Sends `events`, awaits `close`, then sends `done`. `close` is awaited again at the end, and
    must not affect later calls: a client that has read `done` may reuse this call's ids."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        close: Callable[[], Awaitable[None]],
        done: bytes = DONE,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGoneError:
            return
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._events) as events:
            async for event in events:
                await _send_part(send, event)
        await self._close()
        await _send_part(send, self._done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
