"""A few cases that together contain each pair of values of any two settings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Case = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]


def pairs_of(case: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
    """Return each pair of settings of a case, with their values."""
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(case, 2)}


def all_pairs(factors: Factors) -> set[tuple[str, Any, str, Any]]:
    return {
        (a, x, b, y)
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    }


def covering_array(factors: Factors, *, seed: int = 7) -> list[Case]:
    """Return a greedy pairwise cover; deterministic."""
    missing = all_pairs(factors)
    rng = np.random.default_rng(seed)
    cases = []
    while missing:
        a, x, b, y = min(missing, key=str)
        best: Case = {}
        for _ in range(64):
            case = {
                name: levels[int(rng.integers(len(levels)))] for name, levels in factors.items()
            }
            case |= {a: x, b: y}
            if not best or len(pairs_of(case) & missing) > len(pairs_of(best) & missing):
                best = case
        missing -= pairs_of(best)
        cases.append(best)
    return cases
