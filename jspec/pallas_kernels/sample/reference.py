"""Sampling from noisy logits, and the top-1 draft candidate: the specification of the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.device import noise


def rank_one(
    logits: Float[Array, "T U"],
    temperature: Float[Array, "B"],
    seed: UInt32[Array, "B 2"],
    positions: Int[Array, "T"],
    token_ids: Int[Array, "U"],
    *,
    lowest: float,
) -> tuple[Float[Array, "T"], Int[Array, "T"], Float[Array, "T"]]:
    """Return (largest score, its first column, sum of exp(score - largest)) per row, all finite.

    temperature, seed: each for T / B consecutive rows
    token_ids: the ids whose noise the columns use
    lowest: the value of NaN and lower scores; -lowest bounds scores above
    """
    per_row = logits.shape[0] // temperature.shape[0]
    temperature, seed = jnp.repeat(temperature, per_row), jnp.repeat(seed, per_row, axis=0)
    noisy = logits + temperature[:, None] * noise.gumbel(seed, positions, token_ids)
    scores = finite(noisy, lowest=lowest)
    top = jnp.max(scores, axis=1)
    mass = jnp.sum(jnp.exp(scores - top[:, None]), axis=1)
    return top, jnp.argmax(scores, axis=1).astype(jnp.int32), mass


def finite(scores: jax.Array, *, lowest: float) -> jax.Array:
    return jnp.where(scores > lowest, jnp.minimum(scores, -lowest), lowest)


def sample(
    logits: Float[Array, "T V"],
    temperature: Float[Array, "B"],
    seed: UInt32[Array, "B 2"],
    positions: Int[Array, "T"],
    threshold: Float[Array, "T"] | None = None,
    *,
    first_id: jax.Array | int = 0,
) -> tuple[Float[Array, "T"], Int[Array, "T"]]:
    """Return (value, id) of each row; ids count from `first_id`, this vocabulary shard's first.
    temperature, seed: each for T / B consecutive rows. threshold: the least logit to choose."""
    logits = without_nan(logits.astype(jnp.float32))
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.int32) + first_id
    nodes = logits.shape[0] // temperature.shape[0]
    temperature, seed = jnp.repeat(temperature, nodes), jnp.repeat(seed, nodes, axis=0)
    perturbed = logits + temperature[:, None] * noise.gumbel(seed, positions, token_ids)
    if threshold is not None:
        perturbed = jnp.where(logits >= threshold[:, None], perturbed, -jnp.inf)
    best = jnp.argmax(perturbed, axis=1).astype(jnp.int32)
    return jnp.max(perturbed, axis=1), best + first_id


def without_nan(x: jax.Array) -> jax.Array:
    return jnp.where(x != x, -jnp.inf, x)
