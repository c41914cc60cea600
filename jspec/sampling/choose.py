"""Choosing the target's token at every node: argmax_v(filtered_logits(v) + T * g(s, p, v)).

At T = 0 this is plain argmax; there is no branch. Each vocabulary shard reduces to (value, id),
and every device decides from the same gathered pairs, the lowest id winning ties.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core import noise
from jspec.core.state import SamplingRows
from jspec.layers.linear import Shard
from jspec.sampling.filters import threshold

# Dividing by less could take a logit out of float32's range; down here only the maximum is left.
_COLDEST = 1e-6


def perturb(
    logits: Float[Array, "B N V"],
    rows: SamplingRows,
    *,
    positions: Int[Array, "B N"],
    token_ids: Int[Array, "V"],
) -> Float[Array, "B N V"]:
    """logits + T * g(seed, position, token id); g is never stored."""
    seed = jnp.broadcast_to(rows.seed[:, None, :], (*positions.shape, 2))
    g = noise.gumbel(seed, positions, token_ids)
    return logits + rows.temperature[:, None, None] * g


def choose(
    logits: Float[Array, "B N V"],
    rows: SamplingRows,
    *,
    positions: Int[Array, "B N"],
    token_ids: Int[Array, "V"],
    filtered: bool,
    shard: Shard,
) -> Int[Array, "B N"]:
    """The token that the target chooses at each node.

    logits: f32, one vocabulary shard, penalties already in. positions: token position of the
    choice (its noise). token_ids: target id of each column, ascending over the shards.
    filtered: whether this program applies top-k, top-p and min-p.
    """
    perturbed = perturb(logits, rows, positions=positions, token_ids=token_ids)
    if filtered:
        temperature = rows.temperature[:, None, None]
        scaled = logits / jnp.where(temperature > 0, jnp.maximum(temperature, _COLDEST), 1.0)
        keep = scaled >= threshold(scaled, rows, shard=shard)[..., None]
        perturbed = jnp.where(keep, perturbed, -jnp.inf)
    best = jnp.argmax(perturbed, axis=-1)
    ids = jnp.take(token_ids, best, mode="clip")
    if shard.axis is None:
        return ids
    value = jnp.max(perturbed, axis=-1)
    values = jax.lax.all_gather(value, shard.axis)  # [shards, B, N], lowest ids first
    winner = jnp.argmax(values, axis=0)
    chosen = jax.lax.all_gather(ids, shard.axis)
    return jnp.take_along_axis(chosen, winner[None], axis=0, mode="clip")[0]
