"""Few cases that show much: any two values of any two settings together, or every value once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

Case = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]


def pairs_of(case: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
    """Any two settings of a case, with their values."""
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(case, 2)}


def all_pairs(factors: Factors) -> set[tuple[str, Any, str, Any]]:
    return {
        (a, x, b, y)
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    }


def covering_array(factors: Factors, *, seed: int = 7) -> list[Case]:
    """Greedy pairwise cover; deterministic."""
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


def every_level(cases: Sequence[Case], *, engine: tuple[str, ...] = ()) -> list[Case]:
    """Few of the cases, which together show every value that all of them show; greedily.

    engine: settings that an engine is compiled for. Of all cases with one value of the first, those
    with the same values of the others come first: each engine more costs what many runs do.
    """
    missing = set().union(*(case.items() for case in cases))
    few: list[Case] = []
    while missing:
        few.append(max(reversed(cases), key=partial(_gain, missing=missing, few=few, of=engine)))
        missing -= few[-1].items()
    return few


def _gain(
    case: Case, *, missing: set[tuple[str, Any]], few: Sequence[Case], of: tuple[str, ...]
) -> tuple[bool, bool, int]:
    """What a case adds: anything at all, without a second engine, and how much."""
    num_new = len(case.items() & missing)
    built = [other for other in few if of and other[of[0]] == case[of[0]]]
    is_built = any(all(other[name] == case[name] for name in of) for other in built)
    return num_new > 0, is_built or not built, num_new
