"""The scheduler: turns submitted requests into step plans, and step results into chunks.

It alone owns sequences, slots and pages. It plans with upper bounds, because the device runs ahead
of what the host has read. It knows no device, clock or asyncio. Plans run in order.

Finish, abort and retraction end a tenancy at once: its (slot, epoch) becomes stale and results for
it are dropped. Slot and pages are released with the last dispatched step that names them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered

from jspec.config.limits import ServeLimits
from jspec.errors import InvariantError, SequenceError
from jspec.messages.adapter import Adapter
from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.protocols import TextStream
from jspec.messages.request import Request, StreamChunk
from jspec.scheduler.adapters import by_lora
from jspec.scheduler.blame import blame, blaming
from jspec.scheduler.data_ranks import DataRanks
from jspec.scheduler.decode_planner import DecodePlanner
from jspec.scheduler.outputs.token_history import Piece, Tally
from jspec.scheduler.pages import budget
from jspec.scheduler.prefill_planner import PrefillPlanner
from jspec.scheduler.prefilling import Prefilling
from jspec.scheduler.results import Flight, RoundReader, check_result, text_failure
from jspec.scheduler.sequence import Sequence, SequenceState
from jspec.scheduler.shapes.shape_choice import FixedShape, ShapeChooser, tell
from jspec.scheduler.stats import SchedulerStats, Totals
from jspec.scheduler.waiting import WaitingQueue

LOGGER = logging.getLogger("jspec.scheduler")
ABORTED = "aborted by request"


class Scheduler:
    """Plans steps within `limits`, and takes in their results."""

    def __init__(
        self,
        limits: ServeLimits,
        *,
        make_stream: Callable[[Request], TextStream],
        shapes: ShapeChooser | None = None,  # None: always the engine's own shape
    ) -> None:
        self._limits = limits
        self._max_pending = limits.max_pending
        self._shapes = shapes or FixedShape(limits.draft_shape)
        self._make_stream = make_stream
        self._epochs = [0] * limits.pool.all_slots
        self._waiting = WaitingQueue(limits)
        self._prefilling = Prefilling(limits)
        self._sequences: dict[str, Sequence] = {}  # all unfinished ones
        self._in_flight: deque[Flight] = deque()
        self._num_steps = 0
        self._totals = Totals(tally=Tally(limits.draft_shape))
        self._pieces: list[Piece] = []  # of the result being read
        self._num_lost = 0  # steps in flight whose results will be dropped
        self._is_stuck = False
        ranks = DataRanks(limits, self._totals, self._prefilling, epochs=self._epochs)
        self._decodes = DecodePlanner(limits, ranks, retract=self._retract, shapes=self._shapes)
        self._use(ranks)

    def _use(self, ranks: DataRanks) -> None:
        self._ranks, self._table = ranks, ranks.table
        self._prefills = PrefillPlanner(self._limits, self._prefilling, ranks, self._waiting)
        self._reader = RoundReader(
            ranks.table, self._totals, own=self._limits.draft_shape, finish=self._finish
        )
        self._decodes.use(ranks)

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def num_queued(self) -> int:
        return len(self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        """Statistics, exact between turns. Another thread may read them, even during a turn."""
        running = by_lora(self._ranks.running)
        return SchedulerStats(
            num_queued=self.num_queued,
            num_callers_waiting=self._waiting.num_callers,
            most_rows_of_a_caller=self._waiting.most_rows,
            running_by_lora=running,
            waiting_by_lora=by_lora(self._sequences.values()) - running,
            num_leaked_pages=self._ranks.num_leaked,
            num_steps_in_flight=len(self._in_flight) + self._num_lost,
            num_steps=self._num_steps - len(self._in_flight) - self._num_lost,
            shapes=self._shapes.totals,
            num_shared_keys=self._decodes.num_shared_keys,
            **self._ranks.counts(),
            **self._totals.by_name(),
        )

    # Submission and early end of requests.

    def enqueue(self, requests: Ordered[Request]) -> None:
        """Queue all requests or none, clipping lengths. Raises RequestError or QueueFullError."""
        call = self._totals.num_requests  # a caller of its own, unless the client names one
        lengths = budget.check_batch(
            self._limits, requests, in_use=self._sequences, num_queued=len(self._waiting)
        )
        sequences = [
            Sequence.begin(
                request,
                arrival=call + i,
                caller=call if request.caller is None else request.caller,
                max_new_tokens=max_new_tokens,
                stream=self._make_stream(request),
                draft_shape=self._limits.draft_shape,
            )
            for i, (request, max_new_tokens) in enumerate(zip(requests, lengths, strict=True))
        ]
        for sequence in sequences:
            self._totals.num_requests += 1
            self._totals.num_prompt_tokens += sequence.prompt_len
            self._sequences[sequence.request.request_id] = sequence
            if sequence.num_emitted:  # by another engine: it had a slot there
                self._waiting.push_back(sequence)
            else:
                self._waiting.push(sequence)

    def abort(self, request_id: str) -> StreamChunk | None:
        piece = self.end(request_id)
        return None if piece is None else piece.chunk()

    def end(self, request_id: str, *, why: str = ABORTED, is_slow: bool = False) -> Piece | None:
        """Abort a request and return its last piece with withheld text, or None if unknown.
        is_slow: its reader left too many chunks unread."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.tenancy is None:
            self._waiting.remove(sequence)
        self._finish(sequence)
        self._totals.num_aborted += 1
        self._totals.num_slow_readers += is_slow
        try:
            return sequence.abort(why)
        except Exception as error:  # a text may raise anything; only this request ends
            return sequence.broken(f"{why}; {text_failure(sequence.request, error)}")

    def uses(self, lora: Adapter) -> bool:
        return any(sequence.request.lora == lora for sequence in self._sequences.values())

    def expire(self, request_ids: Ordered[str]) -> bool:
        """End these known requests if none of them ever ran; return whether they were ended."""
        waiting = [self._sequences[name] for name in request_ids]
        if any(each.tenancy is not None or each.num_retractions for each in waiting):
            return False
        for name in request_ids:
            self.end(name)
        return True

    def fail(self) -> None:
        """Drop the steps in flight and the pages that they wrote, and requeue all rows."""
        try:
            if self._in_flight:
                for seats in self._ranks.all:
                    seats.pages.withdraw(self._in_flight[0].plan.step)
            self._in_flight.clear()
            self._table.unread[:] = 0
            for tenancy in self._ranks.tenancies:
                if tenancy.ended:
                    self._ranks.of(tenancy).release(tenancy)
            for sequence in reversed(self._ranks.running):
                self._retract(sequence, keeps_pages=False)
        except Exception:  # the bookkeeping is inconsistent and no longer needed: reset it
            LOGGER.exception("internal error; no request ends")
            self._totals.num_faults += 1
            self._in_flight.clear()
            self._start_again()

    def lose(self, *, most: int) -> list[str]:
        """Handle a runner restart; return the requests that were in lost steps `most` times."""
        lost = {
            tenancy.sequence.request.request_id: tenancy.sequence
            for flight in self._in_flight
            for tenancy in flight.tenancies
            if not tenancy.ended
        }
        self.fail()
        self._num_lost = 0
        self._ranks.flush()
        self._totals.num_restarts += 1
        for sequence in lost.values():
            sequence.num_losses += 1
        return [name for name, sequence in lost.items() if sequence.num_losses >= most]

    # The prefix cache.

    def flush_cache(self) -> bool:
        """Empty the prefix cache. While there are requests, do nothing and return False."""
        if self._sequences:
            return False
        self._ranks.flush()
        return True

    def set_weight_version(self, version: str, *, renames: bool = False) -> None:
        """Use only cached pages of these weights. renames: the weights stay, their name changes."""
        self._ranks.set_weight_version(version, renames=renames)
        for sequence in () if renames else self._waiting:
            sequence.forget_prompt()

    # Plans out.

    def plan(self) -> StepPlan | None:
        """Return the next step, which counts as in flight from here on and must be dispatched; None
        until a result is committed or a request is submitted."""
        if len(self._in_flight) > self._limits.scheduling.overlap_depth or self._num_lost:
            return None
        first, last = self._prefilling.packers(
            self._waiting,
            num_running=self._ranks.num_running,
            num_free_slots=self._ranks.num_free_slots,
        )
        step = self._num_steps + 1
        flight = (
            self._prefills.plan(first, step=step)
            or self._decodes.plan(step=step)
            or self._prefills.plan(last, step=step)
        )
        if flight is not None:
            self._mark_in_flight(flight)
            return flight.plan
        if self._sequences and not self._in_flight:
            raise InvariantError(
                f"nothing is in flight and nothing can be planned for {self._ranks.num_running} "
                f"running and {len(self._waiting)} waiting sequences; expected progress"
            )
        return None

    def _mark_in_flight(self, flight: Flight) -> None:
        """Update the state for a dispatched step, which counts only once all updates succeed."""
        plan, slots, table = flight.plan, flight.slots, self._table
        self._prefilling.count(plan)
        for chunk, tenancy in zip(plan.chunks, flight.tenancies, strict=False):
            with blaming(tenancy.sequence):
                self._prefilling.advance(tenancy, chunk)
                self._ranks.of(tenancy).pages.publish(tenancy, step=plan.step)
                table.decodes[chunk.row.slot] = chunk.is_final
        rounds, tokens = plan.decode_rounds(self._limits.scheduling)
        table.dispatched(slots, rounds=rounds, tokens=tokens)
        if plan.pending:
            table.pending[slots] = 0
        if self._max_pending and plan.shape.is_plain:
            table.pending[slots] += rounds
        self._num_steps = plan.step
        self._in_flight.append(flight)

    # Results in.

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[StreamChunk, ...]:
        return tuple([piece.chunk() for piece in self.read(plan, result)])

    def read(self, plan: StepPlan, result: StepResult) -> list[Piece]:
        """Apply the oldest step in flight; return a piece for each row and round that emitted, up
        to the row's end. Raises ResultError, without any change, for a result out of order or of
        the wrong shape."""
        if self._num_lost:
            self._num_lost -= 1
            return []
        oldest = self._in_flight[0].plan.step if self._in_flight else None
        check_result(self._limits, plan, result, oldest=oldest)
        flight, table = self._in_flight.popleft(), self._table
        rounds, tokens = plan.decode_rounds(self._limits.scheduling)
        table.collected(flight.slots, rounds=rounds, tokens=tokens)
        if rounds:
            tell(self._shapes, plan, result, drafts=table.drafts[flight.slots])
        for i in table.ended[flight.slots].nonzero()[0].tolist():
            if flight.tenancies[i].steps_in_flight == 0:
                self._ranks.of(flight.tenancies[i]).release(flight.tenancies[i])
        pieces = self._pieces
        for of_round in result.rounds:
            self._reader.read_round(flight, of_round, pieces)
        if self._limits.pool.windows:
            self._trim(flight)
        self._pieces, self._is_stuck = [], False
        return pieces

    def _trim(self, flight: Flight) -> None:
        for tenancy in flight.tenancies:
            try:
                if not tenancy.ended:
                    self._ranks.of(tenancy).pages.trim(tenancy, step=self._num_steps)
            except Exception as error:
                blame(error, tenancy.sequence)

    def timed(self, plan: StepPlan, seconds: float) -> None:
        self._shapes.timed(plan, seconds)
        self._prefilling.timed(plan, seconds)

    # Ends.

    def _retract(self, sequence: Sequence, *, keeps_pages: bool = True) -> None:
        self._waiting.leave(sequence)
        self._ranks.end(sequence, step=self._num_steps, keeps_pages=keeps_pages)
        self._wait_again(sequence)
        self._waiting.push_back(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        sequence.num_retractions += 1
        self._totals.num_retractions += 1

    def _finish(self, sequence: Sequence) -> None:
        if sequence.tenancy is not None:
            self._waiting.leave(sequence)
        self._ranks.end(sequence, step=self._num_steps)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.request.request_id]

    # Recovery from broken invariants.

    def contain(self, error: Exception, *, most: int) -> tuple[list[Piece], list[str]]:
        """Recover from an error of `plan`, `read` or `end`: reset all slots and pages, and prefill
        running requests again with their output. Steps in flight are lost; `plan` waits for them.

        Returns the pieces read before the error, and the requests to end: one that the error names,
        unless pages leaked, else the requests that ran, or the next one to run, once they were
        suspected `most` times. Raises `error` if there was neither a suspect nor a piece twice in a
        row.
        """
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            if piece.finish is not None:  # its reader sees it as finished
                self._sequences.pop(piece.history.request_id, None)
        suspects, is_sure = self._suspects(error)
        leads_on = bool(suspects or pieces)
        if self._is_stuck and not leads_on:
            raise error
        self._is_stuck = not leads_on
        self._totals.num_faults += 1
        self._start_again()
        for sequence in suspects:
            sequence.num_losses += 1
        return pieces, [
            sequence.request.request_id
            for sequence in suspects
            if is_sure or sequence.num_losses >= most
        ]

    def _suspects(self, error: Exception) -> tuple[list[Sequence], bool]:
        """Return the sequences that may have caused an error, and whether this is certain."""
        if isinstance(error, SequenceError):
            sequence = self._sequences.get(error.request_id)
            return ([] if sequence is None else [sequence]), not self._ranks.is_leaking
        alive = list(self._sequences.values())
        return [each for each in alive if each.tenancy is not None] or alive[:1], False

    def _start_again(self) -> None:
        waiting, self._waiting = self._waiting, WaitingQueue(self._limits)
        queued = [each for each in waiting if each.tenancy is None]
        for sequence in queued:
            if sequence.request.request_id in self._sequences:
                self._waiting.push(sequence)
        names = {sequence.request.request_id for sequence in queued}
        for name, sequence in reversed(self._sequences.items()):
            if name in names:
                continue
            if sequence.tenancy is not None:
                sequence.leave()
            self._prefilling.drop(sequence)
            self._wait_again(sequence)
            self._waiting.push_back(sequence)
        self._num_lost += len(self._in_flight)
        self._in_flight.clear()
        ranks = DataRanks(
            self._limits,
            self._totals,
            self._prefilling,
            epochs=self._epochs,
            weight_version=self._ranks.weight_version,
        )
        self._use(ranks)
