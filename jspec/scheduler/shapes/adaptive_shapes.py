"""The chooser of an adaptive engine: takes what is worth most by late statistics, and looks around.

Two things can only be known by trying. What a shape costs at a bucket: each shape is tried a few
times in a row where a bucket is new, again soon, and then ever more rarely: one look may have met
a moment when all was slow. What a deeper shape would accept: while the steps are plain or shallow,
one now and then is of a deeper shape, whose verifications say how far drafts would get. A look
loses time, by all that is known, and each step after one of another program some more; so it comes
so rarely that it loses LOOK_SHARE or PROBE_SHARE of all time: what is nearly as good is looked at
often, and what costs several times as much hardly ever.

The statistics are the engine's: all rows of a step share its shape. It decides nothing about rows.
"""

from __future__ import annotations

import numpy as np

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.messages.features import StepFeatures
from jspec.messages.plan import StepKind, StepPlan, StepResult
from jspec.scheduler.shapes.shape_choice import ReadyShapes
from jspec.scheduler.shapes.shape_policy import (
    COLD_RUNS,
    ENOUGH_SAMPLES,
    MARGIN,
    Costs,
    Family,
    ShapeTotals,
    Survival,
    best_shape,
    family,
    is_part,
)
from jspec.spec import indexing as core_shapes

