"""Draft candidates: the K best next tokens after a position, by log_softmax(draft logits + T * g(s,
p, v)), with the noise that verification uses at that position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.peers import Area
from jspec.device.pytree import pytree
from jspec.device.state import SamplingBatch
from jspec.layers.linear import Shard, gathered
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.sample.reference import finite
from jspec.sampling.choose import best_of_shards, perturb
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
    """Return (target ids, log_softmax) of the K largest logits; ties prefer the lower draft id."""
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
    if shard.axis is not None and shard.size > 1:
        # Not gathered with the ids: no step reads the sums of a chain, and XLA then drops them.
        tops, masses = gathered(shard, top, mass, area=Area.MASS)
        top = jnp.max(tops, axis=0)
        mass = jnp.sum(masses * jnp.exp(tops - top), axis=0)
        values, found = _best_of_all(values, found, topk=topk, shard=shard)
    log_total = top + jnp.log(mass)
    return found, jnp.where(values > LOWEST, values - log_total[..., None], LOWEST)


def _best_of_all(
    values: Float[Array, "B R k"], ids: Int[Array, "B R k"], *, topk: int, shard: Shard
) -> tuple[Float[Array, "B R K"], Int[Array, "B R K"]]:
    if topk == 1:
        return best_of_shards(values, ids, shard=shard)
    all_values, all_ids = (
        jnp.moveaxis(x, 0, 2).reshape(*values.shape[:2], -1) for x in gathered(shard, values, ids)
    )
    values, place = _largest(all_values, topk)
    is_chosen = place[..., None] == jnp.arange(all_ids.shape[-1])
    return values, jnp.sum(jnp.where(is_chosen, all_ids[..., None, :], 0), axis=-1)


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
    """Return lax.top_k of finite numbers, with its tie order. Round i takes the i-th largest.

    XLA for TPU compiles lax.top_k to a sort of all columns.

    In:  x = [3 5 5 1], topk 2
    Out: [5 5], [1 2]
    """
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    values, columns = [], []
    for _ in range(topk):
        value = jnp.max(x, axis=-1, keepdims=True)
        first = jnp.min(jnp.where(x == value, column, x.shape[-1]), axis=-1, keepdims=True)
        x = jnp.where(column == first, -jnp.inf, x)
        values.append(value)
        columns.append(first)
    return jnp.concatenate(values, axis=-1), jnp.concatenate(columns, axis=-1)
