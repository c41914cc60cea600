"""Blocks of (token, expert) pairs: what a grid of programs works through, expert by expert.

A block holds up to `tile_m` pairs of one expert, so that it reads one expert's weights. Every
expert's pairs start a block of their own, and a block's rows lie at block * tile_m: the rows after
its last pair are padding, which nobody writes and nobody reads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.device.pytree import pytree, static


@pytree
class ExpertBlocks:
    """expert: of each block; of one without pairs any.

    num_pairs: of each block; those without any come last. token: that of the pair that a row holds;
    of padding any. place: the row of each pair. num_used: blocks that have pairs.
    """

    tile_m: int = static()
    expert: jax.Array  # i32[NB]
    num_pairs: jax.Array  # i32[NB]
    token: jax.Array  # i32[rows]
    place: jax.Array  # i32[R]
    num_used: jax.Array  # i32[]


def num_blocks(num_pairs: int, num_experts: int, tile_m: int) -> int:
    """The most blocks that so many pairs can need: each of their experts ends in a partial one.

    Raises ValueError without any pair.
    """
    if not num_pairs:
        raise ValueError("there are 0 (token, expert) pairs; expected at least one")
    touched = min(num_pairs, num_experts)
    return (num_pairs + touched * (tile_m - 1)) // tile_m


def blocks_of(ids: Int[Array, "T k"], *, num_experts: int, tile_m: int) -> ExpertBlocks:
    """Sorts the pairs by expert, stably, and deals them out. Raises ValueError without any pair.

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
    starts = jnp.cumsum(sizes) - sizes  # of an expert's pairs in `order`
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
