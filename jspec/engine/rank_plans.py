"""The part of a plan that each data rank runs, in slots of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jspec.config.limits import PoolLimits
from jspec.config.shared_prefixes import SharedPrefix
from jspec.messages.plan import PrefillChunk, RowRef, StepPlan


def plans_by_rank(plan: StepPlan, pool: PoolLimits) -> tuple[StepPlan, ...]:
    """Return the part of each rank, whose slots count from its dummy slot, which is 0.

    All parts have the same runs and options. A rank without rows gets a part without rows.
    """
    if pool.num_ranks == 1:
        return (plan,)
    return tuple(_Rank(plan, pool, rank).part() for rank in range(pool.num_ranks))


class _Rank:
    def __init__(self, plan: StepPlan, pool: PoolLimits, rank: int) -> None:
        self._plan = plan
        self._first = pool.first_slot(rank)
        self._slots = range(self._first, pool.first_slot(rank + 1))
        # A plan's rows are in the order of their ranks.
        self._at = [i for i, row in enumerate(plan.row_refs) if row.slot in self._slots]

    def part(self) -> StepPlan:
        plan, leader = self._plan, self._at[0] if self._at else 0
        return replace(
            plan,
            runs=tuple(replace(run, chunks=self._chunks(run.chunks)) for run in plan.runs),
            admissions=tuple(
                replace(each, row=self._row(each.row))
                for each in plan.admissions
                if each.row.slot in self._slots
            ),
            chunks=self._chunks(plan.chunks),
            rows=tuple(self._row(row) for row in plan.rows if row.slot in self._slots),
            grants=self._by_slot(plan.grants),
            restores=self._by_slot(plan.restores),
            saves=self._by_slot(plan.saves),
            constraints=self._by_row(plan.constraints),
            pending=self._by_row(plan.pending),
            shared=tuple(
                SharedPrefix(each.leader - leader, each.num_keys)
                for each in self._by_row(plan.shared)
            ),
        )

    def _row(self, row: RowRef) -> RowRef:
        return RowRef(row.slot - self._first, row.epoch)

    def _chunks(self, chunks: Sequence[PrefillChunk]) -> tuple[PrefillChunk, ...]:
        return tuple(
            replace(chunk, row=self._row(chunk.row))
            for chunk in chunks
            if chunk.row.slot in self._slots
        )

    def _by_slot(self, wanted: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            replace(each, slot=each.slot - self._first)
            for each in wanted
            if each.slot in self._slots
        )

    def _by_row(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[i] for i in self._at) if values else ()
