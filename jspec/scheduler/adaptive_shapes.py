"""The chooser of an adaptive engine: takes what is worth most by late statistics, and looks around.

Two things can only be known by trying. What a shape costs at a bucket: each shape is tried a few
times in a row where a bucket is new, again after FIRST_REFRESH steps, and then ever more rarely:
one look may have met a moment when all was slow. What a deeper shape would accept: while the steps
are plain or shallow, one in PROBE_STEPS is of the largest shape, whose verifications say how far
drafts would get. What is tried is rare enough to cost about 1%.

The statistics are the engine's: all rows of a step share its shape. It decides nothing about rows.
"""

from __future__ import annotations

import numpy as np

from jspec.core import shapes as core_shapes
from jspec.core.config import ServeLimits, SpeculativeConfig
from jspec.core.features import StepFeatures
from jspec.core.plan import StepKind, StepPlan, StepResult
from jspec.scheduler.shape_choice import ReadyShapes
from jspec.scheduler.shape_policy import (
    COLD_RUNS,
    ENOUGH_SAMPLES,
    Costs,
    Family,
    ShapeTotals,
    Survival,
    best_shape,
    family,
)

PROBE_STEPS = 64  # one of so many looks at depths that nothing else shows
SOON_STEPS = 16  # ... where what is seen at depth 1 says that they might pay
# Beyond so many rows a look costs more, beside a plain step, and shows more: it is rarer by that,
# up to MOST_RARE times.
PROBE_ROWS, MOST_RARE = 16, 4
FIRST_STEPS = 8  # one of so many tries a shape whose cost is unknown
FIRST_REFRESH, REFRESH_STEPS = 128, 2048  # after so many a known cost is measured again
# In a row: the first may tell the drafter what it missed. A program's cold runs come on top.
TRY_STEPS = ENOUGH_SAMPLES + 1


