"""Plans of one program, for tests of those who read them."""

from __future__ import annotations

from typing import Any

from jspec.config.limits import SpeculativeConfig
from jspec.messages.plan import StepKind, StepPlan, StepRun
from jspec.messages.step_options import PLAIN, StepOptions


def plan_of(
    kind: StepKind,
    shape: SpeculativeConfig,
    *,
    step: int = 1,
    options: StepOptions = PLAIN,
    **fields: Any,
) -> StepPlan:
    return StepPlan(step=step, runs=(StepRun(kind, shape),), options=options, **fields)
