"""Log-probabilities of the raw float32 logits: before penalties, bias, temperature and filters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.pytree import pytree
from jspec.layers.linear import Shard
from jspec.messages.request import MAX_TOP_LOGPROBS


@pytree
class Logprobs:
    logprobs: jax.Array  # f32[...], of the token
    top_logprobs: jax.Array  # f32[..., 20], descending; -inf past the vocabulary
    top_ids: jax.Array  # i32[..., 20]; ties in order of ids
    watched_logprobs: jax.Array  # f32[..., W], of the row's requested ids; 0 for none


def logprobs_of(
    logits: Float[Array, "B V"],
    chosen_ids: Int[Array, "B"],
    watched_ids: Int[Array, "B W"],
    *,
    token_ids: Int[Array, "V"],
    shard: Shard,
) -> Logprobs:
    """Return the log-probabilities of a vocabulary shard's logits, merged over shards."""
    first, width = token_ids[0], logits.shape[1]
    top = _over_shards(jnp.max(logits, axis=-1), shard).max(axis=0)
    mass = _over_shards(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1), shard).sum(axis=0)
    total = top + jnp.log(mass)
    asked = jnp.concatenate([chosen_ids[:, None], watched_ids], axis=1)
    column = asked - first
    is_here = (column >= 0) & (column < width)
    own = jnp.take_along_axis(logits, jnp.where(is_here, column, 0), axis=1, mode="clip")
    asked_logits = _over_shards(jnp.where(is_here, own, 0.0), shard).sum(axis=0)
    is_token = _over_shards(is_here, shard).any(axis=0)
    asked_logprobs = jnp.where(is_token, asked_logits - total[:, None], 0.0)
    top_logits, top_ids = _largest(logits, token_ids, shard)
    return Logprobs(
        logprobs=asked_logprobs[:, 0],
        top_logprobs=top_logits - total[:, None],
        top_ids=top_ids,
        watched_logprobs=asked_logprobs[:, 1:],
    )


def _largest(
    logits: jax.Array, token_ids: jax.Array, shard: Shard
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    count = min(MAX_TOP_LOGPROBS, logits.shape[1])
    values, columns = jax.lax.top_k(logits, count)
    ids = jnp.take(token_ids, columns, mode="clip")
    if shard.axis is not None:  # shards are in order of ids, so ties still prefer the lowest
        num_rows = logits.shape[0]
        values = _over_shards(values, shard).swapaxes(0, 1).reshape(num_rows, -1)
        ids = _over_shards(ids, shard).swapaxes(0, 1).reshape(num_rows, -1)
        values, best = jax.lax.top_k(values, min(MAX_TOP_LOGPROBS, values.shape[1]))
        ids = jnp.take_along_axis(ids, best, axis=1, mode="clip")
    missing = ((0, 0), (0, MAX_TOP_LOGPROBS - values.shape[1]))
    return jnp.pad(values, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)


def _over_shards(x: jax.Array, shard: Shard) -> jax.Array:
    return x[None] if shard.axis is None else jax.lax.all_gather(x, shard.axis)
