"""A step's result, applied to the rows of its plan: checked as a whole, then cut row by row.

Most rows of a round take all of their ids and go on; they do so all at once. The others, which
end, may end, or have stop strings, are cut one by one (`Sequence.absorb`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jspec.core.config import ServeLimits
from jspec.core.errors import InvariantError
from jspec.core.plan import RoundResult, StepKind, StepPlan, StepResult
from jspec.scheduler.row_table import Ints, RowTable
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.scheduler.stats import Totals
from jspec.scheduler.transcript import Piece


def check_result(
    limits: ServeLimits, plan: StepPlan, result: StepResult, *, oldest: int | None
) -> None:
    """Raises InvariantError for a result out of order or of the wrong shape.

    oldest: the oldest step in flight, None if there is none.
    """
    if not plan.step == result.step == oldest:
        raise InvariantError(
            f"plan {plan.step} came with result {result.step}; expected both to be the "
            f"oldest step in flight, {oldest}"
        )
    is_decode = plan.kind is StepKind.DECODE
    num_rounds = plan.num_rounds(limits)
    most = plan.spec(limits).max_emitted if is_decode else 1
    least = np.array([chunk.is_final for chunk in plan.chunks] or [True] * len(plan.rows), np.int64)
    if len(result.rounds) != num_rounds or not all(
        of_round.num_emitted.shape == least.shape
        and (of_round.num_emitted >= least).all()
        and (of_round.num_emitted <= least * most).all()
        for of_round in result.rounds
    ):
        rounds = [of_round.num_emitted.tolist() for of_round in result.rounds]
        raise InvariantError(
            f"step {plan.step} emitted {rounds} ids; expected {num_rounds} rounds, in each a "
            f"number from {least.tolist()} on, and at most {most}, for its {len(least)} rows"
        )
    for of_round in result.rounds:
        _check_proposed(limits, plan, of_round)


def _check_proposed(limits: ServeLimits, plan: StepPlan, of_round: RoundResult) -> None:
    """A row accepts no more drafts than were verified of it, and has N - 1 at most."""
    proposed, accepted = of_round.num_proposed, of_round.num_emitted - 1
    if proposed is None:
        return
    most = plan.spec(limits).num_draft_tokens - 1
    if proposed.shape != accepted.shape or (proposed < accepted).any() or (proposed > most).any():
        raise InvariantError(
            f"step {plan.step} verified {proposed.tolist()} drafts; expected from "
            f"{accepted.tolist()}, those accepted, to {most}"
        )


@dataclass(frozen=True, slots=True)
class Flight:
    """A step in flight, and whose rows it has, in its order."""

    plan: StepPlan
    slots: Ints
    tenancies: tuple[Tenancy, ...]


class RoundReader:
    """Appends a round's ids to its rows, and counts them. finish: called with who ends."""

    def __init__(
        self, table: RowTable, totals: Totals, *, finish: Callable[[Sequence], None]
    ) -> None:
        self._table = table
        self._totals = totals
        self._finish = finish

    def read_round(self, flight: Flight, of_round: RoundResult) -> list[Piece]:
        """A piece for each row that emitted and has not ended before."""
        slots, counts, ids = flight.slots, of_round.num_emitted, of_round.ids
        is_live = ~self._table.ended[slots]
        if of_round.logprobs is not None:  # a prompt's come with chunks that emit nothing, too
            for i in np.flatnonzero(is_live).tolist():
                flight.tenancies[i].sequence.logprobs.take(flight.plan, i, of_round)
        is_live &= counts > 0
        pieces: list[Piece] = []
        if flight.plan.kind is StepKind.DECODE:
            goes_on = is_live & self._table.goes_on(slots, counts, ids)
            pieces += self._read_whole(flight, of_round, np.flatnonzero(goes_on))
            is_live &= ~goes_on
        for i in np.flatnonzero(is_live).tolist():
            emitted = tuple(ids[i, : counts[i]].tolist())
            proposed = None if of_round.num_proposed is None else int(of_round.num_proposed[i])
            sequence, kind = flight.tenancies[i].sequence, flight.plan.kind
            pieces.append(self._read_row(sequence, emitted, kind, num_proposed=proposed))
        return pieces

    def _read_whole(self, flight: Flight, of_round: RoundResult, rows: Ints) -> list[Piece]:
        """Rows of a verification that go on with all that it emitted."""
        counts, ids = of_round.num_emitted[rows], of_round.ids[rows]
        self._table.extend(flight.slots[rows], counts, ids)
        self._totals.num_emitted += int(counts.sum())
        pieces = []
        if of_round.num_proposed is None:
            self._totals.tally.add_whole(np.bincount(counts).tolist())
            proposed: list[int | None] = [None] * len(rows)
        else:  # a row of which nothing but the root was verified is a plain one
            verified = of_round.num_proposed[rows]
            of_rows = np.bincount(counts[verified > 0]).tolist()
            self._totals.tally.add_whole(of_rows, num_proposed=int(verified.sum()))
            proposed = verified.tolist()
        told = zip(rows.tolist(), counts.tolist(), ids.tolist(), proposed, strict=True)
        for i, count, row, of_row in told:
            sequence = flight.tenancies[i].sequence
            retractions, cached = sequence.num_retractions, sequence.cached_tokens
            origin = (retractions, cached, sequence.weight_version)
            num_emitted = 0 if of_row == 0 else count
            piece = Piece(sequence.transcript, row[:count], num_emitted, None, None, None, *origin)
            pieces.append(piece if of_row is None else piece._replace(num_proposed=of_row))
        return pieces

    def _read_row(
        self,
        sequence: Sequence,
        ids: tuple[int, ...],
        kind: StepKind,
        *,
        num_proposed: int | None = None,
    ) -> Piece:
        cut = sequence.absorb(ids)
        self._totals.num_emitted += len(cut.ids)
        is_verified = kind is StepKind.DECODE and sequence.request.sampling.speculative
        is_verified &= num_proposed != 0
        num_emitted = len(ids) if is_verified else 0
        if num_emitted:
            self._totals.tally.add(
                num_emitted=num_emitted, num_kept=len(cut.ids), num_proposed=num_proposed
            )
        if cut.finish is not None:
            self._totals.num_finished += 1
            self._finish(sequence)
        return sequence.piece(cut, num_emitted=num_emitted, num_proposed=num_proposed)
