"""Whether a step's result is what its plan can have given: a check before anything is applied."""

from __future__ import annotations

from jspec.core.config import ServeLimits
from jspec.core.errors import InvariantError
from jspec.core.plan import StepKind, StepPlan, StepResult


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
    num_rounds = limits.num_rounds if is_decode else 1
    most = limits.spec.max_emitted if is_decode else 1
    least = [int(chunk.is_final) for chunk in plan.chunks] or [1] * len(plan.rows)
    rounds = [[len(ids) for ids in of_round.emitted_ids] for of_round in result.rounds]
    if [len(lens) for lens in rounds] != [len(least)] * num_rounds or not all(
        low <= n <= low * most for lens in rounds for low, n in zip(least, lens, strict=True)
    ):
        raise InvariantError(
            f"step {plan.step} emitted {rounds} ids; expected {num_rounds} rounds, in each a "
            f"number from {least} on, and at most {most}, for its {len(least)} rows"
        )