class AdaptiveShapes:
    """A `ShapeChooser`. ready: what can be chosen. Called from one thread, but for `totals`."""

    def __init__(self, limits: ServeLimits, *, ready: ReadyShapes) -> None:
        self._limits = limits
        self._ready = ready
        self._current = limits.spec
        self._costs = Costs()
        most: dict[Family, int] = {}
        for shape in limits.shapes:
            most[family(shape)] = max(shape.num_steps, most.get(family(shape), 0))
        self._survival = {key: Survival.of(steps) for key, steps in most.items()}
        self._seen_at = dict.fromkeys(most, 0)
        self._num_chosen = 0
        self._last_probe = self._last_try = 0
        self._measured_at: dict[tuple[SpeculativeConfig, int], int] = {}
        self._refresh_after: dict[tuple[SpeculativeConfig, int], int] = {}
        self._trying, self._num_tries_left = limits.spec, 0
        self._totals = ShapeTotals(num_steps=limits.spec.num_steps)

    @property
    def totals(self) -> ShapeTotals:
        """A snapshot; from any thread."""
        return self._totals

    def expected_tokens(self, shape: SpeculativeConfig) -> float:
        """Tokens a row that a step of this shape emits, as far as is known."""
        return self._survival[family(shape)].expected(shape.num_steps)

    def choose(self, *, num_rows: int, features: StepFeatures) -> SpeculativeConfig:
        """See ShapeChooser."""
        self._num_chosen += 1
        bucket = core_shapes.bucket(num_rows, self._limits.decode_buckets)
        ready = self._ready(num_rows, features)
        known = {shape: self._costs.known(shape, bucket) for shape in ready}
        before = self._current
        current = before if before in ready else self._limits.spec
        self._current = best_shape(
            current,
            expected={shape: self.expected_tokens(shape) for shape in ready},
            costs={shape: cost for shape, cost in known.items() if cost is not None},
        )
        probe = self._probe(ready, known, bucket, num_rows=num_rows)
        self._count(changed=self._current != before, probed=probe is not None)
        return probe or self._current

    def _probe(
        self,
        ready: tuple[SpeculativeConfig, ...],
        known: dict[SpeculativeConfig, float | None],
        bucket: int,
        *,
        num_rows: int,
    ) -> SpeculativeConfig | None:
        """Another shape than the current one, if it is time to look at it."""
        now, others = self._num_chosen, [shape for shape in ready if shape != self._current]
        if self._num_tries_left and self._trying in ready:
            self._num_tries_left -= 1
            return self._trying
        unknown = [shape for shape in others if known[shape] is None]
        if known[self._current] is not None and unknown and now - self._last_try >= FIRST_STEPS:
            return self._try(unknown[0], extra=COLD_RUNS)
        deepest = {family(shape): shape for shape in sorted(others, key=lambda s: s.num_steps)}
        hidden = [
            shape
            for key, shape in deepest.items()
            if not shape.is_plain
            and (key != family(self._current) or shape.num_steps > self._current.num_steps)
        ]
        might_pay = any(self._might_pay(shape, known) for shape in hidden)
        rarer = min(max(num_rows / PROBE_ROWS, 1), MOST_RARE)
        if hidden and now - self._last_probe >= (SOON_STEPS if might_pay else PROBE_STEPS * rarer):
            self._last_probe = now
            return min(hidden, key=lambda shape: self._seen_at[family(shape)])
        for shape in others:
            key = (shape, bucket)
            after = self._refresh_after.get(key, FIRST_REFRESH)
            if now - self._measured_at.get(key, now) >= after:
                self._measured_at[key] = now
                self._refresh_after[key] = min(2 * after, REFRESH_STEPS)
                self._costs.forget(shape, bucket)
                return self._try(shape)
        return None

    def _try(self, shape: SpeculativeConfig, *, extra: int = 0) -> SpeculativeConfig:
        self._last_try = self._num_chosen
        self._trying, self._num_tries_left = shape, TRY_STEPS + extra - 1
        return shape

    def _might_pay(
        self, shape: SpeculativeConfig, known: dict[SpeculativeConfig, float | None]
    ) -> bool:
        """Whether it would be best if every depth accepted as the first one does."""
        current, cost, own = self._current, known[shape], known[self._current]
        if current.is_plain or cost is None or own is None or family(shape) != family(current):
            return False
        rate = self._survival[family(current)].expected(1) - 1
        hoped = sum(rate**depth for depth in range(shape.num_steps + 1))
        return hoped / cost > self.expected_tokens(current) / own

    def read(self, plan: StepPlan, result: StepResult) -> None:
        """See ShapeChooser."""
        if plan.kind is not StepKind.DECODE:
            return
        shape, now = plan.spec(self._limits), self._num_chosen
        emitted = sum(int(of_round.num_emitted.sum()) for of_round in result.rounds)
        expected = self.expected_tokens(shape) * len(plan.rows) * len(result.rounds)
        if not shape.is_plain:
            counts = np.bincount(
                np.concatenate([of_round.num_emitted for of_round in result.rounds]) - 1,
                minlength=shape.num_steps + 1,
            )
            key = family(shape)
            age = max(now - self._seen_at[key] - 1, 0)
            self._survival[key].see(counts.tolist(), num_steps=shape.num_steps, age=age)
            self._seen_at[key] = now
        self._count(expected_tokens=expected, emitted_tokens=emitted)

    def timed(self, plan: StepPlan, seconds: float) -> None:
        """See ShapeChooser. What waits for the host (grammars) or tells the drafter of more than
        its own tokens is no measure of a shape."""
        if plan.kind is not StepKind.DECODE or plan.constraints or plan.owed:
            return
        shape = plan.spec(self._limits)
        bucket = core_shapes.bucket(len(plan.rows), self._limits.decode_buckets)
        expected = self._costs.known(shape, bucket)
        if expected is not None:
            self._count(expected_seconds=expected, measured_seconds=seconds)
        self._costs.see(shape, bucket, seconds)
        self._measured_at[shape, bucket] = self._num_chosen

    def _count(
        self,
        *,
        changed: bool = False,
        probed: bool = False,
        expected_tokens: float = 0.0,
        emitted_tokens: int = 0,
        expected_seconds: float = 0.0,
        measured_seconds: float = 0.0,
    ) -> None:
        before = self._totals
        self._totals = ShapeTotals(
            num_steps=self._current.num_steps,
            expected_tokens=before.expected_tokens + expected_tokens,
            emitted_tokens=before.emitted_tokens + emitted_tokens,
            expected_seconds=before.expected_seconds + expected_seconds,
            measured_seconds=before.measured_seconds + measured_seconds,
            num_changes=before.num_changes + changed,
            num_probes=before.num_probes + probed,
        )
