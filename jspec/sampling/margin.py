"""How far from being chosen a token was: the perturbed, filtered margin, in units of a logit.

The rule of `choose` again, for one token and one row of logits, in float64 numpy: what must move,
and by how much at least, for the token to be the one that is chosen. A near-tie that rounding tips
over has a margin of the size of rounding, whatever else differs; a token that the model did not
mean has a large one. A filter's edge counts like a score: a token just outside top-p has the margin
by which it missed it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jspec.device import noise
from jspec.messages.request import SamplingParams

_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class _Filtered:
    """By token: how far the logits are from keeping it (0: it is kept), and from dropping it."""

    to_keep: np.ndarray  # f64[V], >= 0
    to_drop: np.ndarray  # f64[V], >= 0; inf where no filter can


def margin(
    logits: np.ndarray, token_id: int, *, sampling: SamplingParams, seed: int, position: int
) -> float:
    """0 where the token is the choice; else the least change of the logits that makes it so.

    logits: f32[V], with penalties and bias. seed: the request's final one. position: the token's.
    Every better token must fall below it, in score or out of the filters; the token itself must
    pass them. The largest of these changes is the margin.

    In:  logits [2, 1.5, 0], temperature 0, token 1   Out: 0.5
    """
    x = np.nan_to_num(np.asarray(logits, np.float64), nan=-np.inf, posinf=3e38, neginf=-np.inf)
    temperature = sampling.temperature
    scores = x + temperature * _gumbel(seed, position, len(x)) if temperature else x
    filtered = _filtered(x, sampling)
    is_better = (scores > scores[token_id]) & (filtered.to_keep == 0)
    with np.errstate(invalid="ignore"):
        overtaken = np.minimum(scores - scores[token_id], filtered.to_drop)
    worst = float(np.max(overtaken, where=is_better, initial=0.0))
    return max(worst, float(filtered.to_keep[token_id]))


def _gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """The noise that the device adds, f64[V]."""
    words = jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    return np.asarray(noise.gumbel(words, jnp.asarray(position, jnp.int32), ids), np.float64)


def _filtered(x: np.ndarray, sampling: SamplingParams) -> _Filtered:
    """top-k, top-p and min-p on one distribution, as `filters`; at temperature 0 of the logits."""
    scale = sampling.temperature or 1.0
    to_keep, to_drop = np.zeros(len(x)), np.full(len(x), np.inf)
    order = np.sort(x)[::-1]
    edges: list[np.ndarray] = []  # by filter: < 0 kept, by how much; >= 0 dropped, by how much
    if 0 < sampling.top_k < len(x):
        last_kept, first_dropped = order[sampling.top_k - 1], order[sampling.top_k]
        edges.append(np.where(x >= last_kept, np.minimum(first_dropped - x, -_TINY), last_kept - x))
    if sampling.top_p < 1:
        edges.append(scale * _over_mass(x, order, sampling.top_p, scale))
    if sampling.min_p > 0:
        edge = order[0] + scale * np.log(sampling.min_p) - x
        edges.append(np.where(edge <= 0, np.minimum(edge, -_TINY), edge))
    for edge in edges:
        to_keep = np.maximum(to_keep, np.where(edge >= 0, np.maximum(edge, _TINY), 0))
        to_drop = np.minimum(to_drop, np.where(edge < 0, -edge, 0))
    to_drop[int(np.argmax(x))] = np.inf  # the likeliest token passes every filter
    return _Filtered(to_keep, to_drop)


def _over_mass(x: np.ndarray, order: np.ndarray, top_p: float, scale: float) -> np.ndarray:
    """log odds of the mass above each token, less those of top_p: >= 0 where it is dropped.

    Log odds, since a change of d in some logits against the others moves them by at most d / T.
    """
    weights = np.exp((order - order[0]) / scale)
    total = np.cumsum(weights)
    below = np.concatenate(([0.0], total[:-1])) / total[-1]
    # Equal logits have the same mass above them: that of the first of them.
    first = np.searchsorted(-order, -x, side="left")
    mass = np.clip(below[np.minimum(first, len(x) - 1)], _TINY, 1 - 1e-15)
    return np.log(mass / (1 - mass)) - float(np.log(top_p / (1 - top_p)))
