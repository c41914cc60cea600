"""Choosing the target's token at every node: argmax_v(filtered_logits(v) + T * g(s, p, v)).

At T = 0 this is plain argmax; there is no branch. Each vocabulary shard reduces to (value, id),
and every device decides from the same gathered pairs, the lowest id winning ties. With the GPU's
kernels one of them makes that pair, elsewhere XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core import noise
from jspec.core.state import SamplingRows
from jspec.layers.linear import Shard
from jspec.pallas_kernels import sample_gpu
from jspec.pallas_kernels.paged_attention import Backend, is_gpu_kernel
from jspec.pallas_kernels.sample_gpu import COLDEST
from jspec.sampling.filters import threshold


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
    backend: Backend = "xla",
) -> Int[Array, "B N"]:
    """The token that the target chooses at each node.

    logits: f32, one vocabulary shard, penalties already in. positions: token position of the
    choice (its noise). token_ids: target id of each column, counting from 0 over the shards.
    filtered: whether this program applies top-k, top-p and min-p.
    """
    is_split = shard.axis is not None and shard.size > 1
    if is_gpu_kernel(backend):
        limit = _threshold(logits, rows, shard=shard).reshape(-1) if filtered else None
        value, best = sample_gpu.sample(
            logits.reshape(-1, logits.shape[-1]),
            rows.temperature,
            rows.seed,
            positions.reshape(-1),
            limit,
            first_id=token_ids[0] if is_split else 0,
            interpret=backend == "gpu_interpret",
        )
        value, ids = value.reshape(positions.shape), best.reshape(positions.shape)
    else:
        value, ids = _best(
            logits, rows, positions=positions, token_ids=token_ids, filtered=filtered, shard=shard
        )
    if not is_split:
        return ids
    values = jax.lax.all_gather(value, shard.axis)  # [shards, B, N], lowest ids first
    winner = jnp.argmax(values, axis=0)
    chosen = jax.lax.all_gather(ids, shard.axis)
    return jnp.take_along_axis(chosen, winner[None], axis=0, mode="clip")[0]


def _scaled(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """What the filters compare: logits / T, or the logits where T is 0."""
    temperature = rows.temperature[:, None, None]
    return logits / jnp.where(temperature > 0, jnp.maximum(temperature, COLDEST), 1.0)


def _threshold(logits: jax.Array, rows: SamplingRows, *, shard: Shard) -> jax.Array:
    """[B, N]: the least scaled logit that the filters keep."""
    return threshold(_scaled(logits, rows), rows, shard=shard)


def _best(
    logits: jax.Array,
    rows: SamplingRows,
    *,
    positions: jax.Array,
    token_ids: jax.Array,
    filtered: bool,
    shard: Shard,
) -> tuple[jax.Array, jax.Array]:
    """(value, id) of this shard's choice at each node, as XLA compiles it."""
    perturbed = perturb(logits, rows, positions=positions, token_ids=token_ids)
    if filtered:
        limit = _threshold(logits, rows, shard=shard)
        keep = _scaled(logits, rows) >= limit[..., None]
        perturbed = jnp.where(keep, perturbed, -jnp.inf)
    best = jnp.argmax(perturbed, axis=-1)
    return jnp.max(perturbed, axis=-1), jnp.take(token_ids, best, mode="clip")
