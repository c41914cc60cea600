"""Grammar masks from the host, applied after penalties and bias and before temperature."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.layers.linear import Shard
from jspec.messages.grammar import WORD_BITS


def restrict(
    logits: Float[Array, "B N V"],
    raw: Float[Array, "B N V"],
    allowed: UInt32[Array, "B N W"],
    *,
    token_ids: Int[Array, "V"],
    shard: Shard,
) -> Float[Array, "B N V"]:
    """Set every token that is not allowed to -inf.

    raw: the logits before penalties, used if these forbid all that is allowed. allowed: bit v % 32
    of word v // 32 is token v, of all the vocabulary.
    """
    words = jnp.take(allowed, token_ids // WORD_BITS, axis=-1, mode="fill", fill_value=0)
    is_allowed = (words >> (token_ids % WORD_BITS).astype(jnp.uint32)) & 1 > 0
    kept = jnp.where(is_allowed, logits, -jnp.inf)
    has_any = jnp.any(kept > -jnp.inf, axis=-1, keepdims=True)
    if shard.axis is not None and shard.size > 1:
        has_any = jax.lax.pmax(has_any.astype(jnp.int32), shard.axis) > 0
    return jnp.where(has_any, kept, jnp.where(is_allowed, raw, -jnp.inf))