LOOK_SHARE = 0.0015  # of all time, for each shape that is looked at
SOON_SHARE = 0.01  # the same where a cost is measured again for the first time
# The same for drafts while nothing is drafted, and where depth 1 says that more of them might pay.
PROBE_SHARE, HOPED_SHARE = 0.0045, 0.01
PROBE_STEPS, SOON_STEPS = 64, 16  # at most one of so many
FIRST_STEPS = 8  # or more at a bucket until a shape whose cost is unknown there is tried
# After so many a known cost is measured again, at first and in the end, if the loss allows.
FIRST_REFRESH, REFRESH_STEPS = 32, 2048
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
        # Of all shapes: few verifications of one say less of it than those of the others do.
        deepest = limits.spec.num_steps
        self._any = Survival.of(deepest, guess=Survival.of(deepest))
        self._survival = {key: Survival.of(steps, guess=self._any) for key, steps in most.items()}
        self._parts = {  # families of what is a part of each
            whole: tuple(family(part) for part in limits.shapes if is_part(part, of=whole))
            for whole in limits.shapes
        }
        self._expected: dict[SpeculativeConfig, float] = {}  # of the choice that is being made
        self._seen_at = dict.fromkeys(most, 0)
        self._num_chosen = 0
        self._probed_at = dict.fromkeys(most, 0)
        self._measured_at: dict[tuple[SpeculativeConfig, int], int] = {}
        self._num_refreshes: dict[tuple[SpeculativeConfig, int], int] = {}
        self._ran_before: tuple[SpeculativeConfig, int] | None = None
        self._trying, self._num_tries_left = limits.spec, 0
        self._bucket, self._entered_at = 0, 0  # where steps are now, and since which choice
        self._untried: dict[int, int] = {}  # steps at a bucket since an unknown cost was tried
        self._totals = ShapeTotals(num_steps=limits.spec.num_steps)

    @property
    def totals(self) -> ShapeTotals:
        """A snapshot; from any thread."""
        return self._totals

    def expected_tokens(self, shape: SpeculativeConfig) -> float:
        """Tokens a row that a step of this shape emits, as far as is known; of a tree with all of
        its nodes at least what some of them are known to emit."""
        families = (family(shape), *self._parts[shape])  # a part has as many steps
        return max(self._survival[key].expected(shape.num_steps) for key in families)

    def choose(self, *, num_rows: int, features: StepFeatures) -> SpeculativeConfig:
        """See ShapeChooser."""
        self._num_chosen += 1
        bucket = core_shapes.bucket(num_rows, self._limits.decode_buckets)
        is_elsewhere = bucket != self._bucket
        if is_elsewhere:  # what is tried here says nothing of there
            self._bucket, self._entered_at, self._num_tries_left = bucket, self._num_chosen, 0
        self._untried[bucket] = self._untried.get(bucket, 0) + 1
        ready = self._ready(num_rows, features)
        costs = self._costs.all_known(ready, bucket)
        known = {shape: costs.get(shape) for shape in ready}
        before = self._current
        current = before if before in ready else self._limits.spec
        if costs and current not in costs:  # what little is known here need not be better
            guess = self._costs.guess(current, bucket, beside=next(iter(costs)))
            costs |= {} if guess is None else {current: guess}
        self._expected = {shape: self.expected_tokens(shape) for shape in ready}
        self._current = best_shape(
            current,
            expected=self._expected,
            costs=costs,
        )
        # If a slow moment was to blame, that is soon seen.
        if self._current != before and not is_elsewhere:
            self._num_refreshes.pop((before, bucket), None)
        probe = self._probe(ready, known, bucket)
        self._count(changed=self._current != before, probed=probe is not None)
        return probe or self._current

    def _probe(
        self,
        ready: tuple[SpeculativeConfig, ...],
        known: dict[SpeculativeConfig, float | None],
        bucket: int,
    ) -> SpeculativeConfig | None:
        """Another shape than the current one, if it is time to look at it."""
        now, others = self._num_chosen, [shape for shape in ready if shape != self._current]
        if self._num_tries_left and self._trying in ready:
            self._num_tries_left -= 1
            return self._trying
        is_known = known[self._current] is not None
        unknown = [shape for shape in others if known[shape] is None]
        guesses = {s: self._costs.guess(s, bucket, beside=self._current) for s in unknown}
        known = {**known, **guesses}
        for shape in unknown if is_known else ():
            if self._untried[bucket] > self._first_after(shape, known):
                self._untried[bucket] = 0
                return self._try(shape, extra=COLD_RUNS)
        passes = now - self._entered_at < FIRST_STEPS  # perhaps: what is unknown waits
        deepest = {family(shape): shape for shape in sorted(others, key=lambda s: s.num_steps)}
        own = family(self._current)
        for key, shape in sorted(deepest.items(), key=lambda item: self._seen_at[item[0]]):
            is_seen = key == own and shape.num_steps <= self._current.num_steps
            waits = passes and (shape in unknown or not is_known)
            if not (shape.is_plain or is_seen or waits) and self._is_due(shape, known):
                self._probed_at[key] = now
                is_far = self._switch_steps(known) > 1  # there and back: then for several looks
                return self._try(shape) if is_far and self._might_pay(shape, known) else shape
        for shape in (s for s in others if is_known and s not in unknown):
            at = (shape, bucket)
            if now - self._measured_at.get(at, now) >= self._refresh_after(shape, bucket, known):
                self._measured_at[at] = now
                self._num_refreshes[at] = self._num_refreshes.get(at, 0) + 1
                self._costs.fade(shape, bucket)
                return self._try(shape)
        return None

    def _first_after(
        self, shape: SpeculativeConfig, known: dict[SpeculativeConfig, float | None]
    ) -> float:
        """Steps at the bucket after which a shape whose cost is unknown there is tried: as rarely
        as if what is known of other buckets held here."""
        lost = self._steps_lost(shape, known, num_looks=TRY_STEPS + COLD_RUNS, switching=False)
        share = SOON_SHARE if self._could_pay(shape, known) else LOOK_SHARE
        return max(FIRST_STEPS, (lost or 0.0) / share)

    def _could_pay(
        self, shape: SpeculativeConfig, known: dict[SpeculativeConfig, float | None]
    ) -> bool:
        """Whether it would be best if it took no longer than what does less: if not, no look at
        its cost can show that it is."""
        own, least = known[self._current], self._costs.least(shape, known, self._bucket)
        if own is None or least is None:
            return True
        worth = self._expected[self._current] / own
        return self._expected[shape] / least > (1 + MARGIN) * worth

    def _refresh_after(
        self, shape: SpeculativeConfig, bucket: int, known: dict[SpeculativeConfig, float | None]
    ) -> float:
        """Steps after which a known cost is measured again. The first time soon: it is the first
        look that is mistaken, or the last before a shape was left. So is one that found less to
        take longer than more, or that was made when another shape cost much more or less."""
        count = self._num_refreshes.get((shape, bucket), 0)
        if self._costs.has_strayed(shape, bucket):
            count = 0
        lost = self._steps_lost(shape, known, num_looks=TRY_STEPS, switching=count > 0)
        found, believed = self._costs.known(shape, bucket), known[shape]
        is_mistaken = found is not None and believed is not None and found > believed
        is_soon = (count == 0 or is_mistaken) and self._could_pay(shape, known)
        least = (lost or 0.0) / (SOON_SHARE if is_soon else LOOK_SHARE)
        return max(least, min(max(least, FIRST_REFRESH) * 2**count, REFRESH_STEPS))

    def _is_due(
        self, shape: SpeculativeConfig, known: dict[SpeculativeConfig, float | None]
    ) -> bool:
        """Whether it is time to see how far this shape's drafts would get."""
        key, now, lost = family(shape), self._num_chosen, self._steps_lost(shape, known)
        if now - max(self._probed_at.values()) < SOON_STEPS:  # one after the other
            return False
        is_only_sign = self._current.is_plain and key == self._cheapest_drafts(known)
        share = PROBE_SHARE if is_only_sign else LOOK_SHARE
        after = max(PROBE_STEPS, (lost or 0.0) / share)
        if self._might_pay(shape, known):
            after = max(SOON_STEPS, self._switch_steps(known) / HOPED_SHARE)
        seen_at = 0 if key == family(self._current) else self._seen_at[key]  # there: not so deep
        return now - max(self._probed_at[key], seen_at) >= after

    def _cheapest_drafts(self, known: dict[SpeculativeConfig, float | None]) -> Family | None:
        """What shapes of this family accept says of the others, too."""
        costs = {s: cost for s, cost in known.items() if cost is not None and not s.is_plain}
        return family(min(costs, key=lambda shape: costs[shape])) if costs else None

    def _steps_lost(
        self,
        shape: SpeculativeConfig,
        known: dict[SpeculativeConfig, float | None],
        *,
        num_looks: int = 1,
        switching: bool = True,
    ) -> float | None:
        """Steps of the current shape that num_looks in a row at this one lose, as far as is known;
        None: a cost is not. switching: with the way there and back."""
        own, cost = known[self._current], known[shape]
        if own is None or cost is None:
            return None
        tokens, here = self._expected[shape], self._expected[self._current]
        lost = num_looks * max(cost / own - tokens / here, 0.0)
        return lost + switching * self._switch_steps(known)

    def _switch_steps(self, known: dict[SpeculativeConfig, float | None]) -> float:
        """Steps of the current shape that fit into the way to another one and back."""
        own = known[self._current]
        return 2 * self._costs.switch(self._bucket) / own if own else 0.0

    def _try(self, shape: SpeculativeConfig, *, extra: int = 0) -> SpeculativeConfig:
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
        return hoped / cost > self._expected[current] / own

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
            ).tolist()
            key = family(shape)
            for survival, seen_at in (
                (self._survival[key], self._seen_at[key]),
                (self._any, max(self._seen_at.values())),
            ):
                age = max(now - seen_at - 1, 0)
                survival.see(counts, num_steps=shape.num_steps, age=age)
            self._seen_at[key] = now
        self._count(expected_tokens=expected, emitted_tokens=emitted)

    def timed(self, plan: StepPlan, seconds: float) -> None:
        """See ShapeChooser. What waits for the host (grammars) or tells the drafter of more than
        its own tokens is no measure of a shape."""
        before, self._ran_before = self._ran_before, None
        if plan.kind is not StepKind.DECODE:
            return
        shape = plan.spec(self._limits)
        bucket = core_shapes.bucket(len(plan.rows), self._limits.decode_buckets)
        self._ran_before = shape, bucket
        ran = before[0] if before is not None and before[1] == bucket else None
        if plan.owed and not plan.constraints:
            self._costs.see_change(shape, bucket, seconds, before=ran)
        if plan.constraints or plan.owed:
            return
        expected = self._costs.known(shape, bucket)
        if expected is not None:
            self._count(expected_seconds=expected, measured_seconds=seconds)
        leads = shape == self._current
        self._costs.see(shape, bucket, seconds, before=ran, leads=leads)
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
