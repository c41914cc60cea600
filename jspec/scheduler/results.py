"""Apply step results to the rows of their plan: rows that take all of their ids and continue
together, those that end, may end, or have stop strings one by one (`Sequence.absorb`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.errors import ResultError
from jspec.messages.grammar import Constraint
from jspec.messages.plan import RoundResult, RowRef, StepPlan, StepResult
from jspec.messages.request import Request
from jspec.messages.step_options import PLAIN, UNMASKED, StepOptions
from jspec.scheduler.outputs.token_history import Origin, Piece, TokenHistory
from jspec.scheduler.row_table import Bools, Ints, RowTable
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.scheduler.stats import Totals

LOGGER = logging.getLogger("jspec.scheduler")


def check_result(
    limits: ServeLimits, plan: StepPlan, result: StepResult, *, oldest: int | None
) -> None:
    """Raise ResultError for a result out of order or of the wrong shape."""
    if not plan.step == result.step == oldest:
        raise ResultError(
            f"plan {plan.step} came with result {result.step}; expected both to be the "
            f"oldest step in flight, {oldest}"
        )
    if plan.is_prefill:
        most, emits = 1, [int(chunk.is_final) for chunk in plan.chunks]
    else:
        most, emits = plan.shape.max_emitted, [1] * len(plan.rows)
    rounds = [of_round.num_emitted.tolist() for of_round in result.rounds]
    num_rounds = plan.num_rounds(limits.scheduling)
    if len(rounds) != num_rounds or not all(
        _are_within(counts, emits, most=most) for counts in rounds
    ):
        raise ResultError(
            f"step {plan.step} emitted {rounds} ids; expected {num_rounds} rounds, in "
            f"each a number from {emits} on, and at most {most}, for its {len(emits)} rows"
        )


def _are_within(counts: list[int], emits: list[int], *, most: int) -> bool:
    """Return whether rows with a 1 in `emits` emitted 1 to `most` ids, and the others 0."""
    # It avoids numpy, which is slower for short lists.
    if len(counts) != len(emits):
        return False
    if 0 not in emits:
        return min(counts, default=1) >= 1 and max(counts, default=1) <= most
    return all(emit <= count <= emit * most for count, emit in zip(counts, emits, strict=True))


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step in plan order, with data that stays the same between steps."""

    slots: Ints
    tenancies: tuple[Tenancy, ...]
    rows: tuple[RowRef, ...]
    histories: tuple[TokenHistory, ...]
    origins: tuple[Origin, ...]
    options: StepOptions  # union of what the rows need
    constraints: tuple[Constraint | None, ...]  # of each row, or empty if no row has one

    @classmethod
    def of(cls, tenancies: Iterable[Tenancy]) -> StepRows:
        of_all = tuple(tenancies)
        rows = tuple([tenancy.row for tenancy in of_all])
        return cls(
            slots=np.array([row.slot for row in rows], np.int64),
            tenancies=of_all,
            rows=rows,
            histories=tuple([tenancy.sequence.history for tenancy in of_all]),
            origins=tuple([tenancy.sequence.origin for tenancy in of_all]),
            options=_options_of(of_all),
            constraints=_constraints_of(of_all),
        )

    def take(self, indices: Ints) -> StepRows:
        if len(indices) == len(self.slots):
            return self
        chosen = indices.tolist()
        tenancies = tuple(map(self.tenancies.__getitem__, chosen))
        return StepRows(
            slots=self.slots[indices],
            tenancies=tenancies,
            rows=tuple(map(self.rows.__getitem__, chosen)),
            histories=tuple(map(self.histories.__getitem__, chosen)),
            origins=tuple(map(self.origins.__getitem__, chosen)),
            options=_options_of(tenancies) if self.options.members else PLAIN,
            constraints=_constraints_of(tenancies) if self.constraints else (),
        )

    def masked(self, num_tokens: Ints) -> tuple[Constraint | None, ...]:
        """Return each row's grammar if it may restrict the row's next num_tokens tokens, else None;
        empty if no row needs a mask."""
        if not self.constraints:
            return ()
        needed = [
            None if each is None or each.num_free >= most else each
            for each, most in zip(self.constraints, num_tokens.tolist(), strict=True)
        ]
        return tuple(needed) if any(each is not None for each in needed) else ()

    def options_with(self, constraints: tuple[Constraint | None, ...]) -> StepOptions:
        return self.options if constraints else self.options.within(UNMASKED)


def _options_of(tenancies: Iterable[Tenancy]) -> StepOptions:
    return PLAIN.union(tenancy.sequence.options for tenancy in tenancies)


