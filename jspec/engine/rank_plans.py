"""The part of a plan that each data rank runs, with the rank's own slot numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from jspec.config.limits import PoolLimits
from jspec.config.shared_prefixes import SharedPrefix
from jspec.messages.plan import RowRef, StepPlan


def plans_by_rank(plan: StepPlan, pool: PoolLimits) -> tuple[StepPlan, ...]:
    """Return the part of each rank, whose slots count from its dummy slot, which is 0. All parts
    have the same runs and options; that of a rank without rows is empty."""
    if pool.num_ranks == 1:
        return (plan,)
    slots = [row.slot for row in plan.row_refs]
    ends = list(accumulate(pool.by_rank(slots, [1] * len(slots)), initial=0))
    return tuple(
        _part(
            plan,
            rows=slice(ends[rank], ends[rank + 1]),
            slots=range(pool.first_slot(rank), pool.first_slot(rank + 1)),
        )
        for rank in range(pool.num_ranks)
    )


def _part(plan: StepPlan, *, rows: slice, slots: range) -> StepPlan:
    """Return a rank's part. rows: its rows of the plan. slots: its slots."""

    def local(row: RowRef) -> RowRef:
        return RowRef(row.slot - slots.start, row.epoch)

    def with_rows(found: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([replace(x, row=local(x.row)) for x in found if x.row.slot in slots])

    def with_slots(found: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([replace(x, slot=x.slot - slots.start) for x in found if x.slot in slots])

    return replace(
        plan,
        runs=tuple([replace(run, chunks=with_rows(run.chunks)) for run in plan.runs]),
        admissions=with_rows(plan.admissions),
        chunks=with_rows(plan.chunks[rows]),
        rows=tuple([local(row) for row in plan.rows[rows]]),
        grants=with_slots(plan.grants),
        restores=with_slots(plan.restores),
        saves=with_slots(plan.saves),
        constraints=plan.constraints[rows],
        pending=plan.pending[rows],
        shared=tuple([SharedPrefix(x.leader - rows.start, x.num_keys) for x in plan.shared[rows]]),
    )
