"""Moving an accepted tree path to the front of its row, on an NVIDIA GPU: 48 layers a launch.

The same function as `reference.compact_path`, over a tuple of pools. The pools are aliased, so no
pool is copied. A program serves one row of the batch, a chunk of the columns of a KV row
[2G * D] and a few layers: it holds what moves in registers, all sources before the first target.
Programs share nothing, since a row's sources and targets lie on its own pages. Which rows move is
computed outside, in jnp: the page table itself never enters the kernel.

What does not move costs no traffic: its loads and stores are masked as a whole, and where nothing
of a row moves the program ends after reading its flags. What the reference writes to the dummy page
is dropped here, since nobody reads that page.

Written for Pallas's Triton backend, so not only for Hopper. Compiled for an H200 (8B: 69 registers,
no shared memory, every move of 16 bytes) and run on one; the sizes below are arithmetic.
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

MAX_POOLS = 48  # of one launch, each of which is two pointers of its parameters
MAX_WARPS = 4  # of one program
VECTOR_BYTES = 16  # that a thread moves in one instruction
HELD_VECTORS = 16  # that a thread holds between reading and writing, 4 registers each


def compact_paths(
    kv: tuple[jax.Array, ...],
    page_table: Int[Array, "B P"],
    seq_lens: Int[Array, "B"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """`compact_path` of every pool of `kv`, in place when they are donated.

    kv: pools [NP, S, 2G, D], one a layer; those of one shape share launches. `interpret` runs the
    same kernel on a CPU, for tests.
    """
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
    """Of equally shaped pools."""
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
    """The pools [NP * S, 2G * D] after the moves, each in its own place."""
    batch, num_moves = moves[0].shape
    columns = flat[0].shape[1]
    elements = VECTOR_BYTES // flat[0].dtype.itemsize  # of one thread
    block = min(pl.next_power_of_2(columns), MAX_WARPS * 32 * elements)
    layers = max(HELD_VECTORS // pl.next_power_of_2(num_moves), 1)  # of one program
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
    """One row of the batch, `block` columns, and the layers of one branch: `layers` of them."""
    # The outputs, which are the inputs: only by one name can the compiler see what overlaps.
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
        # Were a column of all steps one thread's, no order would have to be made. But a tile's
        # layout is Triton's choice, and promised nowhere, so one barrier a program orders all
        # reads before all writes. The interpreter runs whole arrays and has none.
        if not interpret:
            plt.debug_barrier()
        for pool, rows in zip(pools, held, strict=True):
            plt.store(pool.at[write_to, column], rows, mask=inside)

    # Pointers cannot be indexed by a program's number: each share of the layers is a branch.
    for first in range(0, len(pools), layers):
        pl.when(some & (share == first // layers))(partial(move, pools[first : first + layers]))
