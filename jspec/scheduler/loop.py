"""The engine's loop: the only asyncio of the project.

It drives plan → dispatch → collect → commit and hands chunks to consumers. Every call to the
runner happens on one engine thread; everything else, the scheduler included, on the event loop,
which never blocks. It decides nothing about scheduling, and it sees no token.

    overlap depth 1        engine thread                        event loop
    turn n                 dispatch t+1, then collect t
                           (the device goes on with t+1)        commit t, publish, plan t+2
    turn n + 1             dispatch t+2, then collect t+1       ...
"""

from __future__ import annotations

import asyncio
import enum
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from jspec.core.errors import (
    ConfigError,
    EngineClosedError,
    JspecError,
    QueueTimeoutError,
    clear_frames,
)
from jspec.core.plan import StepPlan, StepResult
from jspec.core.protocols import Runner
from jspec.core.request import Request, StreamChunk
from jspec.scheduler.scheduler import Scheduler
from jspec.scheduler.stats import SchedulerStats


class Mailbox:
    """Chunks of one request on their way to its one reader, on whatever event loop that is.

    What was put wakes the reader's loop directly: a chunk costs no task and no second loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[StreamChunk | JspecError] = deque()
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def put(self, item: StreamChunk | JspecError) -> None:
        """From any thread; never waits for the reader."""
        with self._lock:
            self._items.append(item)
            reader, self._reader = self._reader, None
        if reader is not None:
            with suppress(RuntimeError):  # the reader's loop was closed: nobody reads any more
                reader[0].call_soon_threadsafe(_wake, reader[1])

    async def get(self) -> StreamChunk | JspecError:
        """The oldest item, as soon as there is one."""
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                event_loop = asyncio.get_running_loop()
                woken: asyncio.Future[None] = event_loop.create_future()
                self._reader = event_loop, woken
            await woken

    def get_ready(self) -> list[StreamChunk]:
        """The chunks that are there already, up to an error, which stays for `get`."""
        chunks: list[StreamChunk] = []
        with self._lock:
            while self._items and isinstance(self._items[0], StreamChunk):
                chunks.append(self._items[0])
                self._items.popleft()
        return chunks


def _wake(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)


class TraceKind(enum.Enum):
    DISPATCH = "dispatch"
    COLLECT = "collect"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One call to the runner; times are seconds of time.monotonic()."""

    kind: TraceKind
    step: int
    started: float
    ended: float


