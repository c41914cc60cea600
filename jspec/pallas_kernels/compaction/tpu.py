"""Compaction of accepted paths on a TPU by DMA: one launch for all layers with equal pools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from jspec.pallas_kernels.compaction.reference import by_shape, flat_moves

BUFFER_BYTES = 4 << 20  # VMEM for the KV slots of one block of moves


def compact_paths(
    kv: tuple[jax.Array, ...],
    page_table: Int[Array, "B P"],
    seq_lens: Int[Array, "B"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    *,
    buffer_bytes: int = BUFFER_BYTES,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Apply `compact_path` to all pools [NP, S, 2G, D]; in place if donated and D is 128."""
    if node_path.shape[1] == 1:
        return kv
    page_size = kv[0].shape[1]
    moves = flat_moves(page_table, seq_lens, node_path, num_accepted, page_size=page_size)
    return by_shape(
        kv,
        lambda pools: _compact_alike(pools, moves, buffer_bytes=buffer_bytes, interpret=interpret),
    )


def _compact_alike(
    kv: tuple[jax.Array, ...],
    all_moves: tuple[jax.Array, jax.Array, jax.Array],
    *,
    buffer_bytes: int,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    num_pages, page_size, heads, width = kv[0].shape
    moves_per_row = all_moves[0].shape[1]
    source, target, moves = (x.reshape(-1) for x in all_moves)
    row_bytes = len(kv) * heads * width * kv[0].dtype.itemsize
    rows = max(buffer_bytes // (row_bytes * moves_per_row), 1)
    block = min(rows * moves_per_row, source.shape[0])
    in_hbm = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(kv)
    flat = [pages.reshape(num_pages * page_size, heads, width) for pages in kv]
    after = pl.pallas_call(
        partial(_move_rows, num_layers=len(kv), block=block),
        # Keep results in HBM: XLA would otherwise copy a small pool to VMEM and back.
        out_shape=[pltpu.HBM(pages.shape, pages.dtype) for pages in flat],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=in_hbm,
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((block, len(kv), heads, width), kv[0].dtype),
                pltpu.SemaphoreType.DMA(()),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        input_output_aliases={3 + layer: layer for layer in range(len(kv))},
        interpret=pltpu.InterpretParams() if interpret else False,
        name="compact_paths",
    )(source, target, moves, *flat)
    return tuple(pages.reshape(kv[0].shape) for pages in after)


def _move_rows(
    source: Any, target: Any, moves: Any, *refs: Any, num_layers: int, block: int
) -> None:
    """Process independent blocks of whole rows: all reads of a block, then all its writes."""
    pools = refs[num_layers : 2 * num_layers]  # the outputs, aliased to the inputs
    buffer, read, written = refs[2 * num_layers :]
    num_moves = source.shape[0]

    @pl.loop(0, pl.cdiv(num_moves, block))
    def _(block_idx: jax.Array) -> None:
        first = block_idx * block
        count = jnp.minimum(num_moves - first, block)

        def for_each_move(act: Callable[[jax.Array], None]) -> None:
            @pl.loop(0, count)
            def _(i: jax.Array) -> None:
                pl.when(moves[first + i] > 0)(partial(act, i))

        def start_reads(i: jax.Array) -> None:
            for layer, pool in enumerate(pools):
                row = pool.at[source[first + i]]
                pltpu.make_async_copy(row, buffer.at[i, layer], read).start()

        def start_writes(i: jax.Array) -> None:
            for layer, pool in enumerate(pools):
                row = pool.at[target[first + i]]
                pltpu.make_async_copy(buffer.at[i, layer], row, written).start()

        def wait(semaphore: Any, i: jax.Array) -> None:
            # One wait for all layers: a semaphore counts bytes of any copy.
            pltpu.make_async_copy(buffer.at[i], buffer.at[i], semaphore).wait()

        for_each_move(start_reads)
        for_each_move(partial(wait, read))
        for_each_move(start_writes)
        for_each_move(partial(wait, written))
