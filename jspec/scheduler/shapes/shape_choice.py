"""Who decides which draft shape a decode step has. The scheduler asks; it knows no cost and no
acceptance.

Whatever is chosen, and in whatever order, the text is the same: a shape says only how much is
drafted and verified in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from jspec.config.limits import SpeculativeConfig
from jspec.messages.plan import RoundResult, StepPlan, StepResult
from jspec.messages.step_options import StepOptions

# Seconds of a decode of so many rows with these features, by the shapes whose programs are there
# and measured.
StepCosts = Callable[[int, StepOptions], Mapping[SpeculativeConfig, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTotals:
    """What a chooser expected of the decodes that were read, and what came: tokens of all rows, and
    seconds of those steps that correct a cost. num_changes: of the shape that is worth most.
    num_probes: steps of another one."""

    num_steps: int | None = None  # S of the shape that is chosen now; None: shapes are not chosen
    expected_tokens: float = 0.0
    emitted_tokens: int = 0
    expected_seconds: float = 0.0
    measured_seconds: float = 0.0
    num_changes: int = 0
    num_probes: int = 0

    def steps_now(self, spec: SpeculativeConfig) -> int:
        """S of the shape that is chosen now; spec's where none is."""
        return spec.num_steps if self.num_steps is None else self.num_steps

    def plus(self, *, num_steps: int, **more: float) -> ShapeTotals:
        """Those of `more` added, by name."""
        added = {name: getattr(self, name) + value for name, value in more.items()}
        return replace(self, num_steps=num_steps, **added)


NO_SHAPES = ShapeTotals()


class ShapeChooser(Protocol):
    """Asked once for each decode that is planned; told of each that was read, in order."""

    @property
    def totals(self) -> ShapeTotals:
        """What it expected and what came; from any thread."""
        ...

    def choose(self, *, num_rows: int, features: StepOptions) -> SpeculativeConfig:
        """One of the engine's shapes for the next decode, of programs that are there."""
        ...

    def read(self, plan: StepPlan, result: StepResult) -> None:
        """What a decode emitted, of the rows whose drafts may be accepted (`tell`)."""
        ...

    def timed(self, plan: StepPlan, seconds: float) -> None:
        """How long the device took for a step, prefills included."""
        ...


class FixedShape:
    """Always the engine's own."""

    def __init__(self, shape: SpeculativeConfig) -> None:
        self._shape = shape

    @property
    def totals(self) -> ShapeTotals:
        return NO_SHAPES

    def choose(self, *, num_rows: int, features: StepOptions) -> SpeculativeConfig:
        del num_rows, features
        return self._shape

    def read(self, plan: StepPlan, result: StepResult) -> None:
        del plan, result

    def timed(self, plan: StepPlan, seconds: float) -> None:
        del plan, seconds


def tell(chooser: ShapeChooser, plan: StepPlan, result: StepResult, *, drafts: np.ndarray) -> None:
    """chooser.read of a decode. drafts: bool of each row: a request that switched speculation off
    says nothing of what drafts are worth, and a decode of nothing else is not told."""
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
