"""The margin by which a token was not chosen, in units of a logit, by the rule of `choose` in
float64 numpy: for a near-tie about as large as rounding errors."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jspec.device import noise
from jspec.messages.request import SamplingParams

_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class _Filtered:
    """The change of logits, per token, that makes the filters keep it (0: kept) or drop it."""

    to_keep: np.ndarray  # f64[V], >= 0
    to_drop: np.ndarray  # f64[V], >= 0; inf if no filter can


def margin(
    logits: np.ndarray, token_id: int, *, sampling: SamplingParams, seed: int, position: int
) -> float:
    """Return 0 if the token is the choice, else the least change of the logits that makes it so: it
    passes the filters, and every better token falls below it or out. logits: f32[V], penalized.

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
    words = jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    return np.asarray(noise.gumbel(words, jnp.asarray(position, jnp.int32), ids), np.float64)


def _filtered(x: np.ndarray, sampling: SamplingParams) -> _Filtered:
    """Apply top-k, top-p and min-p to one distribution; at temperature 0, to the logits."""
    scale = sampling.temperature or 1.0
    to_keep, to_drop = np.zeros(len(x)), np.full(len(x), np.inf)
    order = np.sort(x)[::-1]
    edges: list[np.ndarray] = []  # per filter: < 0 if kept, >= 0 if dropped, with the distance
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
    to_drop[int(np.argmax(x))] = np.inf  # the most likely token passes every filter
    return _Filtered(to_keep, to_drop)


def _over_mass(x: np.ndarray, order: np.ndarray, top_p: float, scale: float) -> np.ndarray:
    """Return the log odds of the mass above each token minus those of top_p: >= 0 if dropped."""
    weights = np.exp((order - order[0]) / scale)
    total = np.cumsum(weights)
    below = np.concatenate(([0.0], total[:-1])) / total[-1]
    # Equal logits have the same mass above them: that of the first one.
    first = np.searchsorted(-order, -x, side="left")
    mass = np.clip(below[np.minimum(first, len(x) - 1)], _TINY, 1 - 1e-15)
    return np.log(mass / (1 - mass)) - float(np.log(top_p / (1 - top_p)))
