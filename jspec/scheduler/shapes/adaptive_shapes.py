"""Adaptive draft shapes: for each decode, choose the shape with the most tokens per second.

A step that emits E tokens per row in c seconds is worth E / c. E is 1 plus, for each depth, the
share of verifications that reached it. c was measured when the shape's program was built, and is
corrected by step times under load. Both drift, so both estimates decay.

    worked example, chain 3/1/4, one row, milliseconds of an H200: plain 4.14, 3/1/4 4.85
    of 100 verifications 60 accepted one draft or more, 40 two, 30 three: E = 1 + 0.6 + 0.4 + 0.3
    worth of 3/1/4: 2.3 / 4.85 = 0.47 tokens a millisecond; of plain: 1 / 4.14 = 0.24

Only running a shape shows its acceptance and cost. So a shape that might be worth more, by
optimistic estimates, is probed for a few steps once enough time has been saved for the expected
loss: PROBE_SHARE of all time, which bounds the total cost of probes.

Statistics are engine-wide, since all rows of a step have one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.step_options import StepOptions
from jspec.scheduler.shapes.shape_choice import ShapeTotals, StepCosts
from jspec.spec import indexing as core_shapes

# Chosen by benchmarks/simulate_adaptive.py.
MARGIN = 0.015  # relative gain for which the shape is changed
HALF_VERIFICATIONS = 512  # verifications after which an observation has half its weight
HALF_STEPS = 256  # the same, in decode steps that verified nothing at a depth
HALF_HOPE = 64  # such decode steps after which observations have half their weight against HOPE
PRIOR = 4.0  # weight of the acceptance of all shapes in that of one, in verifications
HOPE = 2.0  # successful verifications that an optimistic estimate adds
# Share of an uncorrected cost that may be due to other work of the host while it was measured,
# such as compiling.
HOPED_COST = 0.3
COST_GAIN, COST_CLIP = 0.05, 0.05  # gain, and cap on the relative deviation, of a cost correction
# Gain and cap for probes faster than expected: they are short, and a slow host only adds time.
LESS_GAIN, LESS_CLIP = 0.3, 0.5
PROBE_SHARE = 0.008  # of all time may be lost by probes
LEAST_LOSS = 0.1  # share of a probe's time that counts as lost at least
MOST_SAVED = 32.0  # limit of the savings and of the debt, in steps of the chosen shape
FIRST_SAVED = 6.0
# Minimum size of a probe: its first step does not show the cost of a shape.
PROBE_STEPS, PROBE_VERIFICATIONS = 4, 8
MOST_CHARGED = 1.5  # steps charged at most for a change of shape, since a slow moment adds time

Place = tuple[int, StepOptions]  # key of a cost: the batch's bucket, and the options of its rows


class Acceptance:
    """Decaying acceptance statistics by depth."""

    def __init__(self, num_steps: int) -> None:
        self.reached = np.zeros(num_steps)  # weight of verifications with a draft at this depth
        self.passed = np.zeros(num_steps)  # weight of those that accepted it
        self.idle = np.zeros(num_steps)  # decode steps since the last such verification

    @property
    def freshness(self) -> np.ndarray:
        return 0.5 ** (self.idle / HALF_HOPE)

    def see(self, counts: Sequence[int]) -> None:
        """Count a decode step: counts[i] verifications accepted i of len(counts) - 1 drafts."""
        aged, left = 0.5 ** (self.idle / HALF_STEPS), sum(counts)
        self.idle += 1
        for depth, rejected in enumerate(counts[:-1]):
            if left:
                kept = aged[depth] * 0.5 ** (left / HALF_VERIFICATIONS)
                self.reached[depth] = kept * self.reached[depth] + left
                left -= rejected
                self.passed[depth] = kept * self.passed[depth] + left
                self.idle[depth] = 0


class AdaptiveShapes:
    """A `ShapeChooser` for one thread. step_costs: available shapes and measured seconds."""

    def __init__(self, limits: ServeLimits, *, step_costs: StepCosts) -> None:
        self._limits = limits
        self._step_costs = step_costs
        self._current = limits.draft_shape
        depth = limits.draft_shape.depth
        self._any = Acceptance(depth)  # of all shapes, as a prior for rare ones
        self._accepted = {shape.topk: Acceptance(depth) for shape in limits.shapes}
        self._measured: dict[Place, dict[SpeculativeConfig, float]] = {}
        self._given: dict[Place, Mapping[SpeculativeConfig, float]] = {}  # `measured`, uncapped
        self._shift: dict[Place, float] = {}  # correction in seconds of all shapes
        self._own_shift: dict[tuple[Place, SpeculativeConfig], float] = {}
        self._num_seen: dict[tuple[Place, SpeculativeConfig], int] = {}
        self._seen_shift: dict[tuple[Place, SpeculativeConfig], float] = {}  # when it ran last
        self._saved = FIRST_SAVED
        self._probe, self._num_probes_left = limits.draft_shape, 0
        self._ran: tuple[Place, SpeculativeConfig] | None = None  # of the last step, a decode
        self._totals = ShapeTotals(num_steps=limits.draft_shape.num_steps)

    @property
    def totals(self) -> ShapeTotals:
        return self._totals

    def expected_tokens(self, shape: SpeculativeConfig, *, hope: float = 0.0) -> float:
        """Return the expected tokens per row of a step, at least those of a smaller top-k. hope:
        further verifications that are assumed to have accepted each draft."""
        within = (topk for topk in self._accepted if topk <= shape.topk)
        return max(self._emitted(topk, shape.depth, hope=hope) for topk in within)

    def _emitted(self, topk: int, depth: int, *, hope: float) -> float:
        own, everything = self._accepted[topk], self._any
        weight = 1.0 if hope == 0 else own.freshness
        guess = (everything.passed + PRIOR / 2) / (everything.reached + PRIOR)
        reached, passed = own.reached + PRIOR, own.passed + PRIOR * guess
        rates = (weight * passed + hope) / (weight * reached + hope)
        return 1.0 + float(np.cumprod(rates[:depth]).sum())

    def choose(self, *, num_rows: int, options: StepOptions) -> SpeculativeConfig:
        place = self._place(num_rows, options)
        given = self._step_costs(num_rows, options)
        if given is not self._given.get(place):  # programs were added
            self._given[place], self._measured[place] = given, _capped(given)
        measured = self._measured[place]
        if self._limits.draft_shape not in measured:  # nothing to compare others with yet
            return self._limits.draft_shape
        worth = {s: self.expected_tokens(s) / self._cost(place, s) for s in measured}
        before = self._current if self._current in measured else self._limits.draft_shape
        best = max(worth, key=lambda shape: worth[shape])
        self._current = best if worth[best] > (1 + MARGIN) * worth[before] else before
        self._saved = min(self._saved + PROBE_SHARE, MOST_SAVED)
        self._plan_probe(place, worth)
        is_probe = self._num_probes_left > 0
        self._num_probes_left -= is_probe
        self._count(num_changes=self._current != before, num_probes=is_probe)
        return self._probe if is_probe else self._current

    def _plan_probe(self, place: Place, worth: dict[SpeculativeConfig, float]) -> None:
        if self._num_probes_left and self._probe in worth:
            return
        self._num_probes_left = 0
        hoped = {
            shape: self.expected_tokens(shape, hope=HOPE) / self._hoped_cost(place, shape)
            for shape in worth
            if shape != self._current
        }
        shape = max(hoped, key=lambda shape: hoped[shape], default=self._current)
        if hoped.get(shape, 0.0) <= (1 + MARGIN) * worth[self._current]:
            return
        # The loss is the time beyond what the chosen shape needs for the same tokens. It is at
        # least LEAST_LOSS, or an equally good shape would be probed forever.
        share = max(1 - worth[shape] / worth[self._current], LEAST_LOSS)
        num_steps = max(PROBE_STEPS, PROBE_VERIFICATIONS // place[0])
        cost = num_steps * share * self._cost(place, shape) / self._cost(place, self._current)
        if self._saved >= min(cost, MOST_SAVED):
            self._saved -= cost
            self._probe, self._num_probes_left = shape, num_steps

    def _place(self, num_rows: int, options: StepOptions) -> Place:
        return core_shapes.bucket(num_rows, self._limits.programs.decode_buckets), options

    def _cost(self, place: Place, shape: SpeculativeConfig) -> float:
        measured = self._measured[place][shape]
        shift = self._shift.get(place, 0.0) + self._own_shift.get((place, shape), 0.0)
        return max(measured + shift, measured / 2)

    def _hoped_cost(self, place: Place, shape: SpeculativeConfig) -> float:
        """Return an optimistic cost, without the rise of the shared correction since its run."""
        risen = self._shift.get(place, 0.0) - self._seen_shift.get((place, shape), 0.0)
        cost = self._cost(place, shape) * (
            1 - HOPED_COST / (1 + self._num_seen.get((place, shape), 0))
        )
        return max(cost - max(risen, 0.0), cost / 2)

    def read(self, plan: StepPlan, result: StepResult) -> None:
        shape = plan.shape
        emitted = np.concatenate([of_round.num_emitted for of_round in result.rounds])
        expected = self.expected_tokens(shape) * len(emitted)
        self._count(expected_tokens=expected, emitted_tokens=int(emitted.sum()))
        counts = np.bincount(emitted - 1, minlength=shape.max_emitted).tolist()
        verified = () if shape.is_plain else counts
        self._any.see(verified)
        for topk, accepted in self._accepted.items():
            accepted.see(verified if topk == shape.topk else ())

    def timed(self, plan: StepPlan, seconds: float) -> None:
        # Costs are not corrected by steps that follow another program, wait for the host or include
        # a draft prefill, whose times differ. The cost of a change of shape is taken from the
        # savings for probes.
        before, self._ran = self._ran, None
        if plan.is_prefill:
            return
        shape, place = plan.shape, self._place(len(plan.rows), plan.options)
        if shape not in self._measured.get(place, {}):
            return
        self._ran = place, shape
        cost = self._cost(place, shape)
        if before is not None and before[0] == place and before[1] != shape:
            charge = min(max(seconds / cost - 1, 0.0), MOST_CHARGED)
            self._saved = max(self._saved - charge, -MOST_SAVED)
        if before != self._ran or plan.pending or plan.constraints:
            return
        self._count(expected_seconds=cost, measured_seconds=seconds)
        is_probe = shape != self._current
        gain, clip = (
            (LESS_GAIN, LESS_CLIP) if is_probe and seconds < cost else (COST_GAIN, COST_CLIP)
        )
        change = gain * min(max(seconds - cost, -clip * cost), clip * cost)
        self._own_shift[self._ran] = self._own_shift.get(self._ran, 0.0) + change
        if not is_probe:
            self._shift[place] = self._shift.get(place, 0.0) + change
        self._num_seen[self._ran] = self._num_seen.get(self._ran, 0) + 1
        self._seen_shift[self._ran] = self._shift.get(place, 0.0)

    def _count(self, **more: float) -> None:
        self._totals = self._totals.plus(num_steps=self._current.num_steps, **more)


def _capped(costs: Mapping[SpeculativeConfig, float]) -> dict[SpeculativeConfig, float]:
    """Cap each cost: a shape costs at most as much as any with at least its work."""

    def work(of: SpeculativeConfig) -> tuple[int, int, int]:
        return of.num_steps, of.topk, of.num_draft_tokens

    def is_within(shape: SpeculativeConfig, other: SpeculativeConfig) -> bool:
        return all(a <= b for a, b in zip(work(shape), work(other), strict=True))

    return {s: min(cost for o, cost in costs.items() if is_within(s, o)) for s in costs}
