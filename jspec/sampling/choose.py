"""The target's token at every node: argmax_v(filtered_logits(v) + T * g(s, p, v)).

At T = 0 this is plain argmax. Each vocabulary shard reduces to (value, id), and every device picks
from the same gathered pairs; the lowest id wins ties. A row without filters has the threshold -inf.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.state import SamplingBatch
from jspec.layers.linear import Shard, gathered
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.filters import threshold


def choose(
    logits: Float[Array, "B N V"],
    rows: SamplingBatch,
    *,
    positions: Int[Array, "B N"],
    token_ids: Int[Array, "V"],
    filtered: bool,
    shard: Shard,
    ops: Ops,
) -> Int[Array, "B N"]:
    """Return the target's choice at each node.

    logits: f32, one vocabulary shard, after penalties
    positions: of the chosen tokens, for their noise
    token_ids: target id of each column, ascending over the shards
    filtered: apply top-k, top-p and min-p
    """
    is_split = shard.axis is not None and shard.size > 1
    least = None
    if filtered:
        logits = _stored(logits)
        least = threshold(logits, rows, shard=shard)
    value, ids = ops.sample(
        logits,
        temperature=rows.temperature,
        seed=rows.seed,
        positions=positions,
        token_ids=token_ids,
        threshold=least,
        is_split=is_split,
    )
    if not is_split:
        return ids
    return best_of_shards(value, ids, shard=shard)[1]


def best_of_shards(
    value: Float[Array, "*b"], ids: Int[Array, "*b"], *, shard: Shard
) -> tuple[Float[Array, "*b"], Int[Array, "*b"]]:
    """Return the largest value and its id; the first shard wins ties."""
    values, found = gathered(shard, value, ids)
    shards = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
    is_best = shards == jnp.argmax(values, axis=0)
    return jnp.max(values, axis=0), jnp.sum(jnp.where(is_best, found, 0), axis=0)


def _stored(logits: jax.Array) -> jax.Array:
    """Compute the logits once: fusions that recompute the penalties could round them differently,
    and the logit that is the threshold would fail its own comparison."""
    return jax.lax.optimization_barrier(logits)
