"""Draft candidates: the K best next tokens after a position, by log_softmax(draft logits + T * g(s,
p, v)), with the noise that verification uses at that position."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.peers import Area
from jspec.device.state import SamplingBatch
from jspec.layers.linear import Shard, gathered
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.sample.reference import best_of, finite, largest
from jspec.sampling.choose import best_of_shards
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
    if not ranking.noise:
        return top_candidates(logits, token_ids, topk=ranking.topk, shard=shard)
    best = ops.rank(
        logits,
        topk=ranking.topk,
        temperature=sampling.temperature,
        seed=sampling.seed,
        positions=positions,
        token_ids=token_ids,
        lowest=LOWEST,
    )
    return _joined(*best, token_ids, topk=ranking.topk, shard=shard)


def top_candidates(
    logits: Float[Array, "B R U"], ids: Int[Array, "U"], *, topk: int, shard: Shard
) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
    """Return (target ids, log_softmax) of the K largest logits; ties prefer the lower draft id."""
    best = best_of(finite(logits, lowest=LOWEST), topk=topk)
    return _joined(*best, ids, topk=topk, shard=shard)


def _joined(
    values: Float[Array, "B R k"],  # best first; a shard may have fewer than K
    columns: Int[Array, "B R k"],
    mass: Float[Array, "B R"],  # the sum of exp(score - the largest)
    ids: Int[Array, "U"],
    *,
    topk: int,
    shard: Shard,
) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
    top, found = values[..., 0], jnp.take(ids, columns, mode="clip")
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
    values, place = largest(all_values, topk)
    is_chosen = place[..., None] == jnp.arange(all_ids.shape[-1])
    return values, jnp.sum(jnp.where(is_chosen, all_ids[..., None, :], 0), axis=-1)
