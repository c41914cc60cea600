"""Data of an MoE's experts: blocks of up to `tile_m` (token, expert) pairs of one expert, and the
output before its last sum. Rows after a block's last pair are neither written nor read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.pytree import pytree, static
from jspec.spec.layers.feed_forward import Gate

KERNEL_GATES = frozenset({Gate.SILU, Gate.SILU_WITHIN_7, Gate.CLAMPED})  # XLA computes the others


@pytree
class Mixed:
    """The `down` products of all pairs (t, j), and their weights."""

    rows: jax.Array  # [R, E], rounded to this dtype, without weights
    weights: jax.Array  # f32[T, k]
    ids: jax.Array  # i32[T, k]
    bias: jax.Array | None = None  # [X, E], of `down`
    place: jax.Array | None = None  # i32[T * k], row of pair t * k + j; None: row t * k + j
    shared: jax.Array | None = None  # [T, E], of the expert of every token
    has_shared: bool = static(default=False)  # that expert is one of the pairs

    def sum(self) -> jax.Array:
        """Return [T, E]: sum_j weights[t, j] * row of (t, j), plus the same sum of the biases, plus
        the shared expert's output. Each is summed in float32, in the order of j, then rounded."""
        out = jnp.sum(self._pairs() * self.weights[..., None], axis=1).astype(self.rows.dtype)
        if self.bias is not None:
            out = out + biases_of(self.bias, self.ids, self.weights).astype(out.dtype)
        return out if self.shared is None else out + self.shared

    def own_sum(self, num_experts: int) -> jax.Array:
        """Return f32 [T, E], the sum over one shard's experts. Other shards' pairs have the id
        num_experts, and their rows are unwritten."""
        own = jnp.where((self.ids < num_experts)[..., None], self._pairs(), 0.0)
        return jnp.sum(own * self.weights[..., None], axis=1)

    def _pairs(self) -> jax.Array:
        rows = self.rows
        if self.place is not None:
            rows = jnp.take(rows, self.place, axis=0, mode="clip")
        return rows.reshape(*self.ids.shape, -1).astype(jnp.float32)


def biases_of(
    bias: Float[Array, "X E"], ids: Int[Array, "T k"], weights: Float[Array, "T k"]
) -> Float[Array, "T E"]:
    """Return f32 sum_j weights[t, j] * bias[ids[t, j]]; XLA's matrix product is slow for this."""
    each = jnp.take(bias, ids, axis=0, mode="clip").astype(jnp.float32)
    return jnp.sum(each * weights[..., None], axis=1)


@pytree
class ExpertBlocks:
    """The assignment of R pairs to NB blocks."""

    tile_m: int = static()
    expert: jax.Array  # i32[NB]; blocks without pairs come last, with any expert
    num_pairs: jax.Array  # i32[NB]
    token: jax.Array  # i32[rows], of the pair in each row; unspecified for padding
    place: jax.Array  # i32[R], the row of each pair
    num_used: jax.Array  # i32[], blocks with pairs


def num_blocks(num_pairs: int, num_experts: int, tile_m: int) -> int:
    """Return the most blocks for num_pairs; experts end in partial ones. 0 pairs: ValueError."""
    if not num_pairs:
        raise ValueError("there are 0 (token, expert) pairs; expected at least one")
    touched = min(num_pairs, num_experts)
    return (num_pairs + touched * (tile_m - 1)) // tile_m
