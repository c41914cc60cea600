"""Pearson's chi-square test: is a sample drawn from the expected distribution?

Independent of tokens and noise: counts and probabilities in, a verdict out.
"""

from __future__ import annotations

import math

import numpy as np

SIGMAS = 4.5  # the normal deviate of the bound: a false alarm in 300,000


def assert_fits(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Raises AssertionError unless `counts` are plausible draws from `probabilities`.

    counts i[n], probabilities f[n] summing to 1. What has probability 0 must never be drawn. Cells
    expected less than 5 times are merged. SIGMAS is turned into a chi-square
    quantile by Wilson and Hilferty (1931).
    """
    if counts.shape != probabilities.shape or not math.isclose(probabilities.sum(), 1.0):
        raise ValueError(f"{counts.shape} counts, probabilities {probabilities}; expected to match")
    impossible = counts[probabilities == 0]
    assert not impossible.any(), f"drawn with probability 0: {counts}, {probabilities}"
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom < 1:
        raise ValueError("fewer than two cells are left; expected a richer distribution or sample")
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    bound = freedom * (1 - spread + SIGMAS * math.sqrt(spread)) ** 3
    assert statistic < bound, f"chi-square {statistic:.1f} over {bound:.1f}: {observed}, {expected}"
