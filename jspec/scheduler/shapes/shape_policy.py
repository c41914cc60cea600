"""Which shape of a decode step pays most: arithmetic over what was seen of drafts and of time.

A step of B rows that emits E tokens a row in c seconds is worth E / c. E of a shape is 1 and, for
each depth, the share of verifications that got so far; c is measured by shape and bucket. Nothing
here knows a plan, a queue or a clock: numbers in, a shape out.

    worked example, chain 3/1/4, 1 row, an H200's milliseconds: plain 4.14, 3/1/4 4.85
    of 100 verifications 60 accepted 1 draft or more, 40 two, 30 three: E = 1 + 0.6 + 0.4 + 0.3
    worth of 3/1/4   2.3 / 4.85 = 0.47 tokens a millisecond; of plain 1 / 4.14 = 0.24
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jspec.config.limits import SpeculativeConfig

# Chosen by hand, and checked by benchmarks/simulate_shapes.py (decision 28).
HALF_VERIFICATIONS = 256  # after so many what was seen before counts half
LEAST_DECAY = 0.9  # ... but a step of many rows leaves this much of it
HALF_STEPS = 256  # what is not observed any more counts half after so many decode steps
MARGIN = 0.015  # another shape must be worth so much more to be taken
COST_SAMPLES = 33  # a cost is the median of the last so many steps: a slow moment takes ten or so
ENOUGH_SAMPLES = 3  # and is known from so many on
MOST_DRIFT = 0.25  # of a cost: what moved further with another shape's is to be measured again
SURE_SAMPLES = 9  # so many do not all lie in a slow moment, or hardly ever
COLD_RUNS = 2  # of a program, which are slower: a GPU records its launches in them
DOUBTS = 2.0  # verifications that a guess counts for beside what was seen


Family = tuple[int, int]


def family(shape: SpeculativeConfig) -> Family:
    """Shapes of one family accept alike: a chain the beginning of a longer one."""
    return (shape.topk, 0 if shape.topk == 1 else shape.num_draft_tokens)


def is_part(shape: SpeculativeConfig, *, of: SpeculativeConfig) -> bool:
    """Whether its nodes are some of the other's, drafted alike: so it never accepts more."""
    return shape.num_draft_tokens < of.num_draft_tokens and (
        (shape.num_steps, shape.topk) == (of.num_steps, of.topk)
    )


def does_less(shape: SpeculativeConfig, other: SpeculativeConfig) -> bool:
    """Than the other one, whatever is drafted: no more levels, candidates or nodes."""

    def work(of: SpeculativeConfig) -> tuple[int, ...]:
        return of.num_steps, of.topk, of.num_draft_tokens

    return shape != other and all(a <= b for a, b in zip(work(shape), work(other), strict=True))


@dataclass(slots=True)
class Survival:
    """How far verifications got, decayed. tried[d], got[d]: weight of those that got to depth d and
    were to get to d + 1, and that did: where no draft gets to d, nothing is known of deeper ones.
    guess: of something alike, at least as deep; what is accepted where little was tried. None: half
    of the drafts that are reached at first."""

    tried: list[float]
    got: list[float]
    guess: Survival | None = None

    @classmethod
    def of(cls, num_steps: int, *, guess: Survival | None = None) -> Survival:
        doubts = DOUBTS if guess is None else 0.0
        return cls(tried=[doubts] * num_steps, got=[doubts / 2] * num_steps, guess=guess)

    def see(self, counts: Sequence[int], *, num_steps: int, age: int) -> None:
        """counts[i]: verifications of a step that accepted i drafts, of S at most num_steps. age:
        decode steps since it saw something."""
        reached, aged = sum(counts), 0.5 ** (age / HALF_STEPS)
        for d in range(num_steps):
            kept = max(0.5 ** (reached / HALF_VERIFICATIONS), LEAST_DECAY) * aged
            self.tried[d] = kept * self.tried[d] + reached
            reached -= counts[d] if d < len(counts) else 0
            self.got[d] = kept * self.got[d] + reached

    def expected(self, num_steps: int) -> float:
        """Tokens of a verification with so many levels, bonus included."""
        expected = share = 1.0
        for d in range(num_steps):
            share *= self._rate(d)
            expected += share
        return expected

    def _rate(self, d: int) -> float:
        """The share of those at depth d that gets to d + 1."""
        if self.guess is None:
            return self.got[d] / self.tried[d]
        return (self.got[d] + DOUBTS * self.guess._rate(d)) / (self.tried[d] + DOUBTS)


