"""The interface by which the scheduler chooses the draft shape of a decode step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from jspec.config.limits import SpeculativeConfig
from jspec.messages.plan import RoundResult, StepPlan, StepResult
from jspec.messages.step_options import StepOptions

# (rows, options) -> seconds of a decode by shape, for the programs that exist and were measured.
StepCosts = Callable[[int, StepOptions], Mapping[SpeculativeConfig, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTotals:
    """Expected and actual totals of the decodes read; tokens are summed over rows."""

    num_steps: int | None = None  # S of the current shape; None: the shape is fixed
    expected_tokens: float = 0.0
    emitted_tokens: int = 0
    expected_seconds: float = 0.0
    measured_seconds: float = 0.0  # of the steps that correct a cost
    num_changes: int = 0  # of the preferred shape
    num_probes: int = 0  # steps of other shapes

    def steps_now(self, draft_shape: SpeculativeConfig) -> int:
        return draft_shape.num_steps if self.num_steps is None else self.num_steps

    def plus(self, *, num_steps: int, **more: float) -> ShapeTotals:
        added = {name: getattr(self, name) + value for name, value in more.items()}
        return replace(self, num_steps=num_steps, **added)


NO_SHAPES = ShapeTotals()


class ShapeChooser(Protocol):
    """Called once for each planned decode, then with each decode read, in order."""

    @property
    def totals(self) -> ShapeTotals:
        """Totals, which any thread may read."""
        ...

    def choose(self, *, num_rows: int, options: StepOptions) -> SpeculativeConfig:
        """Return one of the engine's shapes whose program exists, for the next decode."""
        ...

    def read(self, plan: StepPlan, result: StepResult) -> None:
        """Record a decode, restricted to rows that may accept drafts (`tell`)."""
        ...

    def timed(self, plan: StepPlan, seconds: float) -> None:
        """Record the device time of a step, prefills included."""
        ...


class FixedShape:
    def __init__(self, shape: SpeculativeConfig) -> None:
        self._shape = shape

    @property
    def totals(self) -> ShapeTotals:
        return NO_SHAPES

    def choose(self, *, num_rows: int, options: StepOptions) -> SpeculativeConfig:
        del num_rows, options
        return self._shape

    def read(self, plan: StepPlan, result: StepResult) -> None:
        del plan, result

    def timed(self, plan: StepPlan, seconds: float) -> None:
        del plan, seconds


def tell(chooser: ShapeChooser, plan: StepPlan, result: StepResult, *, drafts: np.ndarray) -> None:
    """Call chooser.read for a decode, without rows that have speculation off, which show nothing
    about drafts; not if there are no others."""
    if not drafts.all():
        plan = replace(
            plan, rows=tuple(row for row, own in zip(plan.rows, drafts, strict=True) if own)
        )
        rounds = tuple(
            RoundResult(num_emitted=each.num_emitted[drafts], ids=each.ids[drafts])
            for each in result.rounds
        )
        result = replace(result, rounds=rounds)
    if plan.rows:
        chooser.read(plan, result)
