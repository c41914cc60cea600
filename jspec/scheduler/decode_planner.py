"""Which rows decode next, and the pages that they get for it.

Where pages suffice all rows are decided together, on the columns of the row table; where they do
not, one by one, the first claim first, because each may make another one wait or give way.
"""

from __future__ import annotations

from collections.abc import Callable

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.config.shared_prefixes import SharedPrefix
from jspec.errors import InvariantError
from jspec.messages.plan import PageGrant, StepKind, StepPlan
from jspec.messages.step_options import SAMPLING, StepOptions
from jspec.scheduler import policy
from jspec.scheduler.blame import blame
from jspec.scheduler.pages.prefix_sharing import PrefixSharing
from jspec.scheduler.results import Flight, StepRows
from jspec.scheduler.row_table import Ints
from jspec.scheduler.seats import Seats
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.scheduler.shapes.shape_choice import ShapeChooser


class DecodePlanner:
    """Reads who runs, and grants pages, in `seats`; `retract` takes a sequence's slot away;
    `shapes` says what shape a decode has."""

    def __init__(
        self,
        limits: ServeLimits,
        seats: Seats,
        *,
        retract: Callable[[Sequence], None],
        shapes: ShapeChooser,
    ) -> None:
        self._limits = limits
        self._deferred_tokens = limits.max_pending
        self._retract = retract
        self._shapes = shapes
        sharing = limits.sharing
        self._sharing = None if sharing is None else PrefixSharing(limits, sharing)
        self.num_shared_keys = 0  # that rows were told not to read, since others read them
        self.use(seats)

    def use(self, seats: Seats) -> None:
        """Plans with these from now on."""
        self._seats = seats
        self._table = seats.table
        self._pages = seats.pages
        self._windows = seats.windows
        self._lineup: StepRows | None = None  # None: to be found out
        self._num_changes = seats.num_changes  # that the step_rows has seen

    def plan(self, *, step: int) -> Flight | None:
        """The next decode, None if no row can run. Pages are granted and rows retracted by it.

        All wait while a row that follows a grammar has something unread: its next tree is judged
        after all of it, and rows that went on without it would share no step with it again.
        """
        running = self._running_rows()
        step_rows = running.take(self._table.may_decode(running.slots).nonzero()[0])
        if not step_rows.rows or self._waits_to_be_read(step_rows):
            return None
        missing = self._table.pages_missing(step_rows.slots, self._limits).tolist()
        if sum(missing) > self._pages.num_free:
            decoding, grants = self._choose_short_of_pages()
            step_rows = StepRows.of(decoding)
        else:
            grants = []
            for tenancy, num_pages in zip(step_rows.tenancies, missing, strict=True):
                if num_pages or self._limits.windows:
                    grants += self._grant(tenancy, num_pages)
        if not step_rows.rows:
            return None
        features, shape = step_rows.features, self._limits.spec
        if not step_rows.constraints:  # the programs of grammars are of one shape
            shape = self._shapes.choose(num_rows=len(step_rows.rows), features=features)
        plan = StepPlan(
            step=step,
            kind=StepKind.DECODE,
            features=features,
            rows=step_rows.rows,
            grants=tuple(grants),
            constraints=step_rows.constraints,
            shape=None if shape == self._limits.spec else shape,
            pending=self._pending(step_rows.slots, shape),
            shared=self._shared(step_rows.slots, features, shape),
        )
        return Flight(plan, step_rows)

    def _waits_to_be_read(self, step_rows: StepRows) -> bool:
        """Whether a row that follows a grammar has a step in flight."""
        steps = self._table.steps
        return any(
            constraint is not None and steps[row.slot] > 0
            for constraint, row in zip(step_rows.constraints, step_rows.rows, strict=False)
        )

    def _shared(
        self, slots: Ints, features: StepOptions, shape: SpeculativeConfig
    ) -> tuple[SharedPrefix, ...]:
        """What rows read together; nothing where that is too little, or no program is told."""
        is_told = shape == self._limits.spec and SAMPLING.covers(features)
        if self._sharing is None or not is_told:
            return ()
        shared, num_keys = self._sharing.among(slots)
        self.num_shared_keys += num_keys
        return shared

    def _pending(self, slots: Ints, shape: SpeculativeConfig) -> tuple[int, ...]:
        """What the drafter must be told of before a decode of this shape: all that it was not, if
        it is to draft, or where a plain one would leave more than W tokens waiting."""
        if not self._deferred_tokens:
            return ()
        pending = self._table.pending[slots]
        room = self._deferred_tokens - self._limits.num_rounds if shape.is_plain else 0
        return tuple(pending.tolist()) if pending.max() > room else ()

    def _running_rows(self) -> StepRows:
        """What runs, oldest first."""
        if self._lineup is None or self._num_changes != self._seats.num_changes:
            self._num_changes = self._seats.num_changes
            self._lineup = StepRows.of(s.held_tenancy for s in self._seats.running.values())
            if self._sharing is not None:
                self._sharing.regroup(self._lineup.tenancies)
        return self._lineup

    def _choose_short_of_pages(self) -> tuple[list[Tenancy], list[PageGrant]]:
        """Who decodes where not all can, and the pages they get; others wait or give way."""
        chosen: list[Tenancy] = []
        grants: list[PageGrant] = []
        # Victims drop out on the way: always after the row that they give way for, or that row.
        for sequence in policy.by_claim(self._limits, self._seats.running.values()):
            if not policy.may_decode(sequence):
                continue
            num_missing = self._make_room(sequence)
            tenancy = sequence.tenancy
            if tenancy is None or num_missing > self._pages.num_free:
                continue
            grants += self._grant(tenancy, num_missing)
            chosen.append(tenancy)
        return chosen, grants

    def _make_room(self, sequence: Sequence) -> int:
        """Pages that the row misses for its next decode, after retractions if they are due.

        Retracts until the pages are free, or until waiting helps: because the row has unread
        steps of its own, or because ended rows return pages when their steps are collected. The
        row itself may be the victim.
        """
        unread = sequence.held_tenancy.rounds_in_flight
        num_missing = policy.pages_missing(self._limits, sequence)
        running = self._seats.running
        while num_missing > self._pages.num_free and sequence.tenancy is not None:
            if unread or any(other.ended for other in self._seats.tenancies.values()):
                break
            if len(running) == 1:
                error = InvariantError(
                    f"the only running sequence misses {num_missing} pages and "
                    f"{self._pages.num_free} are free; expected submit to have bounded it"
                )
                blame(error, sequence)
            self._retract(policy.choose_victim(self._limits, running.values()))
        return num_missing

    def _grant(self, tenancy: Tenancy, num_pages: int) -> list[PageGrant]:
        try:
            grants = self._pages.grow(tenancy, num_pages)
            self._table.pages[tenancy.row.slot] = len(tenancy.page_ids)
            return grants + self._windows.grow(tenancy, len(tenancy.page_ids))
        except Exception as error:
            blame(error, tenancy.sequence)
