"""From chunks to answers: folding a sequence, server-sent events, and several sequences at once.

It knows neither fields of a request nor sockets' addresses; endpoints say what an event looks like.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jspec.core.errors import JspecError
from jspec.core.request import StreamChunk
from jspec.core.response import Completion, spec_fields
from jspec.server.http import ClientGoneError, error_body, status_of, unless_gone
from jspec.server.metrics import RequestClock
from jspec.server.spec_tokens import SpecTokenTracker

DONE = b"data: [DONE]\n\n"


class ChunkSource(Protocol):
    """The chunks of one submitted request (jspec.scheduler.home.EngineStream)."""

    def __aiter__(self) -> AsyncIterator[StreamChunk]: ...

    async def aclose(self) -> None: ...


class SequenceFold:
    """One sequence of an answer so far: what to send in full, and what is new since `take`.

    tracker: if given, the text is also split by origin, and the counters are sent live.
    """

    def __init__(
        self, request_id: str, *, clock: RequestClock, tracker: SpecTokenTracker | None = None
    ) -> None:
        self._clock = clock
        self._tracker = tracker
        self._spec_tokens: list[dict[str, Any]] = []
        self._num_text, self._num_ids, self._num_spec = 0, 0, 0
        self.completion = Completion(request_id=request_id)

    def add(self, chunk: StreamChunk) -> None:
        self._clock.observe(chunk)
        self.completion = self.completion.add(chunk)
        if self._tracker is not None:
            self._spec_tokens += [piece.to_json() for piece in self._tracker.push(chunk)]

    @property
    def num_new_ids(self) -> int:
        """Ids since the last `take` or `take_text`."""
        return len(self.completion.output_ids) - self._num_ids

    @property
    def is_finished(self) -> bool:
        return self.completion.finish is not None

    def to_json(self) -> dict[str, Any]:
        """SGLang's response object with everything so far."""
        body = self.completion.to_json(e2e_latency=self._clock.elapsed)
        if self._tracker is not None:
            body["spec_tokens"] = list(self._spec_tokens)
            counters = self.completion.counters
            if counters.verify_ct:
                num_ids = len(self.completion.output_ids)
                body["meta_info"] |= spec_fields(counters, completion_tokens=num_ids)
        return body

    def take(self, *, incremental: bool) -> dict[str, Any]:
        """As to_json, but if `incremental` with text, ids and pieces since the last call only."""
        body = self.to_json()
        if incremental:
            body["text"] = body["text"][self._num_text :]
            body["output_ids"] = body["output_ids"][self._num_ids :]
            if self._tracker is not None:
                body["spec_tokens"] = body["spec_tokens"][self._num_spec :]
        self._mark()
        return body

    def take_text(self) -> str:
        """The text since the last call."""
        text = self.completion.text[self._num_text :]
        self._mark()
        return text

    def _mark(self) -> None:
        self._num_text = len(self.completion.text)
        self._num_ids = len(self.completion.output_ids)
        self._num_spec = len(self._spec_tokens)


async def merge(sources: Sequence[ChunkSource]) -> AsyncGenerator[tuple[int, StreamChunk]]:
    """Chunks of all sources as they come, each with its source's index.

    The first error ends all. Closing it early cancels the readers, not the sources.
    """
    queue: asyncio.Queue[tuple[int, StreamChunk] | BaseException | None] = asyncio.Queue()

    async def read(index: int, source: ChunkSource) -> None:
        try:
            async for chunk in source:
                queue.put_nowait((index, chunk))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    readers = [asyncio.ensure_future(read(i, source)) for i, source in enumerate(sources)]
    try:
        num_open = len(readers)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)


async def fold_all(sources: Sequence[ChunkSource], folds: Sequence[SequenceFold]) -> None:
    """Folds every source to its end, and closes them all, whatever happens."""
    try:
        async with aclosing(merge(sources)) as chunks:
            async for index, chunk in chunks:
                folds[index].add(chunk)
    finally:
        await close_all(sources)


async def close_all(sources: Sequence[ChunkSource]) -> None:
    """Aborts what is not finished."""
    for source in sources:
        await source.aclose()


async def fold_events(
    sources: Sequence[ChunkSource],
    folds: Sequence[SequenceFold],
    *,
    interval: int,
    event: Callable[[int, SequenceFold], Mapping[str, Any] | None],
    last: Callable[[], Mapping[str, Any] | None] = lambda: None,
) -> AsyncGenerator[bytes]:
    """One event for each chunk, or for each `interval` ids; the last of a sequence always.

    `event` may return None to send nothing; `last` is sent when all are finished. An error after
    the start of the answer becomes an event of its own. The caller closes the sources.
    """
    try:
        async with aclosing(merge(sources)) as chunks:
            async for index, chunk in chunks:
                fold = folds[index]
                fold.add(chunk)
                if fold.num_new_ids >= interval or fold.is_finished:
                    body = event(index, fold)
                    if body is not None:
                        yield encode_event(body)
        body = last()
        if body is not None:
            yield encode_event(body)
    except JspecError as error:
        yield encode_event(error_body(str(error), status_of(error)))


def encode_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event (HTML standard, section 9.2)."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode("utf-8") + b"\n\n"


class EventStream(Response):
    """Sends `events` and then [DONE]; `close` is awaited before that, and at the end in any case.

    Who has read [DONE] may use the names of this call again at once. So `close` is awaited twice,
    and the second time must not touch what came after.
    Once it has begun, an answer has no status left to tell the client anything with.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], *, close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

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
        await _send_part(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
