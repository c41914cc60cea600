"""Rotary position embedding, half-split layout (Su et al., 2021; Hugging Face's Llama).

Angles come from the positions themselves, so no table bounds the context: a draft whose config
says max_position_embeddings 2048 still runs at the target's positions.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.core.config import RopeConfig


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """f32[D/2] angle per position; `factor` > 1 applies Llama 3.1's frequency-wise scaling."""
    inv = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.factor > 1.0:
        wavelength = 2 * math.pi / inv
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        slowed = inv / rope.factor
        blended = (1 - smooth) * slowed + smooth * inv
        inv = np.select((wavelength > low, wavelength < high), (slowed, inv), default=blended)
    return inv.astype(np.float32)


def angles_of(
    positions: Int[Array, "*b"], *, head_dim: int, rope: RopeConfig
) -> tuple[Float[Array, "*b half"], Float[Array, "*b half"]]:
    """f32 (cos, sin) of each token's angles, half a head wide: the same for all heads."""
    inv = jnp.asarray(inverse_frequencies(head_dim, rope))
    angle = positions.astype(jnp.float32)[..., None] * inv
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "*b H D"], cos: Float[Array, "*b half"], sin: Float[Array, "*b half"]
) -> Float[Array, "*b H D"]:
    """Rotates every head of x by its token's angles; computed in float32, rounded to x's dtype."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x.dtype)


def apply_rope(
    x: Float[Array, "*b H D"], positions: Int[Array, "*b"], *, rope: RopeConfig
) -> Float[Array, "*b H D"]:
    """Rotates every head of x by its token's position."""
    cos, sin = angles_of(positions, head_dim=x.shape[-1], rope=rope)
    return rotate(x, cos, sin)
