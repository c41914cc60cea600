"""Blocks of (token, expert) pairs: the work of a grid, sorted by expert.

A block has up to `tile_m` pairs of one expert, so it reads one expert's weights; its rows start at
block * tile_m. Rows after its last pair are padding, which is neither written nor read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.device.pytree import pytree, static


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


def blocks_of(ids: Int[Array, "T k"], *, num_experts: int, tile_m: int) -> ExpertBlocks:
    """Sort the pairs by expert, stably, and assign them to blocks. Raises ValueError for 0 pairs.

    Blocks without pairs have the last one's expert, padding rows some pair's token.

    In:  ids [[2 0] [0 1]], tile_m 2 (pairs are 0: (0, 2), 1: (0, 0), 2: (1, 0), 3: (1, 1))
    Out: expert [0 1 2], num_pairs [2 1 1], token [0 1 | 1 . | 0 .], place [4 0 1 2]
    """
    flat = ids.reshape(-1)
    total = flat.shape[0]
    num = num_blocks(total, num_experts, tile_m)
    each = jnp.arange(num_experts, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.sum(flat[:, None] == each, axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes  # start of an expert's pairs in `order`
    needed = (sizes + tile_m - 1) // tile_m
    ends = jnp.cumsum(needed)
    first_block = ends - needed

    block = jnp.arange(num, dtype=jnp.int32)
    used = jnp.minimum(block, ends[-1] - 1)
    expert = jnp.sum(used[:, None] >= ends, axis=1, dtype=jnp.int32)
    ahead = (used - first_block[expert]) * tile_m  # pairs of its expert in the blocks before
    left = jnp.clip(sizes[expert] - ahead, 0, tile_m)
    sorted_row = (starts[expert] + ahead)[:, None] + jnp.arange(tile_m, dtype=jnp.int32)
    pair = jnp.take(order, sorted_row.reshape(-1), mode="clip")

    rank = jnp.arange(total, dtype=jnp.int32)
    of_pair = flat[order]
    row = first_block[of_pair] * tile_m + rank - starts[of_pair]
    place = jnp.zeros_like(rank).at[order].set(row, mode="drop", unique_indices=True)
    return ExpertBlocks(
        tile_m=tile_m,
        expert=expert,
        num_pairs=jnp.where(block < ends[-1], left, 0),
        token=pair // ids.shape[1],
        place=place,
        num_used=ends[-1],
    )
