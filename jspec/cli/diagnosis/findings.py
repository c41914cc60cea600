"""Rules that turn measurements into findings, with their thresholds.

A repair is credible if it helps on all texts beyond chance and makes the head good or recovers a
third of the missing agreement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jspec.cli.diagnosis.agreement import Agreement, gain
from jspec.cli.diagnosis.readings import Reading
from jspec.cli.diagnosis.texts import Text

LEAST_GAIN, LEAST_ERRORS = 0.015, 4.0
GOOD, LEAST_OF_MISSING, MOST_OF_MISSING = 0.6, 0.1, 0.33
LEAST_FIT = 0.45  # depth-1 agreement below which an overconfident head does not fit
LEAST_NATS = 0.1  # per prompt token, gained without windows by a target trained without
MOST_UNLIKE = 0.1  # share of steps that accept another number than the teacher-forced head
LEAST_AT_ALL, SURENESS = 0.15, 0.8  # measured for healthy weak heads: 0.97 and 1.06
SURE = 2.0  # standard errors from a threshold beyond which a share or a time is decided
UNFIT = "the head does not fit; no single repair helps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault and its repair, as sentences."""

    kind: str  # one word, for JSON
    what: str
    repair: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    reading: Reading
    agreement: float
    gain: float  # in mean agreement
    errors: float  # gain in standard errors

    @classmethod
    def of(cls, reading: Reading, found: Agreement, base: Agreement) -> Trial:
        gained, errors = gain(found, base)
        return cls(reading=reading, agreement=found.mean, gain=gained, errors=errors)

    @property
    def is_believed(self) -> bool:
        return self.errors >= LEAST_ERRORS and self.is_large

    @property
    def is_large(self) -> bool:
        """True if the gain would be a repair if it were certain."""
        missing = 1 - (self.agreement - self.gain)
        if self.gain < LEAST_GAIN:
            return False
        share = self.gain / missing
        return share >= MOST_OF_MISSING or (share >= LEAST_OF_MISSING and self.agreement >= GOOD)

    @property
    def finding(self) -> Finding:
        before = self.agreement - self.gain
        return Finding(
            kind=self.reading.kind,
            what=f"{self.reading.fault}: read so, it agrees in {self.agreement:.2f} instead of "
            f"{before:.2f} of the guesses",
            repair=self.reading.repair,
        )


def best(trials: Iterable[Trial]) -> Trial | None:
    return max((t for t in trials if t.is_believed), key=lambda t: t.gain, default=None)


def undecided_trials(trials: Iterable[Trial]) -> list[str]:
    return [
        f"{trial.reading.fault}: read so, the head agrees in {trial.gain:.3f} more of the guesses, "
        f"which is {trial.errors:.1f} standard errors; expected {LEAST_ERRORS:g} to believe it"
        for trial in trials
        if trial.is_large and SURE <= trial.errors < LEAST_ERRORS
    ]


def fits(base: Agreement, *, is_coarse: bool = False) -> bool:
    """Return whether a head without a known fault was trained for this target."""
    # A head for other weights hardly ever agrees, or is far more confident than right, unlike a
    # weak healthy head or one that coarse quantization has flattened.
    return _fits(base.by_depth[0], base.confidence, is_coarse=is_coarse)


def _fits(first: float, confidence: float, *, is_coarse: bool) -> bool:
    if is_coarse and first < LEAST_FIT:
        return False
    return first >= LEAST_FIT or (first >= LEAST_AT_ALL and first >= SURENESS * confidence)


def undecided_fit(base: Agreement, *, is_coarse: bool = False) -> list[str]:
    first, count = base.by_depth[0], int(base.anchors.sum())
    error = _error_of(first, count)
    ends = [
        _fits(first + SURE * each, base.confidence, is_coarse=is_coarse) for each in (-error, error)
    ]
    if all(ends) or not any(ends):
        return []
    return [
        f"whether the head fits this target at all: it agrees in {first:.2f} ± {SURE * error:.2f} "
        f"of its first guesses, over {count} tokens, and a bound of the rule is within that"
    ]


def _error_of(share: float, count: int) -> float:
    return math.sqrt(share * (1 - share) / count)


def unfit(base: Agreement, levels: int | None) -> Finding:
    what = f"{UNFIT}: it agrees in {base.by_depth[0]:.2f} of its first guesses and is "
    what += f"{base.confidence:.2f} sure of them"
    if levels is not None:
        return Finding(
            kind="unfit",
            what=f"{what}, and an output of its matrices has {levels} different numbers: too few "
            "bits, or quantized twice",
            repair="get the head's weights as they were before they were quantized, and quantize "
            "those once, to 4 bits or more",
        )
    return Finding(
        kind="unfit",
        what=what,
        repair="get the head that was trained for these very weights of the target, or train one "
        "(jspec train-draft)",
    )


def unlike_served(forced: Agreement, texts: Sequence[Text]) -> tuple[float, int]:
    """Return (share of served verifications that accepted another number, verifications)."""
    found = []
    accepted, num_rows = forced.num_accepted, forced.hits.shape[1]
    for r, text in enumerate(texts):
        for step in text.steps:
            row = step.length - 1
            if row < num_rows and forced.anchors[r, row]:
                found.append(accepted[r, row] != step.num_accepted)
    return (float(np.mean(found)) if found else 0.0), len(found)


def undecided_serving(forced: Agreement, texts: Sequence[Text]) -> list[str]:
    share, count = unlike_served(forced, texts)
    error = SURE * _error_of(share, count) if count else 0.0
    if abs(share - MOST_UNLIKE) >= error:
        return []
    return [
        f"whether the engine serves the head as it was trained: {share:.2f} ± {error:.2f} of "
        f"{count} steps differ, and a share of {MOST_UNLIKE:g} is a fault"
    ]


def of_serving(
    base: Agreement, shifted: Sequence[tuple[Reading, Agreement]], texts: Sequence[Text]
) -> Finding | None:
    """Return why serving differs from the teacher-forced head, which does the same arithmetic."""
    share, count = unlike_served(base, texts)
    if count == 0 or share <= MOST_UNLIKE:
        return None
    what = f"{100 * share:.0f}% of {count} served steps accept another number of drafts than the "
    what += "head does when it is teacher-forced"
    for reading, found in shifted:
        if unlike_served(found, texts)[0] < share / 2:
            which = "after" if reading.shift > 0 else "before"
            return Finding(
                kind="anchor_row",
                what=f"{what}; they are those of a head that is given the feature of the row "
                f"{which} the right one",
                repair="a fault of the engine, not of the head: the row that advance anchors on",
            )
    return Finding(
        kind="serving",
        what=what,
        repair="a fault of the engine, not of the head: its rows, positions, pages or features",
    )
