"""A fake runner of several data ranks: each has a fake runner, which checks its part of a plan."""

from __future__ import annotations

from dataclasses import replace

from jspec.config.limits import ServeLimits
from jspec.engine.rank_plans import plans_by_rank
from jspec.messages.plan import RoundResult, StepKind, StepPlan, StepResult
from jspec.messages.step_options import PLAIN
from tests.support.failing_runner import FailingRunner
from tests.support.fake_rows import require
from tests.support.fake_runner import Handle, TokenAt
from tests.support.flat_limits import with_limits

Handles = tuple[StepPlan, tuple[Handle, ...]]


class FakeRanks:
    """Runs each rank's part in slots and pages of its own.

    Raises PlanError for a part that its rank could not run, rows that are not in the order of their
    ranks, options that are not the union of those of the parts, and a run that no part needs.
    """

    def __init__(self, limits: ServeLimits, *, accepted_at: TokenAt | None = None) -> None:
        self._limits, own = limits, with_limits(limits, num_ranks=1)
        ranks = range(limits.pool.num_ranks)
        self.ranks = [FailingRunner(own, accepted_at=accepted_at) for _ in ranks]

    def dispatch(self, plan: StepPlan) -> Handles:
        numbers = [self._limits.pool.rank_of(row.slot) for row in plan.row_refs]
        require(numbers == sorted(numbers), f"rows of ranks {numbers}")
        parts = [
            alone(runner, part)
            for runner, part in zip(self.ranks, plans_by_rank(plan, self._limits.pool), strict=True)
        ]
        options = PLAIN.union(part.options for part in parts)
        require(plan.options == options, f"options {plan.options} of parts with {options}")
        kinds = {run.kind for part in parts if part.row_refs for run in part.runs}
        require({run.kind for run in plan.runs} == kinds, f"runs {plan.runs} of parts with {kinds}")
        handles = [
            runner.dispatch(part) if part.row_refs else runner.idle(part)
            for runner, part in zip(self.ranks, parts, strict=True)
        ]
        return plan, tuple(handles)

    def collect(self, dispatched: Handles) -> StepResult:
        plan, handles = dispatched
        results = [
            runner.collect(handle) for runner, handle in zip(self.ranks, handles, strict=True)
        ]
        rounds = zip(*[result.rounds for result in results if result.rounds], strict=True)
        joined = [[ids for own in of_round for ids in own.emitted_ids] for of_round in rounds]
        return StepResult(step=plan.step, rounds=tuple(map(RoundResult.of, joined)))

    def restart(self) -> None:
        for runner in self.ranks:
            runner.restart()


def alone(runner: FailingRunner, part: StepPlan) -> StepPlan:
    """Return the part as the plan of an engine of one rank, without what only others need."""
    wanted = {
        StepKind.RESTORE: bool(part.restores),
        StepKind.SAVE: bool(part.saves),
        StepKind.DRAFT_PREFILL: bool(part.pending),
    }
    runs = tuple(
        run
        for run in part.runs
        if wanted.get(run.kind, run.kind is not StepKind.CACHED_DRAFT_PREFILL or run.chunks)
    )
    return replace(part, runs=runs, options=runner.options_of(part))
