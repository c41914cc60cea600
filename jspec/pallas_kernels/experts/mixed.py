"""A mixture's result before its last sum, which the next norm takes with it (`Ops.mixed_norm`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.core.pytree import pytree


@pytree
class Mixed:
    """rows: the product with `down` of pair (t, j), at row t * k + j, rounded to its dtype.

    weights, ids: of the pairs. bias: of every expert's `down`, or None.
    """

    rows: jax.Array  # [T * k, E]
    weights: jax.Array  # f32[T, k]
    ids: jax.Array  # i32[T, k]
    bias: jax.Array | None = None  # [X, E]

    def sum(self) -> jax.Array:
        """sum_j weights[t, j] * rows[t, j], rounded; then the same of the biases, and both.

        Both sums are in float32. [T, E] in the dtype of rows.
        """
        pairs = self.rows.reshape(*self.ids.shape, -1).astype(jnp.float32)
        out = jnp.sum(pairs * self.weights[..., None], axis=1).astype(self.rows.dtype)
        if self.bias is None:
            return out
        bias = jnp.take(self.bias, self.ids, axis=0, mode="clip").astype(jnp.float32)
        return out + jnp.sum(bias * self.weights[..., None], axis=1).astype(out.dtype)
