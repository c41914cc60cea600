"""RMSNorm (Zhang and Sennrich, 2019), computed in float32 whatever the activations are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    def __init__(self, size: int, *, eps: float, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)
