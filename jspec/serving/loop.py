"""The engine's loop: the only asyncio of the project.

It drives plan → dispatch → collect → commit and hands chunks to consumers. Every call to the
runner happens on one engine thread; everything else, the scheduler included, on the event loop,
which never blocks. It decides nothing about scheduling, and it sees no token.

    overlap depth 1        engine thread                        event loop
    turn n                 dispatch t+1, then collect t         publish t-1
                           (the device goes on with t+1)        commit t, plan t+2
    turn n + 1             dispatch t+2, then collect t+1       publish t
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from jspec.errors import (
    ConfigError,
    EngineClosedError,
    QueueTimeoutError,
    RequestFailedError,
    RunnerError,
    clear_frames,
)
from jspec.messages.plan import StepPlan
from jspec.messages.protocols import Runner
from jspec.messages.request import DEFAULT_VERSION, Request
from jspec.scheduler.scheduler import ABORTED, Scheduler
from jspec.scheduler.stats import SchedulerStats
from jspec.scheduler.token_history import Piece
from jspec.serving.chunk_stream import ChunkStream
from jspec.serving.mailbox import Mailbox, Waiting, wake
from jspec.serving.recovery import MOST_LOSSES, Recovery, RestartLimits
from jspec.serving.request_trace import FirstTokens, RequestTrace
from jspec.serving.runner_calls import RunnerCalls
from jspec.serving.trace import BusyClock, TraceEvent
from jspec.serving.weight_update_gate import Visit, Visits

LOGGER = logging.getLogger("jspec.scheduler")
SLOW_READER = "aborted: its reader left too much unread"


class EngineLoop:
    """Runs `scheduler` against `runner`. Call it from one event loop; the task starts by itself.
    Only the chunks may be read elsewhere.

    trace: a list of the caller's, to which every call of the runner is appended.
    queue_time_limit: seconds that a call may wait before its first request runs; None: any number.
    restarts: how often a runner that fails is begun anew. Streams stay open meanwhile, and go on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        trace: list[TraceEvent] | None = None,
        queue_time_limit: float | None = None,
        restarts: RestartLimits | None = None,
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
        self._queues: dict[str, Mailbox] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._unpublished: list[Piece] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_paused = False
        self._visits = Visits()
        self._weight_version = DEFAULT_VERSION
        self._cause: BaseException | None = None
        self._busy = BusyClock()
        self._recovery = Recovery(restarts)
        self._loss: RunnerError | None = None
        self._released: Future[None] | None = None

    @property
    def busy_seconds(self) -> float:
        """Seconds during which a step was in flight, idle time left out."""
        return self._busy.seconds

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    @property
    def num_queued(self) -> int:
        """Of `stats`, which counts much more."""
        return self._scheduler.num_queued

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that are waiting or running."""
        return tuple(self._queues)

    @property
    def is_closed(self) -> bool:
        """Whether no request is taken any more: after close(), or after the runner failed."""
        return self._is_closing

    @property
    def is_restarting(self) -> bool:
        """Whether the runner is lost, and begun anew; requests are taken, and wait."""
        return self._loss is not None or self._recovery.is_running

    def runner_ended(self, why: str) -> None:
        """The runner is known to be lost, though nothing may run."""
        if not self._is_closing:
            self._loss = RunnerError(why)
            self._start()

    def submit_call(
        self, requests: Sequence[Request], *, max_unread: int | None = None
    ) -> list[ChunkStream]:
        """Queues the requests of one call (`submit` of each), which wait as one: once one of them
        has run, the others may wait for any time; else none is left of them after the limit."""
        streams = [self.submit(request, max_unread=max_unread) for request in requests]
        if self._queue_time_limit is not None:
            queues = {each.request_id: self._queues[each.request_id] for each in requests}
            running = asyncio.get_running_loop()
            running.call_later(self._queue_time_limit, self._expire, self._queue_time_limit, queues)
        return streams

    def submit(self, request: Request, *, max_unread: int | None = None) -> ChunkStream:
        """Queues a request, without a time limit, and returns its chunks. Raises at once, not at
        the first chunk:

        max_unread: chunks that its reader may leave unread; then it is aborted. None: any number.
        RequestError and QueueFullError (Scheduler.submit), EngineClosedError.
        """
        if self._is_closing:
            raise self._closed_error(f"request {request.request_id!r} came after it was closed")
        self._scheduler.submit(request)
        if self._calls.first_tokens is not None:
            self._calls.first_tokens.submitted(request.request_id, time.monotonic())
        queue = Mailbox(max_unread)
        self._queues[request.request_id] = queue
        self._start()
        return ChunkStream(self, request.request_id, queue)

    def trace_requests(self, trace: RequestTrace) -> None:
        """From now on marks in `trace` what requests pass here."""
        self._calls.first_tokens = FirstTokens(trace)

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="jspec-engine-loop"
            )
        self._wake.set()

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

    async def between_steps(self, visit: Visit) -> None:
        """Awaits `visit` once no step is in flight; none is planned before it ends (Visits.ask).
        Raises its error, or EngineClosedError if the engine ends first."""
        if self._is_closing:
            raise self._closed_error("nothing runs between its steps")
        ended = self._visits.ask(visit)
        self._start()
        await ended

    @property
    def weight_version(self) -> str:
        return self._weight_version

    def set_weight_version(self, version: str, *, renames: bool = False) -> None:
        """Other weights are in force, or (`renames`) the same under another name. In a visit.

        Rows go back to the queue: prompt and output are filled anew, by the new weights.
        """
        if not renames:
            self._scheduler.fail()  # which loses nothing here: no step is in flight
        self._scheduler.set_weight_version(version, renames=renames)
        self._weight_version = version

    def abort(self, request_id: str, *, why: str = ABORTED) -> bool:
        """Ends a request; its stream gets a last chunk with ABORT. False if it is not there."""
        piece = self._scheduler.end(request_id, why=why)
        if piece is None:
            return False
        self._unpublished.append(piece)  # after what was committed before it
        self._publish()
        return True

    def _expire(self, limit: float, queues: dict[str, Mailbox]) -> None:
        """Ends the requests of a call if all are still in the queue; later ones of an id stay."""
        is_whole = all(self._queues.get(name) is queue for name, queue in queues.items())
        if is_whole and self._scheduler.expire(tuple(queues)):
            for name in queues:
                del self._queues[name]
            wake([queue.put(QueueTimeoutError(name, limit)) for name, queue in queues.items()])

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
        self._runner.give_up()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        await asyncio.wait({asyncio.wrap_future(self._release())})

    def _release(self) -> Future[None]:
        """Closes the runner after what its thread still does, and then ends that thread."""
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
            clear_frames(error)  # they hold what the device was given
            self._scheduler.fail()
            self._end_streams("its loop died")
        finally:  # also when the event loop is torn down and cancels this task
            self._is_closing = True
            self._busy.stop()
            self._end_streams("its event loop ended")
            self._release()

    async def _act(self) -> None:
        """One turn, one visit, or the wait for something to do."""
        if self._loss is not None and not self._in_flight:
            raise self._loss
        is_held = self._is_paused or self._visits
        plan = None if is_held else self._scheduler.plan()
        if self._visits and not self._in_flight:
            self._publish()
            run = asyncio.get_running_loop().run_in_executor
            await self._visits.run_next(partial(run, self._engine_thread))
        elif plan is None and not self._in_flight:
            self._publish()
            self._busy.stop()
            await self._wake.wait()
            self._busy.start()
        else:
            await self._turn(plan)

    async def _recover(self, error: RunnerError) -> None:
        """Begins the runner anew; what ran goes on after what was read of it."""
        self._loss = None
        self._publish()
        self._in_flight.clear()
        self._calls.lose_steps()
        LOGGER.error("%s; requests that wait for it: %d", error, len(self._queues))
        failed = self._scheduler.lose(most=MOST_LOSSES)
        clear_frames(error)
        for name in failed:
            self._scheduler.end(name)
            why = f"request {name!r} ran each of {MOST_LOSSES} times that the engine failed"
            failure = RequestFailedError(why, f"; the last time: {error}")
            wake([self._queues.pop(name).put(failure)])
        await self._recovery.run(error, self._restart, is_closing=lambda: self._is_closing)

    async def _restart(self) -> None:
        run = asyncio.get_running_loop().run_in_executor
        await run(self._engine_thread, self._runner.restart)
        self._loss = None  # of the one before

    async def _turn(self, plan: StepPlan | None) -> None:
        """One hop to the engine thread: dispatch `plan`, then collect if enough is in flight.

        Meanwhile what the turn before has committed goes to its readers.
        """
        if plan is not None:
            self._in_flight.append(plan)
            if self._calls.first_tokens is not None:
                self._calls.first_tokens.planned(plan, time.monotonic())
        is_full = len(self._in_flight) > self._scheduler.limits.overlap_depth
        collects = plan is None or is_full
        turn = asyncio.get_running_loop().run_in_executor(
            self._engine_thread, self._calls.run, plan, collects
        )
        self._publish()
        result = await turn
        if result is not None:
            plan = self._in_flight.popleft()
            self._scheduler.timed(plan, self._calls.steps.seconds(plan.step))
            self._unpublished += self._scheduler.read(plan, result)
            if self._calls.first_tokens is not None:
                self._calls.first_tokens.committed(result.step, time.monotonic())

    def _publish(self) -> None:
        """What was committed goes to its readers; the last piece of a request ends its stream."""
        pieces, self._unpublished = self._unpublished, []
        if not pieces:
            return
        readers: list[Waiting | None] = []
        slow: list[str] = []
        for piece in pieces:
            name = piece.transcript.request_id
            queue = self._queues[name] if piece.finish is None else self._queues.pop(name)
            readers.append(queue.put(piece))
            if queue.is_full and piece.finish is None and name not in slow:
                slow.append(name)
        wake(readers)
        for name in slow:
            self._end_slow(name)

    def _end_slow(self, name: str) -> None:
        """Nobody reads what this request makes: it makes no more."""
        piece = self._scheduler.end(name, why=SLOW_READER, is_slow=True)
        if piece is not None:
            LOGGER.warning("request %s was %s", name, SLOW_READER)
            wake([self._queues.pop(name).put(piece)])

    def _end_streams(self, why: str) -> None:
        """Ends every stream and every sequence; the steps in flight then count for nothing."""
        self._publish()
        readers: list[Waiting | None] = []
        for request_id, queue in self._queues.items():
            self._scheduler.end(request_id)
            error = self._closed_error(f"request {request_id!r} was not finished: {why}")
            readers.append(queue.put(error))
        self._queues.clear()
        wake(readers)
        self._visits.refuse(lambda: self._closed_error(why))

    def _closed_error(self, detail: str) -> EngineClosedError:
        because = "" if self._cause is None else f", because of {self._cause!r}"
        error = EngineClosedError(f"the engine is closed; {detail}", because)
        error.__cause__ = self._cause
        return error
