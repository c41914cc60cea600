"""From chunks to answers: folding sequences, server-sent events, merging several sequences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jspec.errors import JspecError
from jspec.messages.request import StreamChunk
from jspec.messages.response import (
    NOTHING_TOLD,
    Completion,
    LogprobForm,
    TokenText,
    Told,
    spec_fields,
)
from jspec.server.control.metrics import RequestClock
from jspec.server.http.event_json import EventJson, encode_event
from jspec.server.http.exchange import ClientGoneError, error_body, status_of, told, unless_gone
from jspec.serving.request_trace import Border, RequestTrace
from jspec.text.spec_tokens import SpecTokenTracker

DONE = b"data: [DONE]\n\n"


class ChunkSource(Protocol):
    """The chunks of one submitted request (jspec.serving.loop_thread.EngineStream)."""

    def __aiter__(self) -> AsyncIterator[StreamChunk]: ...

    def ready(self) -> list[StreamChunk]: ...

    async def aclose(self) -> None: ...


class SequenceFold:
    """One sequence's output so far, and since the last event. tracker: splits text by origin."""

    def __init__(
        self,
        request_id: str,
        *,
        clock: RequestClock,
        tracker: SpecTokenTracker | None = None,
        trace: RequestTrace | None = None,
        logprobs: LogprobForm | None = None,
        seed: int | None = None,
        token_text: TokenText | None = None,
    ) -> None:
        self._json: EventJson | None = None
        self._clock = clock
        self._trace = trace
        self._tracker = tracker
        self._spec_tokens: list[dict[str, Any]] = []
        self._new_texts: list[str] = []
        self._num_ids, self._num_spec = 0, 0
        self._told = NOTHING_TOLD
        self.completion = Completion(
            request_id, logprobs=logprobs, seed=seed, token_text=token_text
        )

    def add(self, chunk: StreamChunk) -> None:
        if self._trace is not None and chunk.new_ids:
            self._trace.mark((chunk.request_id,), Border.READ, time.monotonic())
        self._clock.observe(chunk)
        self.completion.add(chunk)
        self._new_texts.append(chunk.text)
        if self._tracker is not None:
            self._spec_tokens += [piece.to_json() for piece in self._tracker.push(chunk)]

    def sent(self) -> None:
        if self._trace is not None and self.completion.output_ids:
            self._trace.mark((self.completion.request_id,), Border.SENT, time.monotonic())
            self.end_trace()

    def end_trace(self) -> None:
        if self._trace is not None:
            self._trace.end(self.completion.request_id)
            self._trace = None

    @property
    def num_new_ids(self) -> int:
        """Ids since the last `take_event` or `take_text`."""
        return len(self.completion.output_ids) - self._num_ids

    @property
    def num_taken_ids(self) -> int:
        """Ids before the last `take_event` or `take_text`."""
        return self._num_ids

    @property
    def is_finished(self) -> bool:
        return self.completion.finish is not None

    def to_json(self) -> dict[str, Any]:
        """Return SGLang's response object with everything so far."""
        completion = self.completion
        body: dict[str, Any] = {
            "text": completion.text,
            "output_ids": list(completion.output_ids),
            "meta_info": self._meta_info(NOTHING_TOLD),
        }
        if self._tracker is not None:
            body["spec_tokens"] = self._spec_tokens
        return body

    def take_event(self, *, incremental: bool, index: int | None) -> bytes:
        """Return `to_json` as an event, or only what is new if `incremental`. The cost is that of
        the new output. All calls must have the same arguments."""
        if self._json is None:
            self._json = EventJson(keeps_all=not incremental)
        self._json.add("".join(self._new_texts), self.completion.output_ids[self._num_ids :])
        meta = self._meta_info(self._told)
        if not incremental and self.completion.logprob_form is not None:
            # count the cumulative list of this event
            meta["output_token_logprobs_length"] += self._told.ids
        spec_tokens = None if self._tracker is None else self._spec_tokens[self._num_spec :]
        self._told = self.completion.so_far
        self._mark()
        return self._json.event(meta, index=index, spec_tokens=spec_tokens)

    def take_text(self) -> str:
        text = "".join(self._new_texts)
        self._mark()
        return text

    def _meta_info(self, told: Told) -> dict[str, Any]:
        completion = self.completion
        meta = completion.meta_info(e2e_latency=self._clock.elapsed, told=told)
        if self._tracker is not None and completion.counters.verify_ct:
            num_ids = len(completion.output_ids)
            meta |= spec_fields(completion.counters, completion_tokens=num_ids)
        return meta

    def _mark(self) -> None:
        self._new_texts.clear()
        self._num_ids = len(self.completion.output_ids)
        self._num_spec = len(self._spec_tokens)


async def merge(sources: Sequence[ChunkSource]) -> AsyncGenerator[list[tuple[int, StreamChunk]]]:
    """Yield new chunks of all sources, each with its source's index.

    A slow consumer gets a few long lists, never empty ones; unread chunks stay in the sources. The
    first error ends all. Closing it early cancels the readers, not the sources.
    """
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


async def fold_all(sources: Sequence[ChunkSource], folds: Sequence[SequenceFold]) -> None:
    """Fold every source to its end; close all of them in any case."""
    try:
        async with aclosing(merge(sources)) as batches:
            async for chunks in batches:
                for index, chunk in chunks:
                    folds[index].add(chunk)
    finally:
        await close_all(sources)


async def close_all(sources: Sequence[ChunkSource]) -> None:
    """Close all sources, which aborts unfinished requests."""
    for source in sources:
        await source.aclose()


def failure_event(error: JspecError) -> bytes:
    return encode_event(error_body(told(error), status_of(error)))


async def fold_events(
    sources: Sequence[ChunkSource],
    folds: Sequence[SequenceFold],
    *,
    interval: int,
    event: Callable[[int, SequenceFold], Mapping[str, Any] | bytes | None],
    last: Callable[[], Mapping[str, Any] | None] = lambda: None,
    failure: Callable[[JspecError], bytes] = failure_event,
) -> AsyncGenerator[bytes]:
    """Yield an event per chunk, or per `interval` ids; always the last one of a sequence.

    Chunks that came while a slow client read become one event per sequence, so reading bounds the
    work. `event` may return None to send nothing; `last` is sent when all are finished. An error
    after the start of the answer becomes the event `failure`. The caller closes the sources.
    """
    try:
        async with aclosing(merge(sources)) as batches:
            async for chunks in batches:
                for index, chunk in chunks:
                    folds[index].add(chunk)
                for index in dict.fromkeys(index for index, _ in chunks):
                    fold = folds[index]
                    if fold.num_new_ids >= interval or fold.is_finished:
                        body = event(index, fold)
                        if body is not None:
                            yield body if isinstance(body, bytes) else encode_event(body)
                            fold.sent()
        body = last()
        if body is not None:
            yield encode_event(body)
    except JspecError as error:
        yield failure(error)


class EventStream(Response):
    """Sends `events`, awaits `close`, then sends `done`; `close` is awaited at the end in any case.

    A client that has read `done` may reuse this call's ids at once. So `close` runs before it,
    and its second run must not touch what came after. After the start of an answer its status can
    no longer report errors.
    """

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
