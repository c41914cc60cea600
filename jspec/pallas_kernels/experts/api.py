"""Data of an MoE's experts: blocks of (token, expert) pairs, and the output before its last sum,
which can be fused with the next norm (Ops.mixed_norm).

A block has up to `tile_m` pairs of one expert, so it reads one expert's weights;
its rows start at block * tile_m. Rows after its last pair are padding, which is neither written nor
read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.pytree import pytree, static


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


@pytree
class ExpertBlocks:
    """The assignment of R pairs to NB blocks.

    expert, num_pairs: of each block; blocks without pairs come last, with any expert.
    token: of the pair in each row; unspecified for padding. place: the row of each pair.
    num_used: number of blocks with pairs.
    """

    tile_m: int = static()
    expert: jax.Array  # i32[NB]
    num_pairs: jax.Array  # i32[NB]
    token: jax.Array  # i32[rows]
    place: jax.Array  # i32[R]
    num_used: jax.Array  # i32[]


def num_blocks(num_pairs: int, num_experts: int, tile_m: int) -> int:
    """Return the most blocks that num_pairs pairs can need: each expert ends in a partial one.

    Raises ValueError for 0 pairs.
    """
    if not num_pairs:
        raise ValueError("there are 0 (token, expert) pairs; expected at least one")
    touched = min(num_pairs, num_experts)
    return (num_pairs + touched * (tile_m - 1)) // tile_m
