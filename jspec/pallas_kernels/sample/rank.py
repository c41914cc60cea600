"""The top-1 draft candidate of each row and its softmax normalizer: the specification."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.device import noise


def reference(
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
    """Clamp scores to [lowest, -lowest], with NaN as lowest."""
    return jnp.where(scores > lowest, jnp.minimum(scores, -lowest), lowest)
