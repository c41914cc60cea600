"""`blocks_of` in two launches on an NVIDIA GPU (Triton), with a program per expert: one counts each
expert's pairs, the other gives its n-th pair row n of its blocks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from jspec.pallas_kernels.experts.api import ExpertBlocks, num_blocks

ROUND = 2048  # pairs per iteration


def make_blocks(
    ids: Int[Array, "T k"], *, num_experts: int, tile_m: int, interpret: bool = False
) -> ExpertBlocks:
    """Compute `blocks_of`, with undefined padding. Raises ValueError for 0 pairs."""
    total, top_k = ids.size, ids.shape[1]
    blocks = num_blocks(total, num_experts, tile_m)  # raises for 0 pairs
    flat = ids.reshape(-1)
    width = min(ROUND, pl.next_power_of_2(total))
    call = functools.partial(
        pl.pallas_call,
        grid=(num_experts,),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    sizes = call(
        functools.partial(_count, width=width), out_shape=array(num_experts), name="experts_count"
    )(flat)
    expert, num_pairs, token, place, num_used = call(
        functools.partial(_make_blocks, width=width, tile_m=tile_m, top_k=top_k),
        out_shape=(array(blocks), array(blocks), array(blocks * tile_m), array(total), array(1)),
        name="experts_blocks",
    )(flat, sizes)
    return ExpertBlocks(
        tile_m=tile_m,
        expert=expert,
        num_pairs=num_pairs,
        token=token,
        place=place,
        num_used=num_used[0],
    )


def _pairs_of(
    expert: jax.Array, ids_ref: Any, step: jax.Array, *, width: int
) -> tuple[jax.Array, jax.Array]:
    pair = step * width + jnp.arange(width, dtype=jnp.int32)
    return pair, plt.load(ids_ref.at[pair], mask=pair < ids_ref.shape[0], other=-1) == expert


def _count(ids_ref: Any, sizes_ref: Any, *, width: int) -> None:
    own = pl.program_id(0)

    def add(step: jax.Array, size: jax.Array) -> jax.Array:
        _, is_own = _pairs_of(own, ids_ref, step, width=width)
        return size + jnp.sum(is_own.astype(jnp.int32))

    size = jax.lax.fori_loop(0, pl.cdiv(ids_ref.shape[0], width), add, jnp.int32(0))
    plt.store(sizes_ref.at[own], size)


def _make_blocks(
    ids_ref: Any,
    sizes_ref: Any,
    expert_ref: Any,
    num_pairs_ref: Any,
    token_ref: Any,
    place_ref: Any,
    num_used_ref: Any,
    *,
    width: int,
    tile_m: int,
    top_k: int,
) -> None:
    """Write one expert's blocks and rows; the last expert also writes the unused blocks."""
    num_experts, blocks, rows = sizes_ref.shape[0], expert_ref.shape[0], token_ref.shape[0]
    own = pl.program_id(0)
    expert = jnp.arange(pl.next_power_of_2(num_experts), dtype=jnp.int32)
    sizes = plt.load(sizes_ref.at[expert], mask=expert < num_experts, other=0)
    needed = (sizes + tile_m - 1) // tile_m
    first = jnp.sum(jnp.where(expert < own, needed, 0))
    size = jnp.sum(jnp.where(expert == own, sizes, 0))
    end = first + (size + tile_m - 1) // tile_m

    block = jnp.arange(pl.next_power_of_2(blocks), dtype=jnp.int32)
    is_own = (block >= first) & (block < end)
    left = jnp.clip(size - (block - first) * tile_m, 0, tile_m)
    plt.store(expert_ref.at[block], jnp.broadcast_to(own, block.shape), mask=is_own)
    is_unused = (own == num_experts - 1) & (block >= end) & (block < blocks)
    plt.store(num_pairs_ref.at[block], jnp.where(is_own, left, 0), mask=is_own | is_unused)

    @pl.when(own == num_experts - 1)
    def _() -> None:
        plt.store(num_used_ref.at[own * 0], end)

    def walk(step: jax.Array, seen: jax.Array) -> jax.Array:
        pair, is_own = _pairs_of(own, ids_ref, step, width=width)
        count = is_own.astype(jnp.int32)
        row = first * tile_m + seen + jnp.cumsum(count) - 1
        # Masked rows are outside: the interpreter's masked store writes the old value back.
        row = jnp.where(is_own, row, rows + jnp.arange(width, dtype=jnp.int32))
        plt.store(place_ref.at[pair], row, mask=is_own)
        plt.store(token_ref.at[row], pair // top_k, mask=is_own)
        return seen + jnp.sum(count)

    jax.lax.fori_loop(0, pl.cdiv(ids_ref.shape[0], width), walk, jnp.int32(0))