def _constraints_of(tenancies: Iterable[Tenancy]) -> tuple[Constraint | None, ...]:
    found = tuple(tenancy.sequence.constraint for tenancy in tenancies)
    return found if any(constraint is not None for constraint in found) else ()


@dataclass(frozen=True, slots=True)
class Flight:
    plan: StepPlan
    step_rows: StepRows

    @property
    def slots(self) -> Ints:
        return self.step_rows.slots

    @property
    def tenancies(self) -> tuple[Tenancy, ...]:
        return self.step_rows.tenancies


class RoundReader:
    """Appends the ids of a round to its rows."""

    def __init__(
        self,
        table: RowTable,
        totals: Totals,
        *,
        own: SpeculativeConfig,  # the engine's own draft shape
        finish: Callable[[Sequence], None],  # called with each sequence that ends
    ) -> None:
        self._own = own
        self._table = table
        self._totals = totals
        self._finish = finish

    def read_round(self, flight: Flight, of_round: RoundResult, pieces: list[Piece]) -> None:
        """Append a piece for each row that emitted and had not ended before. Pieces read before a
        failure remain, since their ids are already counted."""
        slots, counts, ids = flight.slots, of_round.num_emitted, of_round.ids
        is_live = ~self._table.ended[slots]
        # Chunks that emit nothing still carry these values for the prompt.
        if of_round.logprobs is not None or of_round.hidden is not None:
            for i in is_live.nonzero()[0].tolist():
                sequence = flight.tenancies[i].sequence
                sequence.logprobs.take(flight.plan, i, of_round)
                sequence.hidden.take(flight.plan, i, of_round)
        is_live &= counts > 0
        if not flight.plan.is_prefill:
            goes_on = is_live & self._table.goes_on(slots, counts, ids)
            self._watch(flight, of_round, goes_on)
            pieces += self._read_whole(flight, of_round, goes_on.nonzero()[0])
            is_live &= ~goes_on
        for i in is_live.nonzero()[0].tolist():
            emitted = tuple(ids[i, : counts[i]].tolist())
            sequence = flight.tenancies[i].sequence
            self._read_row(sequence, emitted, flight.plan, pieces)

    def _watch(self, flight: Flight, of_round: RoundResult, goes_on: Bools) -> None:
        watched = (goes_on & self._table.is_watched[flight.slots]).nonzero()[0]
        if not watched.size:
            return
        counts, ids = of_round.num_emitted[watched].tolist(), of_round.ids[watched].tolist()
        for i, count, row in zip(watched.tolist(), counts, ids, strict=True):
            watch = flight.tenancies[i].sequence.watch
            if watch is not None and not watch.passes(row[:count]):
                goes_on[i] = False

    def _read_whole(self, flight: Flight, of_round: RoundResult, rows: Ints) -> list[Piece]:
        counts, ids = of_round.num_emitted[rows], of_round.ids[rows]
        step_rows = flight.step_rows.take(rows)
        self._table.extend(step_rows.slots, counts, ids)
        self._totals.num_emitted += int(counts.sum())
        num_proposed = self._num_proposed(flight.plan)
        self._totals.tally.add_whole(np.bincount(counts).tolist(), num_proposed=num_proposed)
        return Piece.of_whole_rows(
            step_rows.histories,
            ids.tolist(),
            counts.tolist(),
            step_rows.origins,
            num_proposed=num_proposed,
        )

    def _read_row(
        self, sequence: Sequence, ids: tuple[int, ...], plan: StepPlan, pieces: list[Piece]
    ) -> None:
        try:
            cut = sequence.absorb(ids)
        except Exception as error:  # its text, stop strings or grammar: ends this request only
            self._totals.num_aborted += 1
            pieces.append(sequence.broken(text_failure(sequence.request, error)))
            self._finish(sequence)
            return
        self._totals.num_emitted += len(cut.ids)
        is_verified = not plan.is_prefill and sequence.request.sampling.speculative
        num_emitted, num_proposed = len(ids) if is_verified else 0, self._num_proposed(plan)
        if num_emitted:
            self._totals.tally.add(
                num_emitted=num_emitted, num_kept=len(cut.ids), num_proposed=num_proposed
            )
        piece = sequence.piece(cut, num_emitted=num_emitted, num_proposed=num_proposed, ids=ids)
        pieces.append(piece)
        if cut.finish is not None:
            self._totals.num_finished += 1
            self._finish(sequence)

    def _num_proposed(self, plan: StepPlan) -> int | None:
        return None if plan.shape == self._own else plan.shape.num_draft_tokens - 1


def text_failure(request: Request, error: Exception) -> str:
    LOGGER.error("request %s was ended", request.request_id, exc_info=error)
    return f"its text could not be made ({type(error).__name__})"
