"""Who says what shape a decode step has. The scheduler asks; it knows no cost and no acceptance.

Whatever is chosen, and in whatever order, the text is the same: a shape says only how much is
drafted and verified in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from jspec.config.limits import SpeculativeConfig
from jspec.messages.features import StepFeatures
from jspec.messages.plan import RoundResult, StepPlan, StepResult
from jspec.scheduler.shapes.shape_policy import ShapeTotals

# The shapes that a decode of so many rows with these features can have now: programs are there.
# The engine's own is always one of them.
ReadyShapes = Callable[[int, StepFeatures], tuple[SpeculativeConfig, ...]]


class ShapeChooser(Protocol):
    """Asked once for each decode that is planned; told of each that was read, in order."""

    @property
    def totals(self) -> ShapeTotals:
        """What it expected and what came; from any thread."""
        ...

    def choose(self, *, num_rows: int, features: StepFeatures) -> SpeculativeConfig:
        """One of the engine's shapes for the next decode, of programs that are there."""
        ...

    def read(self, plan: StepPlan, result: StepResult) -> None:
        """What a decode emitted, of the rows whose drafts may be accepted (`tell`)."""
        ...

    def timed(self, plan: StepPlan, seconds: float) -> None:
        """How long the device took for a decode."""
        ...


class FixedShape:
    """Always the engine's own."""

    def __init__(self, shape: SpeculativeConfig) -> None:
        self._shape = shape

    @property
    def totals(self) -> ShapeTotals:
        return ShapeTotals()

    def choose(self, *, num_rows: int, features: StepFeatures) -> SpeculativeConfig:
        del num_rows, features
        return self._shape

    def read(self, plan: StepPlan, result: StepResult) -> None:
        del plan, result

    def timed(self, plan: StepPlan, seconds: float) -> None:
        del plan, seconds


def tell(chooser: ShapeChooser, plan: StepPlan, result: StepResult, *, drafts: np.ndarray) -> None:
    """chooser.read of a decode. drafts: bool of each row: whoever switched speculation off says
    nothing of what drafts are worth, and a decode of nothing else is not told."""
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
