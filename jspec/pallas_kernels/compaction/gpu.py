"""Compaction of accepted paths on an NVIDIA GPU (Pallas-Triton): up to 48 layers per launch.

A program handles one row, a chunk of the columns of a KV slot [2G * D] and a few layers. It loads
all sources before it stores the first target, all on the row's own pages.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from jspec.pallas_kernels.compaction.reference import by_shape, flat_moves

MAX_POOLS = 48  # per launch; each takes two pointers of its parameters
MAX_WARPS = 4  # per program
VECTOR_BYTES = 16  # bytes that a thread moves in one instruction
HELD_VECTORS = 16  # vectors of a thread between load and store, 4 registers each


def compact_paths(
    kv: tuple[jax.Array, ...],
    page_table: Int[Array, "B P"],
    seq_lens: Int[Array, "B"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Apply `compact_path` to every pool [NP, S, 2G, D] of `kv`, in place if donated."""
    if node_path.shape[1] == 1:
        return kv
    page_size = kv[0].shape[1]
    moves = flat_moves(page_table, seq_lens, node_path, num_accepted, page_size=page_size)
    return by_shape(kv, lambda pools: _compact_alike(pools, moves, interpret=interpret))


def _compact_alike(
    kv: tuple[jax.Array, ...],
    moves: tuple[jax.Array, jax.Array, jax.Array],
    *,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    num_pages, page_size, heads, width = kv[0].shape
    flat = [pages.reshape(num_pages * page_size, heads * width) for pages in kv]
    num_launches = pl.cdiv(len(kv), MAX_POOLS)
    share = pl.cdiv(len(kv), num_launches)
    after: list[jax.Array] = []
    for first in range(0, len(kv), share):
        after += _launch(moves, flat[first : first + share], interpret=interpret)
    return tuple(pages.reshape(kv[0].shape) for pages in after)


def _launch(
    moves: tuple[jax.Array, jax.Array, jax.Array], flat: list[jax.Array], *, interpret: bool
) -> list[jax.Array]:
    batch, num_moves = moves[0].shape
    columns = flat[0].shape[1]
    elements = VECTOR_BYTES // flat[0].dtype.itemsize  # elements per vector of a thread
    block = min(pl.next_power_of_2(columns), MAX_WARPS * 32 * elements)
    layers = max(HELD_VECTORS // pl.next_power_of_2(num_moves), 1)  # layers per program
    whole = pl.BlockSpec()
    after = pl.pallas_call(
        partial(_move_rows, block=block, layers=layers, interpret=interpret),
        grid=(batch, pl.cdiv(columns, block), pl.cdiv(len(flat), layers)),
        out_shape=[jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in flat],
        in_specs=[whole] * (len(moves) + len(flat)),
        out_specs=[whole] * len(flat),
        input_output_aliases={len(moves) + layer: layer for layer in range(len(flat))},
        compiler_params=plt.CompilerParams(
            num_warps=max(block // (32 * elements), 1), num_stages=1
        ),
        interpret=interpret,
        name="compact_paths",
    )(*moves, *flat)
    return list(after)


def _move_rows(
    source: Any, target: Any, moves: Any, *refs: Any, block: int, layers: int, interpret: bool
) -> None:
    # The outputs, aliased to the inputs; the compiler sees overlaps only through one name.
    pools = refs[len(refs) // 2 :]
    row, chunk, share = (pl.program_id(axis) for axis in range(3))
    num_moves, columns = source.shape[1], pools[0].shape[1]
    step = jnp.arange(pl.next_power_of_2(num_moves), dtype=jnp.int32)
    column = chunk * block + jnp.arange(block, dtype=jnp.int32)
    tile = step.shape + column.shape

    def of_step(ref: Any) -> jax.Array:
        return plt.load(ref.at[row, step], mask=step < num_moves, other=0)

    is_moved = of_step(moves) > 0
    some = jnp.max(is_moved.astype(jnp.int32)) > 0
    inside = is_moved[:, None] & (column < columns)[None, :]
    column = jnp.broadcast_to(column[None, :], tile)
    read_from, write_to = (jnp.broadcast_to(of_step(x)[:, None], tile) for x in (source, target))

    def move(pools: tuple[Any, ...]) -> None:
        held = [plt.load(pool.at[read_from, column], mask=inside) for pool in pools]
        # One barrier per program orders all loads before all stores, as Triton does not guarantee
        # that one thread has a column of all steps. The interpreter runs whole arrays and has no
        # barrier.
        if not interpret:
            plt.debug_barrier()
        for pool, rows in zip(pools, held, strict=True):
            plt.store(pool.at[write_to, column], rows, mask=inside)

    # Pointers cannot be indexed by a program id, so each group of layers is a branch.
    for first in range(0, len(pools), layers):
        pl.when(some & (share == first // layers))(partial(move, pools[first : first + layers]))
