"""Draft candidates: the K best next tokens after a position, ranked with shared noise.

The ranking is log_softmax(draft logits + T * g(s, p, v)) with the noise that verification uses at
that position, so a draft predicts the target's choice given the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.peers import Area
from jspec.device.pytree import pytree
from jspec.device.state import SamplingBatch
from jspec.layers.linear import Shard, gathered
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.sample.reference import finite
from jspec.sampling.choose import perturb
from jspec.speculative.tree import LOWEST


@dataclass(frozen=True, slots=True)
class Ranking:
    topk: int
    noise: bool = True  # False ranks plain top-k, to measure its gain


def rank_candidates(
    logits: Float[Array, "B R U"],
    token_ids: Int[Array, "U"],
    sampling: SamplingBatch,
    *,
    positions: Int[Array, "B R"],
    ranking: Ranking,
    shard: Shard,
    ops: Ops,
) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
    """Return the best K target ids after each query and their log-probabilities, best first."""
    if ranking.topk > 1 or not ranking.noise:
        if ranking.noise:
            logits = perturb(logits, sampling, positions=positions, token_ids=token_ids)
        return top_candidates(logits, token_ids, topk=ranking.topk, shard=shard)
    top, column, mass = ops.rank_one(
        logits,
        temperature=sampling.temperature,
        seed=sampling.seed,
        positions=positions,
        token_ids=token_ids,
        lowest=LOWEST,
    )
    best = _Best(values=top[..., None], columns=column[..., None], top=top, mass=mass)
    return _joined(best, token_ids, topk=1, shard=shard)


def top_candidates(
    logits: Float[Array, "B R U"], ids: Int[Array, "U"], *, topk: int, shard: Shard
) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
    """Return (target ids, log_softmax) of the K largest; every device gets the same result.

    Ties prefer the lower draft id: shards have ascending ids and top_k is stable. NaN counts as
    LOWEST, and all scores are finite.
    """
    scores = finite(logits, lowest=LOWEST)
    values, columns = _largest(scores, min(topk, scores.shape[-1]))  # a shard may have fewer
    top = jnp.max(scores, axis=-1)
    mass = jnp.sum(jnp.exp(scores - top[..., None]), axis=-1)
    best = _Best(values=values, columns=columns, top=top, mass=mass)
    return _joined(best, ids, topk=topk, shard=shard)


@pytree
class _Best:
    values: jax.Array  # [B, R, K], best first
    columns: jax.Array  # i32[B, R, K]
    top: jax.Array  # [B, R], the largest score
    mass: jax.Array  # [B, R], sum of exp(score - top)


def _joined(
    best: _Best, ids: Int[Array, "U"], *, topk: int, shard: Shard
) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
    values, found = best.values, jnp.take(ids, best.columns, mode="clip")
    top, mass = best.top, best.mass
    if shard.axis is not None:
        values, found = (jnp.concatenate(list(x), axis=-1) for x in gathered(shard, values, found))
        tops, masses = gathered(shard, top, mass, area=Area.MASS)
        top = jnp.max(tops, axis=0)
        mass = jnp.sum(masses * jnp.exp(tops - top), axis=0)
        values, place = _largest(values, topk)
        found = jnp.take_along_axis(found, place, axis=2, mode="clip")
    log_total = top + jnp.log(mass)
    return found, jnp.where(values > LOWEST, values - log_total[..., None], LOWEST)


def _largest(x: jax.Array, topk: int) -> tuple[jax.Array, jax.Array]:
    if topk == 1:
        best = jnp.argmax(x, axis=-1, keepdims=True)
        return jnp.max(x, axis=-1, keepdims=True), best
    return jax.lax.platform_dependent(
        x, tpu=partial(largest_in_rounds, topk=topk), default=partial(_top_k, topk=topk)
    )


def _top_k(x: jax.Array, *, topk: int) -> tuple[jax.Array, jax.Array]:
    values, idx = jax.lax.top_k(x, topk)
    return values, idx


def largest_in_rounds(
    x: Float[Array, "*b U"], *, topk: int
) -> tuple[Float[Array, "*b K"], Int[Array, "*b K"]]:
    """Return lax.top_k of finite numbers, including tie order: round i takes the i-th largest.

    XLA for TPU compiles lax.top_k to a sort of all columns: for 4 of [64, 4, 8000] on v5e its
    schedule is 12 times longer. Neither was run on a chip.

    In:  x = [3 5 5 1], topk 2
    Out: [5 5], [1 2]: round 2 keeps values < 5, and values == 5 after column 1
    """
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)

    def take(last: tuple[jax.Array, jax.Array], _: None) -> Any:
        value, idx = last
        left = (x < value) | ((x == value) & (column > idx))
        rest = jnp.where(left, x, -jnp.inf)
        first = jnp.argmax(rest, axis=-1, keepdims=True).astype(jnp.int32)
        taken = jnp.max(rest, axis=-1, keepdims=True), first
        return taken, taken

    one = (*x.shape[:-1], 1)
    above_all = jnp.full(one, jnp.inf, x.dtype), jnp.full(one, -1, jnp.int32)
    _, (values, idx) = jax.lax.scan(take, above_all, length=topk)
    return jnp.moveaxis(values[..., 0], 0, -1), jnp.moveaxis(idx[..., 0], 0, -1)