class BusyClock:
    """Seconds during which it ran, the current run included. Readable from any thread."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # before this run, its start

    @property
    def seconds(self) -> float:
        before, started = self._state
        return before if started is None else before + time.monotonic() - started

    def start(self) -> None:
        self._state = (self.seconds, time.monotonic())

    def stop(self) -> None:
        self._state = (self.seconds, None)


class ChunkStream(AsyncIterator[StreamChunk]):
    """The chunks of one request, up to and including the one with the finish reason.

    Whoever goes away aborts the request: by aclose(), by cancelling the wait for a chunk, or by
    dropping the last reference to the stream.

    Raises EngineClosedError, after the chunks that were committed, if the engine ends first, and
    QueueTimeoutError if the request waited too long.
    """

    def __init__(self, engine_loop: EngineLoop, request_id: str, queue: Mailbox) -> None:
        self._engine_loop = engine_loop
        self._request_id = request_id
        self._queue = queue
        self._is_done = False
        # Holds the loop and the queue, never the stream itself, which could then not be dropped.
        self._on_drop = weakref.finalize(
            self, engine_loop.abandon_soon, asyncio.get_running_loop(), request_id, queue
        )
        self._on_drop.atexit = False

    async def __anext__(self) -> StreamChunk:
        try:
            item = await self.receive()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if item is None:
            raise StopAsyncIteration
        return item

    async def receive(self) -> StreamChunk | None:
        """The next chunk, on any event loop; None after the last. Cancelling it aborts nothing."""
        if self._is_done:
            return None
        item = await self._queue.get()
        if isinstance(item, JspecError):
            self._end()
            raise item
        if item.finish is not None:
            self._end()
        return item

    def ready(self) -> list[StreamChunk]:
        """Further chunks that need no waiting, for who reads more slowly than they come."""
        chunks = [] if self._is_done else self._queue.get_ready()
        if chunks and chunks[-1].finish is not None:
            self._end()
        return chunks

    async def aclose(self) -> None:
        """Aborts the request unless it is finished. May be called twice."""
        if not self._is_done:
            self._end()
            self._engine_loop.abandon(self._request_id, self._queue)

    def _end(self) -> None:
        self._is_done = True
        self._on_drop.detach()


class EngineLoop:
    """Runs `scheduler` against `runner`. Call it from one event loop; the task starts by itself.
    Only the chunks may be read elsewhere.

    trace: a list of the caller's, to which every call of the runner is appended.
    queue_time_limit: seconds that a request may wait before it first runs; None: any number.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        trace: list[TraceEvent] | None = None,
        queue_time_limit: float | None = None,
    ) -> None:
        if scheduler.limits != runner.limits:
            raise ConfigError(
                f"the scheduler plans for {scheduler.limits}; expected the runner's {runner.limits}"
            )
        self._scheduler = scheduler
        self._runner = runner
        self._trace = trace
        self._queue_time_limit = queue_time_limit
        self._engine_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jspec-engine")
        self._queues: dict[str, Mailbox] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_paused = False
        self._cause: BaseException | None = None
        self._busy = BusyClock()
        self._released: Future[None] | None = None

    @property
    def busy_seconds(self) -> float:
        """Seconds during which a step was in flight, idle time left out."""
        return self._busy.seconds

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that are waiting or running."""
        return tuple(self._queues)

    @property
    def is_closed(self) -> bool:
        """Whether no request is taken any more: after close(), or after the runner failed."""
        return self._is_closing

    def submit(self, request: Request) -> ChunkStream:
        """Queues a request and returns its chunks. Raises at once, not at the first chunk:

        RequestError and QueueFullError (Scheduler.submit), EngineClosedError.
        """
        if self._is_closing:
            raise self._closed_error(f"request {request.request_id!r} came after it was closed")
        event_loop = asyncio.get_running_loop()
        self._scheduler.submit(request)
        queue = Mailbox()
        self._queues[request.request_id] = queue
        if self._task is None:
            self._task = event_loop.create_task(self._run(), name="jspec-engine-loop")
        self._wake.set()
        if self._queue_time_limit is not None:
            event_loop.call_later(self._queue_time_limit, self._expire, request.request_id, queue)
        return ChunkStream(self, request.request_id, queue)

    @property
    def is_paused(self) -> bool:
        """Whether no step is planned until `resume`; requests are taken and wait."""
        return self._is_paused

    def pause(self) -> None:
        """Plans no further step. Rows keep their slots and pages; steps in flight are read."""
        self._is_paused = True

    def resume(self) -> None:
        """Plans steps again."""
        self._is_paused = False
        self._wake.set()

    def abort(self, request_id: str) -> bool:
        """Ends a request; its stream gets a last chunk with ABORT. False if it is not there."""
        chunk = self._scheduler.abort(request_id)
        if chunk is None:
            return False
        self._publish(chunk)
        return True

    def _expire(self, request_id: str, queue: Mailbox) -> None:
        """Ends a request that is still in the queue; a later one of that id stays."""
        limit = self._queue_time_limit
        if limit is None or self._queues.get(request_id) is not queue:
            return
        if self._scheduler.expire(request_id):
            queue.put(QueueTimeoutError(request_id, limit))
            del self._queues[request_id]

    def flush_cache(self) -> bool:
        """Empties the prefix cache; False if requests are there (Scheduler.flush_cache)."""
        return self._scheduler.flush_cache()

    def abandon(self, request_id: str, queue: Mailbox) -> None:
        """Aborts the request of a consumer that went away; a later one of that id stays."""
        if self._queues.get(request_id) is queue:
            self.abort(request_id)

    def abandon_soon(
        self, event_loop: asyncio.AbstractEventLoop, request_id: str, queue: Mailbox
    ) -> None:
        """`abandon` from a finaliser, which may run on any thread and at any time."""
        if not event_loop.is_closed():
            event_loop.call_soon_threadsafe(self.abandon, request_id, queue)

    async def close(self) -> None:
        """Ends every stream with EngineClosedError, waits for the steps in flight, and stops.

        The runner has let go of the device when it returns.
        """
        self._is_closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        await asyncio.wait({asyncio.wrap_future(self._release())})

    def _release(self) -> Future[None]:
        """Closes the runner behind what its thread still does, and then ends that thread."""
        if self._released is None:
            try:
                self._released = self._engine_thread.submit(self._runner.close)
            except RuntimeError:  # the interpreter ends, and all that is held with it
                self._released = Future()
                self._released.set_result(None)
            self._engine_thread.shutdown(wait=False)
        return self._released

    async def _run(self) -> None:
        self._busy.start()
        try:
            while not self._is_closing:
                self._wake.clear()
                plan = None if self._is_paused else self._scheduler.plan()
                if plan is None and not self._in_flight:
                    self._busy.stop()
                    await self._wake.wait()
                    self._busy.start()
                else:
                    await self._turn(plan)
            self._end_streams("it was closed")
            while self._in_flight:
                await self._turn(None)
        except Exception as error:
            self._cause = error
            clear_frames(error)  # they hold what the device was given
            self._scheduler.fail()
            self._end_streams("its loop died")
        finally:  # also when the event loop is torn down and cancels this task
            self._is_closing = True
            self._busy.stop()
            self._end_streams("its event loop ended")
            self._release()

    async def _turn(self, plan: StepPlan | None) -> None:
        """One hop to the engine thread: dispatch `plan`, then collect if enough is in flight."""
        if plan is not None:
            self._in_flight.append(plan)
        is_full = len(self._in_flight) > self._scheduler.limits.overlap_depth
        event_loop = asyncio.get_running_loop()
        if plan is not None and not is_full:
            await event_loop.run_in_executor(self._engine_thread, self._dispatch, plan)
            return
        result = await event_loop.run_in_executor(
            self._engine_thread, self._dispatch_and_collect, plan
        )
        for chunk in self._scheduler.commit(self._in_flight.popleft(), result):
            self._publish(chunk)

    def _dispatch_and_collect(self, plan: StepPlan | None) -> StepResult:
        if plan is not None:
            self._dispatch(plan)
        started = time.monotonic()
        result = self._runner.collect()
        self._record(TraceKind.COLLECT, result.step, started)
        return result

    def _dispatch(self, plan: StepPlan) -> None:
        started = time.monotonic()
        self._runner.dispatch(plan)
        self._record(TraceKind.DISPATCH, plan.step, started)

    def _record(self, kind: TraceKind, step: int, started: float) -> None:
        if self._trace is not None:
            ended = time.monotonic()
            self._trace.append(TraceEvent(kind=kind, step=step, started=started, ended=ended))

    def _publish(self, chunk: StreamChunk) -> None:
        if chunk.finish is None:
            self._queues[chunk.request_id].put(chunk)
        else:
            self._queues.pop(chunk.request_id).put(chunk)

    def _end_streams(self, why: str) -> None:
        """Ends every stream and every sequence; the steps in flight then count for nothing."""
        for request_id, queue in self._queues.items():
            self._scheduler.abort(request_id)
            queue.put(self._closed_error(f"request {request_id!r} was not finished: {why}"))
        self._queues.clear()

    def _closed_error(self, detail: str) -> EngineClosedError:
        because = "" if self._cause is None else f" because of {self._cause!r}"
        error = EngineClosedError(f"the engine is closed{because}; {detail}")
        error.__cause__ = self._cause
        return error
