"""Choose the rows of the next decode step and grant their pages: all together on the columns of the
row table if pages suffice, else one by one in claim order."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.config.shared_prefixes import SharedPrefix
from jspec.errors import InvariantError
from jspec.messages.grammar import Constraint
from jspec.messages.plan import PageGrant, StepKind, StepPlan, StepRun
from jspec.messages.step_options import SAMPLING, StepOptions
from jspec.scheduler import policy
from jspec.scheduler.blame import blame
from jspec.scheduler.data_ranks import DataRanks
from jspec.scheduler.pages.prefix_sharing import PrefixSharing
from jspec.scheduler.results import Flight, StepRows
from jspec.scheduler.row_table import Ints
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.scheduler.shapes.shape_choice import ShapeChooser

# The programs of a decode in which a row follows a grammar (decision 23).
CUT = (StepKind.PROPOSE, StepKind.SCORE, StepKind.SETTLE)


class DecodePlanner:
    def __init__(
        self,
        limits: ServeLimits,
        ranks: DataRanks,
        *,
        retract: Callable[[Sequence], None],
        shapes: ShapeChooser,
    ) -> None:
        self._limits = limits
        self._max_pending = limits.max_pending
        self._retract = retract
        self._shapes = shapes
        sharing = limits.programs.sharing
        self._sharing = None if sharing is None else PrefixSharing(limits.pool, sharing)
        self.num_shared_keys = 0  # keys that rows skip because another row reads them
        self.use(ranks)

    def use(self, ranks: DataRanks) -> None:
        self._ranks = ranks
        self._table = ranks.table
        self._running_step: StepRows | None = None  # all running rows; None: stale
        self._num_changes = ranks.num_changes  # at which `_running_step` was made

    def plan(self, *, step: int) -> Flight | None:
        """Return the next decode, or None if no row can run. Grants pages and may retract rows.

        While a row that needs masks has an unread step, all rows wait: if the others ran on, it
        would never share a step with them again.
        """
        running = self._running_rows()
        step_rows = running.take(self._table.may_decode(running.slots).nonzero()[0])
        constraints = self._masked(step_rows)
        if not step_rows.rows or self._waits_to_be_read(step_rows.slots, constraints):
            return None
        missing = self._table.pages_missing(step_rows.slots, self._limits).tolist()
        grants: list[PageGrant] = []
        if self._is_short(step_rows.slots, missing):
            step_rows = StepRows.of(self._choose_short_of_pages(step_rows, grants))
            constraints = self._masked(step_rows)
        else:
            for tenancy, num_pages in zip(step_rows.tenancies, missing, strict=True):
                if num_pages or self._limits.pool.windows:
                    grants += self._grant(tenancy, num_pages)
        if not step_rows.rows:
            return None
        options, shape = step_rows.options_with(constraints), self._limits.draft_shape
        if not constraints:  # programs with grammars exist in one shape only
            slots = step_rows.slots
            num_rows = max(self._limits.pool.by_rank(slots, [1] * len(slots)))
            shape = self._shapes.choose(num_rows=num_rows, options=options)
        pending = self._pending(step_rows.slots, shape)
        plan = StepPlan(
            step=step,
            runs=self._runs(shape, gives=bool(pending), cut=bool(constraints)),
            options=options,
            rows=step_rows.rows,
            grants=tuple(grants),
            constraints=constraints,
            pending=pending,
            shared=self._shared(step_rows.slots, options, shape),
        )
        return Flight(plan, step_rows)

    def _runs(self, shape: SpeculativeConfig, *, gives: bool, cut: bool) -> tuple[StepRun, ...]:
        """Return the programs of a decode. cut: a row needs masks."""
        own = self._limits.draft_shape
        first = (StepRun(StepKind.DRAFT_PREFILL, own),) if gives else ()
        kinds = CUT if cut else (StepKind.DECODE,)
        return (*first, *[StepRun(kind, shape) for kind in kinds])

    def _masked(self, step_rows: StepRows) -> tuple[Constraint | None, ...]:
        """Return the grammars that may forbid a token of this step or of an unread one."""
        if not step_rows.constraints:
            return ()
        slots, limits = step_rows.slots, self._limits
        own = limits.scheduling.num_rounds * limits.draft_shape.max_emitted
        return step_rows.masked(self._table.unread_tokens(slots) + own)

    def _waits_to_be_read(self, slots: Ints, constraints: tuple[Constraint | None, ...]) -> bool:
        if not constraints:
            return False
        unread = self._table.steps[slots].tolist()
        return any(
            each is not None and count > 0 for each, count in zip(constraints, unread, strict=True)
        )

    def _shared(
        self, slots: Ints, options: StepOptions, shape: SpeculativeConfig
    ) -> tuple[SharedPrefix, ...]:
        """Return the shared prefixes, or () if they are too short or the program takes none."""
        is_supported = shape == self._limits.draft_shape and SAMPLING.covers(options)
        if self._sharing is None or not is_supported:
            return ()
        shared, num_keys = self._sharing.among(slots)
        self.num_shared_keys += num_keys
        return shared

    def _pending(self, slots: Ints, shape: SpeculativeConfig) -> tuple[int, ...]:
        """Return each row's number of pending tokens for a draft prefill before this decode; empty
        if the shape does not draft and leaves no more than the drafter's limit."""
        if not self._max_pending:
            return ()
        pending = self._table.pending[slots]
        room = self._max_pending - self._limits.scheduling.num_rounds if shape.is_plain else 0
        return tuple(pending.tolist()) if pending.max() > room else ()

    def _running_rows(self) -> StepRows:
        if self._running_step is None or self._num_changes != self._ranks.num_changes:
            self._num_changes = self._ranks.num_changes
            self._running_step = StepRows.of(each.active_tenancy for each in self._ranks.running)
            if self._sharing is not None:
                self._sharing.regroup(self._running_step.tenancies)
        return self._running_step

    def _is_short(self, slots: Ints, missing: list[int]) -> bool:
        needed = self._limits.pool.by_rank(slots, missing)
        return any(map(operator.gt, needed, [seats.pages.num_free for seats in self._ranks.all]))

    def _choose_short_of_pages(self, step_rows: StepRows, grants: list[PageGrant]) -> list[Tenancy]:
        chosen: list[Tenancy] = []
        able = [tenancy.sequence for tenancy in step_rows.tenancies]
        # A victim never comes earlier in this order than the row that needs its pages.
        for sequence in policy.by_claim(self._limits.scheduling, able):
            if sequence.tenancy is None:
                continue
            num_missing = self._make_room(sequence, sequence.tenancy)
            tenancy = sequence.tenancy
            if tenancy is None or num_missing > self._ranks.of(tenancy).pages.num_free:
                continue
            grants += self._grant(tenancy, num_missing)
            chosen.append(tenancy)
        return sorted(chosen, key=self._ranks.number_of)

    def _make_room(self, sequence: Sequence, tenancy: Tenancy) -> int:
        """Retract rows, possibly this one, until the pages that it lacks are free, and return them.
        Stop if waiting can help: its own steps are unread, or ended rows will release pages."""
        unread = tenancy.rounds_in_flight
        (num_missing,) = self._table.pages_missing(np.array([tenancy.row.slot]), self._limits)
        seats = self._ranks.of(tenancy)
        running, pages = seats.running, seats.pages
        while num_missing > pages.num_free and sequence.tenancy is not None:
            if unread or any(other.ended for other in seats.tenancies.values()):
                break
            if len(running) == 1:
                error = InvariantError(
                    f"the only running sequence misses {num_missing} pages and "
                    f"{pages.num_free} are free; expected submit to have bounded it"
                )
                blame(error, sequence)
            self._retract(policy.choose_victim(self._limits.scheduling, running.values()))
        return int(num_missing)

    def _grant(self, tenancy: Tenancy, num_pages: int) -> list[PageGrant]:
        try:
            return self._ranks.of(tenancy).pages.grow(tenancy, len(tenancy.page_ids) + num_pages)
        except Exception as error:
            blame(error, tenancy.sequence)
