"""The scheduler: turns submitted requests into step plans, and step results into chunks.

It is the single owner of sequences, slots and pages. It plans with upper bounds, because the
device runs ahead of what the host has read. It knows no device, no clock and no asyncio, and it
does not care when its plans run, only that they run in order and that results come in order.

Finish, abort and retraction are one rule: the tenancy ends at once, its (slot, epoch) is stale
from then on, and results for it are dropped; slot and pages return when the last dispatched step
that names them has been collected.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered

from jspec.config.limits import ServeLimits
from jspec.errors import InvariantError, RequestError
from jspec.messages.plan import (
    Admission,
    PageGrant,
    PrefillChunk,
    RowRef,
    StepKind,
    StepPlan,
    StepResult,
)
from jspec.messages.protocols import TextStream
from jspec.messages.request import Request, StreamChunk
from jspec.scheduler import policy
from jspec.scheduler.decode_planner import DecodePlanner
from jspec.scheduler.pages import budget
from jspec.scheduler.pages.full_pages import FullPages, Hit
from jspec.scheduler.pages.window_pages import WindowPages
from jspec.scheduler.prefilling import Prefilling
from jspec.scheduler.results import Flight, Lineup, RoundReader, check_result, text_failure
from jspec.scheduler.row_table import RowTable
from jspec.scheduler.sequence import Sequence, SequenceState, Tenancy
from jspec.scheduler.shapes.shape_choice import FixedShape, ShapeChooser, tell
from jspec.scheduler.stats import SchedulerStats, Totals
from jspec.scheduler.token_history import Piece, Tally
from jspec.scheduler.waiting import WaitingQueue
from jspec.spec import indexing

ABORTED = "aborted by request"


class Scheduler:
    """Plans steps within `limits`; `make_stream` gives each request its text, `shapes` each decode
    its shape (None: always the engine's own)."""

    def __init__(
        self,
        limits: ServeLimits,
        *,
        make_stream: Callable[[Request], TextStream],
        shapes: ShapeChooser | None = None,
    ) -> None:
        self._limits = limits
        self._deferred_tokens = limits.deferred_tokens
        self._shapes = shapes or FixedShape(limits.spec)
        self._make_stream = make_stream
        self._windows = WindowPages(limits)
        self._pages = FullPages(limits, self._windows)
        self._table = RowTable.empty(limits)
        self._free_slots = list(range(1, limits.num_slots + 1))  # a heap: lowest slot first
        self._epochs = [0] * (limits.num_slots + 1)
        self._waiting = WaitingQueue(limits)
        self._running: dict[str, Sequence] = {}  # in order of arrival
        self._prefilling = Prefilling(limits)
        self._sequences: dict[str, Sequence] = {}  # all unfinished ones
        self._tenancies: dict[RowRef, Tenancy] = {}  # whatever still holds a slot
        self._in_flight: deque[Flight] = deque()
        self._num_steps = 0
        self._totals = Totals(tally=Tally(limits.spec))
        self._reader = RoundReader(self._table, self._totals, finish=self._finish)
        self._decodes = DecodePlanner(
            limits,
            self._table,
            self._pages,
            self._windows,
            running=self._running,
            tenancies=self._tenancies,
            retract=self._retract,
            shapes=self._shapes,
        )

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        """Exact between turns; another thread may read it at any time, and see half of one."""
        tenancies = tuple(self._tenancies.values())
        return SchedulerStats(
            num_running=len(self._running),
            num_queued=self.num_queued,
            num_pages=self._pages.num_pages,
            num_free_pages=self._pages.num_free,
            num_cached_pages=self._pages.num_cached,
            num_leaked_pages=self._pages.num_leaked(tenancies) + self._windows.num_leaked,
            num_free_window_pages=self._windows.num_free,
            num_cached_window_pages=self._windows.num_cached,
            num_steps_in_flight=len(self._in_flight),
            num_steps=self._num_steps - len(self._in_flight),
            shapes=self._shapes.totals,
            num_shared_keys=self._decodes.num_shared_keys,
            **self._totals.by_name(),
        )

    # Requests in, and out before their time.

    def submit(self, request: Request) -> None:
        """Queues a request. max_new_tokens is bounded (budget.clip_max_new_tokens).

        Raises:
            RequestError: its id is in use, or it can never run (budget).
            QueueFullError: max_queued_requests are waiting.
        """
        name = request.request_id
        if name in self._sequences:
            raise RequestError(f"request_id is {name!r}; expected one that is not in use")
        max_new_tokens = budget.check_request(self._limits, request)
        budget.check_queue(self._limits, request, num_queued=len(self._waiting))
        sequence = Sequence.begin(
            request,
            arrival=self._totals.num_requests,
            max_new_tokens=max_new_tokens,
            stream=self._make_stream(request),
            spec=self._limits.spec,
        )
        self._totals.num_requests += 1
        self._totals.num_prompt_tokens += sequence.prompt_len
        self._sequences[name] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: str) -> StreamChunk | None:
        """As `end`, with the text made here and now."""
        piece = self.end(request_id)
        return None if piece is None else piece.chunk()

    def end(self, request_id: str, *, why: str = ABORTED, is_slow: bool = False) -> Piece | None:
        """Aborts a request now; its last piece has the text held back. None if it is not there.

        is_slow: because nobody reads its chunks.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.tenancy is None:
            self._waiting.remove(sequence)
        self._totals.num_aborted += 1
        self._totals.num_slow_readers += is_slow
        self._finish(sequence)
        try:
            return sequence.abort(why)
        except Exception as error:  # a text may raise anything, and this request alone ends of it
            return sequence.broken(f"{why}; {text_failure(sequence.request, error)}")

    def expire(self, request_ids: Ordered[str]) -> bool:
        """Ends requests that are all there, if none of them ever ran; whether it did."""
        waiting = [self._sequences[name] for name in request_ids]
        if any(each.tenancy is not None or each.num_retractions for each in waiting):
            return False
        for name in request_ids:
            self.end(name)
        return True

    def fail(self) -> None:
        """The runner failed: the steps in flight are lost, and no row will find what they wrote.

        Rows go back to the queue with what was read of them.
        """
        if self._in_flight:
            self._pages.withdraw(self._in_flight[0].plan.step)
        self._in_flight.clear()
        self._table.unread[:] = 0
        for tenancy in tuple(self._tenancies.values()):
            if tenancy.ended:
                self._release(tenancy)
        for sequence in reversed(tuple(self._running.values())):
            self._retract(sequence, keeps_pages=False)

    def lose(self, *, most: int) -> list[str]:
        """The runner failed and is begun anew: as `fail`, and nothing that was cached is found.

        Returns the requests that were in the steps in flight, now and before, `most` times.
        """
        lost = {
            tenancy.sequence.request.request_id: tenancy.sequence
            for flight in self._in_flight
            for tenancy in flight.tenancies
            if not tenancy.ended
        }
        self.fail()
        self._pages.flush()
        self._totals.num_restarts += 1
        for sequence in lost.values():
            sequence.num_losses += 1
        return [name for name, sequence in lost.items() if sequence.num_losses >= most]

    # The prefix cache.

    def flush_cache(self) -> bool:
        """Empties it. False, and nothing happens, while there are requests."""
        if self._sequences:
            return False
        self._pages.flush()
        return True

    def set_weight_version(self, version: str, *, renames: bool = False) -> None:
        """Rows find, add and keep nothing of other weights from now on. renames: only a name."""
        self._pages.set_weight_version(version, renames=renames)
        for sequence in () if renames else self._waiting:
            sequence.forget_prompt()

    # Plans out.

    def plan(self) -> StepPlan | None:
        """The next step, to be dispatched at once: its rows count as in flight from here on.

        None when nothing can be dispatched before a result is committed (overlap_depth steps are
        already unread, or every row waits for one) or a request is submitted.
        """
        if len(self._in_flight) > self._limits.overlap_depth:
            return None
        first, last = self._prefilling.packers(
            self._waiting, num_running=len(self._running), num_free_slots=len(self._free_slots)
        )
        flight = (
            self._plan_prefill(first)
            or self._decodes.plan(step=self._num_steps + 1)
            or self._plan_prefill(last)
        )
        if flight is not None:
            self._mark_in_flight(flight)
            return flight.plan
        if self._sequences and not self._in_flight:
            raise InvariantError(
                f"nothing is in flight and nothing can be planned for {len(self._running)} "
                f"running and {len(self._waiting)} waiting sequences; expected progress"
            )
        return None

    def _plan_prefill(self, packer: policy.ChunkPacker) -> Flight | None:
        chunks: list[PrefillChunk] = []
        admissions: list[Admission] = []
        grants: list[PageGrant] = []
        for tenancy in self._prefilling.tenancies:
            if packer.has_room:
                chunks.append(packer.pack(tenancy))
                grants += self._grant_for_chunk(tenancy, chunks[-1])
        while packer.has_room and self._waiting and self._free_slots:
            hit = self._hit_of(self._waiting.head)
            if hit is None:
                break
            tenancy = self._admit(self._waiting.pop(), hit)
            admissions.append(tenancy.admission)
            chunks.append(packer.pack(tenancy))
            grants += self._windows.grants(tenancy)
            grants += self._grant_for_chunk(tenancy, chunks[-1])
        if not chunks:
            return None
        lineup = Lineup.of(self._tenancies[chunk.row] for chunk in chunks)
        plan = StepPlan(
            step=self._num_steps + 1,
            kind=StepKind.PREFILL,
            features=lineup.features,
            admissions=tuple(admissions),
            chunks=tuple(chunks),
            grants=tuple(grants),
            constraints=lineup.constraints,
        )
        return Flight(plan, lineup)

    def _grant_for_chunk(self, tenancy: Tenancy, chunk: PrefillChunk) -> list[PageGrant]:
        """In the window spaces; those of the full one came with the admission."""
        end = chunk.start + len(chunk.token_ids) + chunk.is_final * self._limits.spec.num_root_rows
        return self._windows.grow(tenancy, indexing.num_pages(end, self._limits.page_size))

    def _mark_in_flight(self, flight: Flight) -> None:
        plan, slots, table = flight.plan, flight.slots, self._table
        self._num_steps = plan.step
        self._prefilling.count(plan)
        self._in_flight.append(flight)
        for chunk, tenancy in zip(plan.chunks, flight.tenancies, strict=False):
            self._prefilling.advance(tenancy, chunk)
            self._pages.publish(tenancy, step=plan.step)
            self._windows.trim(tenancy)
            table.decodes[chunk.row.slot] = chunk.is_final
        rounds, tokens = plan.decode_rounds(self._limits)
        table.dispatched(slots, rounds=rounds, tokens=tokens)
        if plan.owed:
            table.owed[slots] = 0
        if self._deferred_tokens and plan.spec(self._limits).is_plain:
            table.owed[slots] += rounds

    # Results in.

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[StreamChunk, ...]:
        """As `read`, with the text made here and now."""
        return tuple([piece.chunk() for piece in self.read(plan, result)])

    def read(self, plan: StepPlan, result: StepResult) -> list[Piece]:
        """Applies the oldest step in flight; returns a piece for each row and round that emitted.

        The rounds after a row's end are dropped: pieces and counters are those of single rounds.
        Raises InvariantError for a result out of order or of the wrong shape.
        """
        oldest = self._in_flight[0].plan.step if self._in_flight else None
        check_result(self._limits, plan, result, oldest=oldest)
        flight, table = self._in_flight.popleft(), self._table
        rounds, tokens = plan.decode_rounds(self._limits)
        table.collected(flight.slots, rounds=rounds, tokens=tokens)
        if rounds:
            tell(self._shapes, plan, result, drafts=table.drafts[flight.slots])
        for i in table.ended[flight.slots].nonzero()[0].tolist():
            if flight.tenancies[i].steps_in_flight == 0:
                self._release(flight.tenancies[i])
        pieces: list[Piece] = []
        for of_round in result.rounds:
            pieces += self._reader.read_round(flight, of_round)
        if self._limits.windows:
            for tenancy in flight.tenancies:
                if not tenancy.ended:
                    self._pages.trim(tenancy, step=self._num_steps)
        return pieces

    def timed(self, plan: StepPlan, seconds: float) -> None:
        """How long the device took for a step that is about to be read."""
        self._shapes.timed(plan, seconds)
        self._prefilling.timed(plan, seconds)

    # Tenancies: admit, end, release.

    def _hit_of(self, newcomer: Sequence) -> Hit | None:
        """What the head of the queue finds cached if it may be admitted now, else None."""
        running = tuple(self._running.values())
        hit = self._pages.find(newcomer)
        num_free = self._pages.num_free + hit.num_in_use
        fits = policy.may_admit(self._limits, newcomer, running, num_free_pages=num_free)
        if not (fits and self._windows.may_admit(newcomer)):
            return None
        return None if self._pages.waits(newcomer, hit, self._prefilling.tenancies) else hit

    def _admit(self, sequence: Sequence, hit: Hit) -> Tenancy:
        slot = heapq.heappop(self._free_slots)
        self._epochs[slot] += 1
        num_pages = budget.pages_for_admission(
            self._limits, sequence.num_tokens, num_tokens_left=sequence.num_tokens_left
        )
        tenancy = Tenancy.begin(RowRef(slot, self._epochs[slot]), sequence, self._table)
        self._pages.admit(tenancy, hit, num_pages)
        self._table.pages[slot] = len(tenancy.page_ids)
        self._totals.num_cached_tokens += 0 if sequence.num_retractions else tenancy.cached_len
        self._tenancies[tenancy.row] = tenancy
        self._running[sequence.request.request_id] = sequence
        self._decodes.changed()
        sequence.tenancy = tenancy
        self._prefilling.add(sequence)
        return tenancy

    def _retract(self, sequence: Sequence, *, keeps_pages: bool = True) -> None:
        """Back to the front of the queue, output kept; prompt and output will be filled again."""
        self._end_tenancy(sequence, keeps_pages=keeps_pages)
        sequence.state = SequenceState.WAITING
        sequence.num_retractions += 1
        self._totals.num_retractions += 1
        self._waiting.push_back(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self._end_tenancy(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.request.request_id]

    def _end_tenancy(self, sequence: Sequence, *, keeps_pages: bool = True) -> None:
        if sequence.tenancy is None:
            return
        del self._running[sequence.request.request_id]
        self._decodes.changed()
        self._prefilling.drop(sequence)
        if keeps_pages:
            self._pages.keep(sequence.tenancy, step=self._num_steps)
        tenancy = sequence.leave()
        self._table.ended[tenancy.row.slot] = True
        self._table.decodes[tenancy.row.slot] = False
        if tenancy.steps_in_flight == 0:
            self._release(tenancy)

    def _release(self, tenancy: Tenancy) -> None:
        del self._tenancies[tenancy.row]
        self._pages.release(tenancy, step=self._num_steps)
        heapq.heappush(self._free_slots, tenancy.row.slot)
