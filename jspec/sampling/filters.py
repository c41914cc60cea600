"""Top-k, top-p and min-p, jointly: one threshold per node, found by bisection.

All three look at the same distribution, softmax(logits / T) (not one after the other with
renormalisation in between). A token of scaled logit x is kept iff

    #{v : x_v > x} < top_k   and   P{v : x_v > x} < top_p   and   p(x) >= min_p * p(max)

Each condition can only turn true as x grows, so what is kept is "x >= threshold". The threshold is
found among the float32 values themselves, by 32 halvings of their ordered bit patterns: counts and
sums only, no sort, and nothing of size V is kept. Tokens that tie with the threshold are all kept.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.state import SamplingRows
from jspec.layers.linear import Shard


def _ordered(x: jax.Array) -> jax.Array:
    """f32 -> i32 with the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _from_ordered(key: jax.Array) -> jax.Array:
    bits = jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def threshold(
    scaled: Float[Array, "B N V"], rows: SamplingRows, *, shard: Shard
) -> Float[Array, "B N"]:
    """Smallest scaled logit that is kept at each node.

    scaled: logits / T, one vocabulary shard; all shards return the same threshold.
    """
    top = _max_over(jnp.max(scaled, axis=-1), shard)
    weight = jnp.exp(scaled - top[..., None])
    total = _sum_over(jnp.sum(weight, axis=-1), shard)
    top_k, top_p, min_p = rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None]

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # high is kept, low - 1 is not known to be
        middle = (low & high) + ((low ^ high) >> 1)  # floor of the mean, without overflow
        above = scaled > _from_ordered(middle)[..., None]
        count = _sum_over(jnp.sum(above, axis=-1, dtype=jnp.int32), shard)
        mass = _sum_over(jnp.sum(jnp.where(above, weight, 0.0), axis=-1), shard)
        kept = (count < top_k) & ((mass < top_p * total) | (top_p >= 1.0))
        return jnp.where(kept, low, middle + 1), jnp.where(kept, middle, high)

    lowest = jnp.full(top.shape, _ordered(jnp.float32(-3.4e38)), jnp.int32)
    _, found = jax.lax.fori_loop(0, 32, halve, (lowest, _ordered(top)))
    by_min_p = jnp.where(min_p > 0, top + jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)
    return jnp.maximum(_from_ordered(found), by_min_p)


def _sum_over(x: jax.Array, shard: Shard) -> jax.Array:
    """Sum over shards in a fixed order, so that every device gets the same bits."""
    if shard.axis is None:
        return x
    return jnp.sum(jax.lax.all_gather(x, shard.axis), axis=0)


def _max_over(x: jax.Array, shard: Shard) -> jax.Array:
    return x if shard.axis is None else jnp.max(jax.lax.all_gather(x, shard.axis), axis=0)
