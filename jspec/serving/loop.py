"""The engine's loop: plan → dispatch → collect → commit, and delivery of chunks to readers.

Every call to the runner happens on the engine thread. Everything else, including the scheduler,
runs on an event loop, which never blocks. The loop makes no scheduling decisions and sees no token.

    overlap depth 1        engine thread                        event loop
    turn n                 dispatch t+1, then collect t         publish t-1
                           (the device runs t+1)                commit t, plan t+2
    turn n + 1             dispatch t+2, then collect t+1       publish t
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from jspec.errors import (
    ConfigError,
    EngineClosedError,
    QueueTimeoutError,
    ResultError,
    RunnerError,
    clear_frames,
)
from jspec.messages.adapter import Adapter
from jspec.messages.plan import StepPlan
from jspec.messages.protocols import Runner
from jspec.messages.request import DEFAULT_VERSION, Request
from jspec.scheduler.scheduler import ABORTED, Scheduler
from jspec.scheduler.stats import SchedulerStats
from jspec.serving.recovery import MOST_LOSSES, Recovery, RestartLimits
from jspec.serving.request_trace import FirstTokens, RequestTrace
from jspec.serving.runner_calls import RunnerCalls, StepInFlight
from jspec.serving.streams.chunk_stream import ChunkStream
from jspec.serving.streams.mailbox import Mailbox
from jspec.serving.streams.readers import Readers
from jspec.serving.trace import BusyClock
from jspec.serving.trace import TraceEvent as TraceEvent
from jspec.serving.trace import TraceKind as TraceKind
from jspec.serving.weight_update_gate import Update, WeightUpdateGate

LOGGER = logging.getLogger("jspec.scheduler")
Ask = Callable[[Callable[[], None]], Awaitable[None]]


async def call_here(function: Callable[[], None]) -> None:
    function()


class EngineLoop:
    """Runs `scheduler` against `runner`. Call it from one event loop; its task starts on demand.
    Only streams may be used elsewhere."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        trace: list[TraceEvent] | None = None,  # every runner call is appended
        queue_time_limit: float | None = None,  # seconds until the first request of a call runs
        restarts: RestartLimits | None = None,  # of a failed runner; streams stay open
        ask: Ask = call_here,  # calls a function on this event loop from a reader's loop
    ) -> None:
        if scheduler.limits != runner.limits:
            raise ConfigError(
                f"the scheduler plans for {scheduler.limits}; expected the runner's {runner.limits}"
            )
        self._scheduler = scheduler
        self._runner = runner
        self._calls = RunnerCalls(runner, trace)
        self._queue_time_limit = queue_time_limit
        self._engine_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jspec-engine")
        self._readers = Readers(scheduler)
        self._in_flight: deque[StepInFlight] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_paused = False
        self._update_gate = WeightUpdateGate()
        self._weight_version = DEFAULT_VERSION
        self._cause: BaseException | None = None
        self._busy = BusyClock()
        self._recovery = Recovery(restarts)
        self._loss: RunnerError | None = None
        self._released: Future[None] | None = None
        self._ask = ask

    @property
    def busy_seconds(self) -> float:
        return self._busy.seconds

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    @property
    def request_ids(self) -> tuple[str, ...]:
        return self._readers.names

    @property
    def is_closed(self) -> bool:
        return self._is_closing

    @property
    def is_restarting(self) -> bool:
        return self._loss is not None or self._recovery.is_running

    def runner_ended(self, why: str) -> None:
        if not self._is_closing:
            self._loss = RunnerError(why)
            self._start()

    def submit(
        self, requests: Sequence[Request], *, max_unread: int | None = None
    ) -> list[ChunkStream]:
        """Queue the requests of one call, all or none, and return their chunk streams.

        The queue time limit applies until one request of the call has run. max_unread: unread
        chunks after which a request is aborted. Raises RequestError, QueueFullError or
        EngineClosedError.
        """
        if self._is_closing:
            raise self._closed_error(f"request {requests[0].request_id!r} came after it was closed")
        self._readers.publish()  # frees the ids of requests that the scheduler has finished
        self._scheduler.enqueue(requests)
        queues = {
            each.request_id: self._readers.open(each.request_id, max_unread) for each in requests
        }
        if self._calls.first_tokens is not None:
            for request_id in queues:
                self._calls.first_tokens.submitted(request_id, time.monotonic())
        if self._queue_time_limit is not None:
            running = asyncio.get_running_loop()
            running.call_later(self._queue_time_limit, self._expire, self._queue_time_limit, queues)
        self._start()
        return [ChunkStream(self, request_id, queue) for request_id, queue in queues.items()]

    def trace_requests(self, trace: RequestTrace) -> None:
        self._calls.first_tokens = FirstTokens(trace)

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="jspec-engine-loop"
            )
        self._wake.set()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause(self) -> None:
        """Plan no further step. Rows keep slots and pages; steps in flight are read."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._wake.set()

    async def between_steps(self, update: Update) -> None:
        """Await `update` while no step is in flight; no step is planned before it ends. Raises its
        error, or EngineClosedError if the engine ends first."""
        if self._is_closing:
            raise self._closed_error("nothing runs between its steps")
        ended = self._update_gate.ask(update)
        self._start()
        await ended

    @property
    def weight_version(self) -> str:
        return self._weight_version

    def set_weight_version(self, version: str, *, renames: bool = False) -> None:
        """Set the version of new weights, for which rows return to the queue, or (`renames`) rename
        them. Call it in an update."""
        if not renames:
            self._scheduler.fail()  # it loses nothing, since no step is in flight
        self._scheduler.set_weight_version(version, renames=renames)
        self._weight_version = version

    def abort(self, request_id: str, *, why: str = ABORTED) -> bool:
        """End a request; its stream gets a last chunk with ABORT. Return False if unknown."""
        return self._readers.abort(request_id, why=why)

    def _expire(self, limit: float, queues: dict[str, Mailbox]) -> None:
        """End the requests of a call if all are still queued. A later request may reuse an id."""
        is_whole = all(self._readers.has(name, queue) for name, queue in queues.items())
        if is_whole and self._scheduler.expire(tuple(queues)):
            self._readers.close({name: QueueTimeoutError(name, limit) for name in queues})

    def uses(self, lora: Adapter) -> bool:
        return self._scheduler.uses(lora)

    def flush_cache(self) -> bool:
        return self._scheduler.flush_cache()

    async def abandon(self, request_id: str, queue: Mailbox) -> None:
        """Abort the request of a reader that is gone. Raises EngineClosedError."""
        await self._ask(partial(self._abandon, request_id, queue))

    def abandon_soon(
        self, event_loop: asyncio.AbstractEventLoop, request_id: str, queue: Mailbox
    ) -> None:
        """Like `abandon`, but from a finalizer, which may run on any thread at any time."""
        if not event_loop.is_closed():
            event_loop.call_soon_threadsafe(self._abandon, request_id, queue)

    def _abandon(self, request_id: str, queue: Mailbox) -> None:
        if self._readers.has(request_id, queue):  # a later one with the same id stays
            self.abort(request_id)

    async def close(self) -> None:
        """End every stream with EngineClosedError, and return once the device is released."""
        self._is_closing = True
        self._runner.give_up()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        await asyncio.wait({asyncio.wrap_future(self._release())})

    def _release(self) -> Future[None]:
        if self._released is None:
            try:
                self._released = self._engine_thread.submit(self._runner.close)
            except RuntimeError:  # the interpreter shuts down, which releases everything
                self._released = Future()
                self._released.set_result(None)
            self._engine_thread.shutdown(wait=False)
        return self._released

    async def _run(self) -> None:
        self._busy.start()
        try:
            while not self._is_closing:
                self._wake.clear()
                try:
                    await self._act()
                except RunnerError as error:
                    await self._recover(error)
            self._end_streams("it was closed")
            with suppress(RunnerError):
                while self._in_flight:
                    await self._turn(None)
        except Exception as error:
            self._cause = error
            clear_frames(error)  # they reference device buffers
            self._scheduler.fail()
            self._end_streams("its loop died")
        finally:  # also when the event loop is torn down and cancels this task
            self._is_closing = True
            self._in_flight.clear()  # handles keep device memory
            self._busy.stop()
            self._end_streams("its event loop ended")
            self._release()

    async def _act(self) -> None:
        if self._loss is not None and not self._in_flight:
            raise self._loss
        is_held = self._is_paused or self._update_gate
        try:
            plan = None if is_held else self._scheduler.plan()
        except Exception as error:
            self._readers.contain(error)
            await asyncio.sleep(0)  # the next plan may fail too: let other tasks run
            return
        if self._update_gate and not self._in_flight:
            self._readers.publish()
            run = asyncio.get_running_loop().run_in_executor
            await self._update_gate.run_next(partial(run, self._engine_thread))
        elif plan is None and not self._in_flight:
            self._readers.publish()
            self._busy.stop()
            await self._wake.wait()
            self._busy.start()
        else:
            await self._turn(plan)

    async def _recover(self, error: RunnerError) -> None:
        self._loss = None
        self._readers.publish()
        self._in_flight.clear()
        self._calls.lose_steps()
        LOGGER.error("%s; requests that wait for it: %d", error, len(self._readers))
        failed = self._scheduler.lose(most=MOST_LOSSES)
        clear_frames(error)
        for name in failed:
            why = f"request {name!r} ran each of {MOST_LOSSES} times that the engine failed"
            self._readers.fail(name, why, f"; the last time: {error}")
        await self._recovery.run(error, self._restart, is_closing=lambda: self._is_closing)

    async def _restart(self) -> None:
        run = asyncio.get_running_loop().run_in_executor
        await run(self._engine_thread, self._runner.restart)
        self._loss = None  # it concerned the former runner

    async def _turn(self, plan: StepPlan | None) -> None:
        new = None if plan is None else StepInFlight(plan)
        if new is not None:
            self._in_flight.append(new)
            if self._calls.first_tokens is not None:
                self._calls.first_tokens.planned(new.plan, time.monotonic())
        is_full = len(self._in_flight) > self._scheduler.limits.scheduling.overlap_depth
        oldest = self._in_flight[0] if new is None or is_full else None
        turn = asyncio.get_running_loop().run_in_executor(
            self._engine_thread, self._calls.run, new, oldest
        )
        self._readers.publish()
        result = await turn
        if oldest is not None and result is not None:
            self._in_flight.popleft()
            try:
                self._scheduler.timed(oldest.plan, oldest.seconds)
                self._readers.unpublished += self._scheduler.read(oldest.plan, result)
            except ResultError as error:
                raise RunnerError(str(error)) from error
            except Exception as error:
                self._readers.contain(error)
            if self._calls.first_tokens is not None:
                self._calls.first_tokens.committed(result.step, time.monotonic())

    def _end_streams(self, why: str) -> None:
        self._readers.fail_all(
            lambda name: self._closed_error(f"request {name!r} was not finished: {why}")
        )
        self._update_gate.refuse(lambda: self._closed_error(why))

    def _closed_error(self, detail: str) -> EngineClosedError:
        because = "" if self._cause is None else f", because of {self._cause!r}"
        error = EngineClosedError(f"the engine is closed; {detail}", because)
        error.__cause__ = self._cause
        return error
