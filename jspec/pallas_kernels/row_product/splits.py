"""A product before the sum over the shares of its inputs: the norm that comes next adds them up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.core.pytree import pytree


@pytree
class Splits:
    """shares: the products of each slice of the inputs. bias: of the sum, or None."""

    shares: jax.Array  # f32[S, T, N]
    bias: jax.Array | None = None  # [N]

    def sum(self, dtype: DTypeLike) -> jax.Array:
        """[T, N] in `dtype`: the sum of the shares, rounded; with the bias, and rounded again."""
        out = jnp.sum(self.shares, axis=0).astype(dtype)
        return out if self.bias is None else out + self.bias