@dataclass(slots=True)
class Costs:
    """Seconds of a step by shape and bucket, without the first COLD_RUNS of each.

    steady: of steps after one of the same program. Others, after a prompt's chunk or another shape,
    are up to twice as long or half as long on a GPU's host, and count while there is nothing else.
    switches: what steps after one of another shape took beyond the steady ones, by bucket.
    led: by bucket the shape that is run now, but for looks, and its steady steps since. drift: what
    that one's cost has moved by since another was seen last, so that one's has, too: rows whose
    texts grow have longer steps, whatever is drafted.
    """

    samples: dict[tuple[SpeculativeConfig, int], deque[float]] = field(default_factory=dict)
    steady: dict[tuple[SpeculativeConfig, int], deque[float]] = field(default_factory=dict)
    switches: dict[int, deque[float]] = field(default_factory=dict)
    cold: dict[tuple[SpeculativeConfig, int], int] = field(default_factory=dict)
    led: dict[int, tuple[SpeculativeConfig, int]] = field(default_factory=dict)
    drift: dict[tuple[SpeculativeConfig, int], float] = field(default_factory=dict)

    def see(
        self,
        shape: SpeculativeConfig,
        bucket: int,
        seconds: float,
        *,
        before: SpeculativeConfig | None,
        leads: bool = False,
    ) -> None:
        """before: the shape of the step before, at the same bucket; None: it was something else.
        leads: it is the shape that is run, and this no look."""
        key = (shape, bucket)
        left = self.cold.setdefault(key, COLD_RUNS)
        if left:
            self.cold[key] = left - 1
            return
        is_steady = before == shape
        self.see_change(shape, bucket, seconds, before=before)
        has_strayed, moved = self.has_strayed(shape, bucket), self.drift.pop(key, 0.0)
        if moved and not has_strayed:
            for kept in (self.samples, self.steady):
                old = [_drifted(sample, by=moved) for sample in kept.get(key, ())]
                kept[key] = deque(old, maxlen=COST_SAMPLES)
        usual = self.known(shape, bucket)
        for kept in (self.samples, *([self.steady] if is_steady else [])):
            kept.setdefault(key, deque(maxlen=COST_SAMPLES)).append(seconds)
        now = self.known(shape, bucket)
        if leads and is_steady and usual is not None and now is not None:
            self._lead(shape, bucket, now - usual)

    def see_change(
        self,
        shape: SpeculativeConfig,
        bucket: int,
        seconds: float,
        *,
        before: SpeculativeConfig | None,
    ) -> None:
        """A step after another shape's, which may have told the drafter of tokens before."""
        usual = self.known(shape, bucket)
        if before not in (None, shape) and usual is not None:
            beyond = self.switches.setdefault(bucket, deque(maxlen=COST_SAMPLES))
            beyond.append(seconds - usual)

    def _lead(self, shape: SpeculativeConfig, bucket: int, moved: float) -> None:
        """The cost of the shape that is run has moved; once all its samples are of this run, so
        have those of the others."""
        led, count = self.led.get(bucket, (shape, 0))
        count = count + 1 if led == shape else 1
        self.led[bucket] = shape, count
        if count > COST_SAMPLES and moved:
            for other in self.samples:
                if other[1] == bucket and other[0] != shape:
                    self.drift[other] = self.drift.get(other, 0.0) + moved

    def switch(self, bucket: int) -> float:
        """Seconds that are lost where one shape follows another: on a GPU the host tells a graph
        of launches where its memory is. On average, as some of them end early."""
        found = self.switches.get(bucket, ())
        enough = len(found) >= ENOUGH_SAMPLES
        return max(statistics.fmean(found), 0.0) if enough else 0.0

    def fade(self, shape: SpeculativeConfig, bucket: int) -> None:
        """It is about to be measured again: what was seen last counts as much as what will be. Of
        the two the lower half is believed, so one slow moment does no harm."""
        for kept in (self.samples, self.steady):
            found = kept.get((shape, bucket), deque())
            while len(found) > ENOUGH_SAMPLES:
                found.popleft()

    def known(self, shape: SpeculativeConfig, bucket: int) -> float | None:
        """The median; None while there is too little to say."""
        found = self._kept(shape, bucket)
        moved = self.drift.get((shape, bucket), 0.0)
        return _drifted(statistics.median_low(found), by=moved) if found else None

    def has_strayed(self, shape: SpeculativeConfig, bucket: int) -> bool:
        """Whether another shape's cost has moved so far that it says nothing of this one's: it is
        that shape alone, or the whole device."""
        found, moved = self._kept(shape, bucket), self.drift.get((shape, bucket), 0.0)
        return bool(found) and abs(moved) > MOST_DRIFT * statistics.median_low(found)

    def all_known(
        self, shapes: Sequence[SpeculativeConfig], bucket: int
    ) -> dict[SpeculativeConfig, float]:
        """Of those of which something is known. Few samples may all be of a slow moment: by them a
        shape takes no longer than one that does more."""
        known = {s: cost for s in shapes if (cost := self.known(s, bucket)) is not None}
        unsure = [s for s in known if len(self._kept(s, bucket)) < SURE_SAMPLES]
        capped = {s: min(c for o, c in known.items() if o == s or does_less(s, o)) for s in unsure}
        return known | capped

    def least(
        self,
        shape: SpeculativeConfig,
        costs: Mapping[SpeculativeConfig, float | None],
        bucket: int,
    ) -> float | None:
        """What it takes at least: as long as those of `costs` that do less and are surely known.
        None: there is none."""
        less = {s: cost for s, cost in costs.items() if cost is not None and does_less(s, shape)}
        sure = (c for s, c in less.items() if len(self._kept(s, bucket)) >= SURE_SAMPLES)
        return max(sure, default=None)

    def guess(
        self, shape: SpeculativeConfig, bucket: int, *, beside: SpeculativeConfig
    ) -> float | None:
        """A cost that is not known here, by the nearest bucket where it is, and hopefully: that of
        fewer rows, or as much more than `beside`, which is known here, as rows are fewer than where
        both are known. None: nowhere."""
        here = self.known(beside, bucket)
        others = {of for _, of in self.samples if of != bucket}
        for other in sorted(others, key=lambda of: abs(math.log(of / bucket))):
            cost, there = self.known(shape, other), self.known(beside, other)
            if cost is not None and other < bucket:
                return cost
            if cost is not None and here is not None and there is not None:
                fewer = bucket / other
                return max(here + fewer * (cost - there), fewer * cost)
        return None

    def _kept(self, shape: SpeculativeConfig, bucket: int) -> Sequence[float]:
        for kept in (self.steady, self.samples):
            found = kept.get((shape, bucket), ())
            if len(found) >= ENOUGH_SAMPLES:
                return found
        return ()


def _drifted(seconds: float, *, by: float) -> float:
    """Never to 0, nor far."""
    most = MOST_DRIFT * seconds
    return seconds + min(max(by, -most), most)


def best_shape(
    current: SpeculativeConfig,
    *,
    expected: Mapping[SpeculativeConfig, float],
    costs: Mapping[SpeculativeConfig, float],
) -> SpeculativeConfig:
    """The shape that is worth most, of those whose cost is known; `current` unless another one is
    worth MARGIN more. expected: tokens a row, costs: seconds, both > 0.
    """
    worth = {shape: expected[shape] / cost for shape, cost in costs.items()}
    if not worth:
        return current
    best = max(worth, key=lambda shape: worth[shape])
    is_worth_it = current not in worth or worth[best] > (1 + MARGIN) * worth[current]
    return best if is_worth_it else current


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTotals:
    """What a chooser expected of the decodes that were read, and what came: tokens of all rows and
    seconds of those steps of which both are known. num_changes: of the shape that is worth most.
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


NO_SHAPES = ShapeTotals()
