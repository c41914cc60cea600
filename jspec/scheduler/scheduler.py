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
from collections.abc import Callable, Iterable

from jspec.core import shapes
from jspec.core.config import ServeLimits
from jspec.core.errors import InvariantError, RequestError
from jspec.core.features import PLAIN, StepFeatures
from jspec.core.plan import (
    Admission,
    PageGrant,
    PrefillChunk,
    RowRef,
    StepKind,
    StepPlan,
    StepResult,
)
from jspec.core.protocols import TextStream
from jspec.core.request import FinishKind, FinishReason, Request, StreamChunk
from jspec.scheduler import budget, policy
from jspec.scheduler.pages import FullPages, Hit
from jspec.scheduler.prefilling import Prefilling
from jspec.scheduler.results import check_result
from jspec.scheduler.sequence import (
    Cut,
    Sequence,
    SequenceState,
    Tenancy,
    count_verification,
    empty_counters,
    surviving_drafts,
)
from jspec.scheduler.stats import SchedulerStats, Totals
from jspec.scheduler.waiting import WaitingQueue
from jspec.scheduler.windows import WindowPages


class Scheduler:
    """Plans steps within `limits`; `make_stream` gives each request its text."""

    def __init__(
        self, limits: ServeLimits, *, make_stream: Callable[[Request], TextStream]
    ) -> None:
        self._limits = limits
        self._make_stream = make_stream
        self._pages = FullPages(limits)
        self._windows = WindowPages(limits)
        self._free_slots = list(range(1, limits.num_slots + 1))  # a heap: lowest slot first
        self._epochs = [0] * (limits.num_slots + 1)
        self._waiting = WaitingQueue(limits)
        self._running: dict[str, Sequence] = {}  # in order of arrival
        self._prefilling = Prefilling(limits)
        self._sequences: dict[str, Sequence] = {}  # all unfinished ones
        self._tenancies: dict[RowRef, Tenancy] = {}  # whatever still holds a slot
        self._in_flight: deque[StepPlan] = deque()
        self._num_steps = 0
        self._totals = Totals(counters=empty_counters(limits.spec))

    @property
    def limits(self) -> ServeLimits:
        return self._limits

    @property
    def stats(self) -> SchedulerStats:
        """Exact between turns; another thread may read it at any time, and see half of one."""
        tenancies = tuple(self._tenancies.values())
        return SchedulerStats(
            num_running=len(self._running),
            num_queued=len(self._waiting),
            num_pages=self._pages.num_pages,
            num_free_pages=self._pages.num_free,
            num_cached_pages=self._pages.num_cached,
            num_leaked_pages=self._pages.num_leaked(tenancies) + self._windows.num_leaked,
            num_free_window_pages=self._windows.num_free,
            num_steps_in_flight=len(self._in_flight),
            num_steps=self._num_steps - len(self._in_flight),
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
        max_new_tokens = budget.clip_max_new_tokens(
            self._limits, len(request.prompt_ids), request.sampling.max_new_tokens
        )
        budget.check_queue(self._limits, request, num_queued=len(self._waiting))
        sequence = Sequence(
            request=request,
            arrival=self._totals.num_requests,
            max_new_tokens=max_new_tokens,
            text_stream=self._make_stream(request),
            counters=empty_counters(self._limits.spec),
        )
        self._totals.num_requests += 1
        self._totals.num_prompt_tokens += sequence.prompt_len
        self._sequences[name] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: str) -> StreamChunk | None:
        """Ends a request now; its last chunk has the text held back. None if it is not there."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.tenancy is None:
            self._waiting.remove(sequence)
        self._totals.num_aborted += 1
        finish = FinishReason(kind=FinishKind.ABORT, message="aborted by request")
        self._finish(sequence)
        return sequence.chunk(Cut(ids=(), text=sequence.text_stream.flush(), finish=finish))

    def expire(self, request_id: str) -> bool:
        """Ends a request that still waits and never ran; whether it did."""
        sequence = self._sequences.get(request_id)
        has_run = sequence is None or sequence.tenancy is not None or sequence.num_retractions > 0
        return not has_run and self.abort(request_id) is not None

    def fail(self) -> None:
        """The runner failed: the steps in flight are lost, and no row will find what they wrote.

        Rows go back to the queue with what was read of them.
        """
        if self._in_flight:
            self._pages.withdraw(self._in_flight[0].step)
        self._in_flight.clear()
        for tenancy in tuple(self._tenancies.values()):
            tenancy.steps_in_flight = tenancy.rounds_in_flight = 0
            if tenancy.ended:
                self._release(tenancy)
        for sequence in reversed(tuple(self._running.values())):
            self._retract(sequence, keeps_pages=False)

    # The prefix cache.

    def flush_cache(self) -> bool:
        """Empties it. False, and nothing happens, while there are requests."""
        if self._sequences:
            return False
        self._pages.flush()
        return True

    def set_weight_version(self, version: str) -> None:
        """From now on rows find nothing that other weights wrote, and running ones add nothing."""
        self._pages.set_weight_version(version)

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
        plan = self._plan_prefill(first) or self._plan_decode() or self._plan_prefill(last)
        if plan is not None:
            self._mark_in_flight(plan)
            return plan
        if self._sequences and not self._in_flight:
            raise InvariantError(
                f"nothing is in flight and nothing can be planned for {len(self._running)} "
                f"running and {len(self._waiting)} waiting sequences; expected progress"
            )
        return None

    def _plan_prefill(self, packer: policy.ChunkPacker) -> StepPlan | None:
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
            grants += self._grant_for_chunk(tenancy, chunks[-1])
        if not chunks:
            return None
        return StepPlan(
            step=self._num_steps + 1,
            kind=StepKind.PREFILL,
            features=self._features_of(chunk.row for chunk in chunks),
            admissions=tuple(admissions),
            chunks=tuple(chunks),
            grants=tuple(grants),
        )

    def _plan_decode(self) -> StepPlan | None:
        rows: list[RowRef] = []
        grants: list[PageGrant] = []
        for sequence in tuple(self._running.values()):  # oldest first; victims drop out on the way
            if not policy.may_decode(sequence):
                continue
            num_missing = self._make_room(sequence)
            tenancy = sequence.tenancy
            if tenancy is None or num_missing > self._pages.num_free:
                continue
            grants.extend(self._grant(tenancy, num_missing))
            rows.append(tenancy.row)
        if not rows:
            return None
        return StepPlan(
            step=self._num_steps + 1,
            kind=StepKind.DECODE,
            features=self._features_of(rows),
            rows=tuple(rows),
            grants=tuple(grants),
        )

    def _make_room(self, sequence: Sequence) -> int:
        """Pages that the row misses for its next decode, after retractions if they are due.

        Retracts until the pages are free, or until waiting helps: because the row has unread
        steps of its own, or because ended rows return pages when their steps are collected. The
        row itself may be the victim.
        """
        unread = sequence.held_tenancy.rounds_in_flight
        num_missing = policy.pages_missing(self._limits, sequence)
        while num_missing > self._pages.num_free and sequence.tenancy is not None:
            if unread or any(other.ended for other in self._tenancies.values()):
                break
            if len(self._running) == 1:
                raise InvariantError(
                    f"the only running sequence misses {num_missing} pages and "
                    f"{self._pages.num_free} are free; expected submit to have bounded it"
                )
            self._retract(policy.choose_victim(self._limits, tuple(self._running.values())))
        return num_missing

    def _grant(self, tenancy: Tenancy, num_pages: int) -> list[PageGrant]:
        grants = self._pages.grow(tenancy, num_pages)
        return grants + self._windows.grow(tenancy, len(tenancy.page_ids))

    def _grant_for_chunk(self, tenancy: Tenancy, chunk: PrefillChunk) -> list[PageGrant]:
        """In the window spaces; those of the full one came with the admission."""
        end = chunk.start + len(chunk.token_ids) + chunk.is_final * self._limits.spec.num_root_rows
        return self._windows.grow(tenancy, shapes.num_pages(end, self._limits.page_size))

    def _features_of(self, rows: Iterable[RowRef]) -> StepFeatures:
        return PLAIN.union(self._tenancies[row].sequence.features for row in rows)

    def _mark_in_flight(self, plan: StepPlan) -> None:
        self._num_steps = plan.step
        self._prefilling.count(plan)
        self._in_flight.append(plan)
        for chunk in plan.chunks:
            tenancy = self._tenancies[chunk.row]
            self._prefilling.advance(tenancy, chunk)
            self._windows.trim(tenancy)
            self._pages.publish(tenancy, step=plan.step)
        for row in plan.rows:
            self._tenancies[row].rounds_in_flight += self._limits.num_rounds
        for row in plan.row_refs:
            self._tenancies[row].steps_in_flight += 1

    # Results in.

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[StreamChunk, ...]:
        """Applies the oldest step in flight; returns one chunk for each row and round that emitted.

        The rounds behind a row's end are dropped: chunks and counters are those of single rounds.

        Raises InvariantError for a result out of order or of the wrong shape.
        """
        oldest = self._in_flight[0].step if self._in_flight else None
        check_result(self._limits, plan, result, oldest=oldest)
        self._in_flight.popleft()
        chunks = []
        for i, row in enumerate(plan.row_refs):
            tenancy = self._tenancies[row]
            tenancy.steps_in_flight -= 1
            if plan.kind is StepKind.DECODE:
                tenancy.rounds_in_flight -= self._limits.num_rounds
            if tenancy.ended and tenancy.steps_in_flight == 0:
                self._release(tenancy)
            for of_round in result.rounds:
                if tenancy.ended:
                    break
                if ids := of_round.emitted_ids[i]:
                    chunks.append(self._commit_row(tenancy, ids, plan.kind))
            if not tenancy.ended:
                self._windows.trim(tenancy)
        return tuple(chunks)

    def _commit_row(self, tenancy: Tenancy, ids: tuple[int, ...], kind: StepKind) -> StreamChunk:
        sequence = tenancy.sequence
        tenancy.is_prefill_read = True
        cut = sequence.absorb(ids)
        num_kept, num_accepted = len(cut.ids), 0
        self._totals.num_emitted += num_kept
        if kind is StepKind.DECODE:
            num_accepted = surviving_drafts(len(ids), num_kept)
            spec = self._limits.spec
            sequence.counters = count_verification(
                sequence.counters, spec, num_emitted=len(ids), num_kept=num_kept
            )
            self._totals.counters = count_verification(
                self._totals.counters, spec, num_emitted=len(ids), num_kept=num_kept
            )
        if cut.finish is not None:
            self._totals.num_finished += 1
            self._finish(sequence)
        return sequence.chunk(cut, num_accepted=num_accepted)

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
        fill_ids = sequence.fill_ids
        num_pages = budget.pages_for_admission(
            self._limits, len(fill_ids), num_tokens_left=sequence.num_tokens_left
        )
        tenancy = Tenancy(
            row=RowRef(slot, self._epochs[slot]),
            sequence=sequence,
            fill_ids=fill_ids,
            page_ids=[],
        )
        self._pages.admit(tenancy, hit, num_pages)
        if not sequence.num_retractions:
            sequence.cached_tokens = tenancy.cached_len
            self._totals.num_cached_tokens += tenancy.cached_len
        self._windows.admit(tenancy)
        self._tenancies[tenancy.row] = tenancy
        self._running[sequence.request.request_id] = sequence
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
        tenancy, sequence.tenancy = sequence.tenancy, None
        if tenancy is None:
            return
        del self._running[sequence.request.request_id]
        self._prefilling.drop(sequence)
        if keeps_pages:
            self._pages.keep(tenancy, step=self._num_steps)
        tenancy.ended = True
        if tenancy.steps_in_flight == 0:
            self._release(tenancy)

    def _release(self, tenancy: Tenancy) -> None:
        del self._tenancies[tenancy.row]
        self._pages.release(tenancy)
        self._windows.release(tenancy)
        heapq.heappush(self._free_slots, tenancy.row.slot)
