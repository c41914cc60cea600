"""RMSNorm (Zhang and Sennrich, 2019), and the residual add before it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*b E"], scale: Float[Array, "E"], *, eps: float) -> jax.Array:
    """Return x / rms(x) * scale, computed in float32 and rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def add_norm(
    x: Float[Array, "*b E"], delta: Float[Array, "*b E"], scale: Float[Array, "E"], *, eps: float
) -> tuple[Float[Array, "*b E"], Float[Array, "*b E"]]:
    total = x + delta
    return total, rms_norm(total, scale, eps=eps)
