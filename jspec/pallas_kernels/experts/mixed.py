"""The MoE output before its last sum, which can be fused with the next norm (Ops.mixed_norm)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.pytree import pytree


@pytree
class Mixed:
    """The `down` products of all pairs (t, j), and their weights.

    rows: rounded to their dtype, without weights.
    bias: of every expert's `down`; None: no bias.
    place: the row of pair t * k + j; None: row t * k + j.
    """

    rows: jax.Array  # [R, E]
    weights: jax.Array  # f32[T, k]
    ids: jax.Array  # i32[T, k]
    bias: jax.Array | None = None  # [X, E]
    place: jax.Array | None = None  # i32[T * k]

    def sum(self) -> jax.Array:
        """Return [T, E]: sum_j weights[t, j] * row of (t, j), plus the same sum of the biases.

        Each sum is in float32, in the order of j, and is rounded to the dtype of rows.
        """
        rows = self.rows
        if self.place is not None:
            rows = jnp.take(rows, self.place, axis=0, mode="clip")
        pairs = rows.reshape(*self.ids.shape, -1).astype(jnp.float32)
        out = jnp.sum(pairs * self.weights[..., None], axis=1).astype(rows.dtype)
        if self.bias is None:
            return out
        return out + biases_of(self.bias, self.ids, self.weights).astype(out.dtype)


def biases_of(
    bias: Float[Array, "X E"], ids: Int[Array, "T k"], weights: Float[Array, "T k"]
) -> Float[Array, "T E"]:
    """Return sum_j weights[t, j] * bias[ids[t, j]], in float32.

    Not as a matrix product: XLA's is very slow on a GPU for a few hundred tokens.
    """
    each = jnp.take(bias, ids, axis=0, mode="clip").astype(jnp.float32)
    return jnp.sum(each * weights[..., None], axis=1)
