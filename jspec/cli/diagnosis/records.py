"""Results of an examination: the numbers and the findings."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jspec.cli.diagnosis.agreement import Agreement
from jspec.cli.diagnosis.findings import SURE, Finding
from jspec.cli.diagnosis.templates import TemplateCost
from jspec.cli.diagnosis.tensors import TensorFact
from jspec.cli.diagnosis.texts import Text

BUCKETS = (64, 256, 1024, 4096, 2**31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tokens `first` to `last` of the texts, and the first draft's share of agreement there."""

    first: int
    last: int
    num_served: int
    served: float  # over num_served steps
    num_forced: int
    forced: float  # teacher-forced, over num_forced tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    algorithm: str
    shape: str
    dtype: str
    head: str
    aux_layer_ids: tuple[int, ...]
    rope_theta: float | None
    target_rope_theta: float
    windows: tuple[int, ...]
    draft_vocab_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All measurements; None if not measurable. Lists by depth start at depth 1."""

    pair: Pair
    num_texts: int
    num_tokens: int
    acceptance_length: float
    acceptance_error: float  # standard errors, also below
    served_by_depth: list[float]
    forced_by_depth: list[float] | None
    confidence: float | None
    unlike_served: float | None
    buckets: tuple[Bucket, ...]
    coverage: float | None
    step_seconds: float
    step_error: float
    propose_seconds: float | None
    plain_step_seconds: float
    plain_step_error: float
    templates: tuple[TemplateCost, ...]
    tensors: tuple[TensorFact, ...]
    tried: tuple[tuple[str, str, float, float], ...]  # kind, fault, gain, standard errors
    findings: tuple[Finding, ...]
    undecided: tuple[str, ...]  # questions for which measurements are too few or too noisy

    @property
    def speedup(self) -> float:
        """Tokens per second of one row, with speculation over without."""
        return self.acceptance_length * self.plain_step_seconds / self.step_seconds

    @property
    def speedup_margin(self) -> float:
        """SURE standard errors of the speedup, from times and the acceptance length."""
        shares = (
            self.acceptance_error / self.acceptance_length,
            self.plain_step_error / self.plain_step_seconds,
            self.step_error / self.step_seconds,
        )
        return SURE * self.speedup * math.hypot(*shares)

    @property
    def pays(self) -> bool | None:
        """True if speculation pays; None if the speedup is too close to 1 to tell."""
        return None if abs(self.speedup - 1) < self.speedup_margin else self.speedup >= 1

    def to_json(self) -> dict[str, Any]:
        more = {"speedup": self.speedup, "speedup_margin": self.speedup_margin, "pays": self.pays}
        return {**dataclasses.asdict(self), **more}


def by_depth(num_accepted: Sequence[int], num_steps: int) -> list[float]:
    """Return the share of steps that accepted each depth, among those that accepted all before it.

    In: accepted 0 1 2 2, S = 2   Out: [0.75, 0.67]
    """
    counts = [sum(n >= depth for n in num_accepted) for depth in range(num_steps + 1)]
    return [b / a if a else 0.0 for a, b in itertools.pairwise(counts)]


def buckets_of(texts: Sequence[Text], base: Agreement | None) -> tuple[Bucket, ...]:
    """Group guesses by the number of tokens before them; only non-empty buckets."""
    found, first = [], 0
    steps = [step for text in texts for step in text.steps]
    for last in BUCKETS:
        served = [s.num_accepted > 0 for s in steps if first <= s.length < last]
        forced = np.zeros(0)
        if base is not None:
            inside = base.anchors.copy()
            inside[:, : max(first - 1, 0)] = False
            inside[:, last - 1 :] = False
            forced = base.hits[..., 0][inside]
        if served or len(forced):
            found.append(
                Bucket(
                    first=first,
                    last=last - 1,
                    num_served=len(served),
                    served=float(np.mean(served)) if served else 0.0,
                    num_forced=len(forced),
                    forced=float(forced.mean()) if len(forced) else 0.0,
                )
            )
        first = last
    return tuple(found)
