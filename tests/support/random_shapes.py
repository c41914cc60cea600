"""A shape chooser for stress tests: random, for one step or for many in a row."""

from __future__ import annotations

import random

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.step_options import StepOptions
from jspec.scheduler.shapes.shape_choice import ShapeTotals

LONGEST_RUN = 24  # more than may be pending (config.limits.LEAST_PENDING)


class RandomShapes:
    """Chooses shapes in an order that `seed` gives. used: count of each choice."""

    def __init__(self, limits: ServeLimits, *, seed: int) -> None:
        self._shapes = limits.shapes
        self._random = random.Random(seed)
        self._deck: list[SpeculativeConfig] = []
        self._shape, self._num_left = limits.draft_shape, 0
        self.used = dict.fromkeys(limits.shapes, 0)

    @property
    def totals(self) -> ShapeTotals:
        return ShapeTotals()

    def choose(self, *, num_rows: int, options: StepOptions) -> SpeculativeConfig:
        del num_rows, options
        if not self._num_left:
            if not self._deck:  # every shape comes up soon
                self._deck = self._random.sample(self._shapes, len(self._shapes))
            self._shape = self._deck.pop()
            self._num_left = self._random.choice((1, 1, 2, 3, LONGEST_RUN))
        self._num_left -= 1
        self.used[self._shape] += 1
        return self._shape

    def read(self, plan: StepPlan, result: StepResult) -> None:
        del plan, result

    def timed(self, plan: StepPlan, seconds: float) -> None:
        del plan, seconds
