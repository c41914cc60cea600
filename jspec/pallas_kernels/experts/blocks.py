"""Blocks of (token, expert) pairs: what a grid of programs works through, expert by expert.

A block holds up to `tile_m` pairs of one expert, so that it reads one expert's weights. Every
expert's pairs start a block of their own, at a row that `align` divides: the rows between its last
pair and the next expert's first are padding, which nobody reads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core.pytree import pytree, static


@pytree
class ExpertBlocks:
    """expert: of each block, for one without pairs that of the last block with some.

    num_pairs: of each block; those without any come last. first_row: of each block, or None where
    that is its number times tile_m. token: that of the pair that a row holds,
    of padding any. place: the row of each pair. num_used: blocks that have pairs.
    """

    tile_m: int = static()
    expert: jax.Array  # i32[NB]
    num_pairs: jax.Array  # i32[NB]
    token: jax.Array  # i32[rows]
    place: jax.Array  # i32[R]
    num_used: jax.Array  # i32[]
    first_row: jax.Array | None = None  # i32[NB]


def num_blocks(num_pairs: int, num_experts: int, tile_m: int) -> int:
    """The most blocks that so many pairs can need: each of their experts ends in a partial one.

    Raises ValueError without any pair.
    """
    if not num_pairs:
        raise ValueError("there are 0 (token, expert) pairs; expected at least one")
    touched = min(num_pairs, num_experts)
    return (num_pairs + touched * (tile_m - 1)) // tile_m


def num_rows(num_pairs: int, num_experts: int, align: int) -> int:
    """The most rows that so many pairs can need."""
    return num_blocks(num_pairs, num_experts, align) * align


def blocks_of(
    ids: Int[Array, "T k"], *, num_experts: int, tile_m: int, align: int | None = None
) -> ExpertBlocks:
    """Sorts the pairs by expert, stably, and deals them out. Raises ValueError without any pair.

    align: what an expert's first row is a multiple of, a divisor of tile_m; None: tile_m.

    In:  ids [[2 0] [0 1]], tile_m 2 (pairs are 0: (0, 2), 1: (0, 0), 2: (1, 0), 3: (1, 1))
    Out: expert [0 1 2], num_pairs [2 1 1], token [0 1 | 1 . | 0 .], place [4 0 1 2]
    """
    align = tile_m if align is None else align
    flat = ids.reshape(-1)
    total = flat.shape[0]
    num = num_blocks(total, num_experts, tile_m)
    each = jnp.arange(num_experts, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.sum(flat[:, None] == each, axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes  # of an expert's pairs in `order`
    needed = (sizes + tile_m - 1) // tile_m
    ends = jnp.cumsum(needed)
    first_block = ends - needed
    row_ends = jnp.cumsum((sizes + align - 1) // align * align)
    first_row = jnp.concatenate([jnp.zeros(1, jnp.int32), row_ends[:-1]])  # of an expert

    block = jnp.arange(num, dtype=jnp.int32)
    used = jnp.minimum(block, ends[-1] - 1)
    expert = jnp.sum(used[:, None] >= ends, axis=1, dtype=jnp.int32)
    ahead = (used - first_block[expert]) * tile_m  # pairs of its expert in the blocks before
    left = jnp.clip(sizes[expert] - ahead, 0, tile_m)

    row = jnp.arange(num_rows(total, num_experts, align), dtype=jnp.int32)
    of_row = jnp.sum(row[:, None] >= row_ends[:-1], axis=1, dtype=jnp.int32)
    pair = jnp.take(order, row + (starts - first_row)[of_row], mode="clip")

    rank = jnp.arange(total, dtype=jnp.int32)
    of_pair = flat[order]
    row = first_row[of_pair] + rank - starts[of_pair]
    place = jnp.zeros_like(rank).at[order].set(row, mode="drop", unique_indices=True)
    return ExpertBlocks(
        tile_m=tile_m,
        expert=expert,
        num_pairs=jnp.where(block < ends[-1], left, 0),
        token=pair // ids.shape[1],
        place=place,
        num_used=ends[-1],
        first_row=first_row[expert] + ahead,
    )
