"""RMSNorm (Zhang and Sennrich, 2019), and the residual stream that it closes.

A layer hands its last contribution on without adding it: the norm that comes next needs the sum
anyway, and a backend may have one kernel for both (pallas_kernels/add_norm_gpu.py). Which one, the
caller says; the numbers are those of an addition followed by a norm.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec.core.pytree import pytree

# (x, delta, scale, *, eps) -> (x + delta, its norm), rounded as Residual.sum and RMSNorm round.
AddAndNorm = Callable[..., tuple[jax.Array, jax.Array]]


@pytree
class Residual:
    """The residual stream as two summands of one shape and dtype."""

    x: jax.Array  # [*b, E]
    delta: jax.Array | None = None  # [*b, E], not yet added; None where nothing was computed yet

    def sum(self) -> jax.Array:
        return self.x if self.delta is None else self.x + self.delta


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, computed in float32 whatever the activations are."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)

    def of_sum(
        self, stream: Residual, add_and_norm: AddAndNorm | None = None
    ) -> tuple[Float[Array, "*b E"], Float[Array, "*b E"]]:
        """(the stream's sum, its norm), by `add_and_norm` where there is something to add."""
        if stream.delta is None or add_and_norm is None:
            total = stream.sum()
            return total, self(total)
        return add_and_norm(stream.x, stream.delta, self.scale[...], eps=self.eps)
