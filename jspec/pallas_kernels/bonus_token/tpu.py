"""The gather of a verification's output on a TPU in one launch: ids, bonus token, hidden states.

A bf16 row shares its 32-bit words with its neighbour, so the DMA copies the aligned tile of 8 rows,
once for all path nodes in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

TILE_ROWS = 8  # sublanes of a tile; also the output rows of one grid step
DEPTH = 2  # grid steps whose tiles are in flight
CHUNK = 512  # columns assembled at once, a few vector registers


class _RowPlan(NamedTuple):
    """The sources of a flat gather, i32[Q rounded up to whole tiles]; in the kernel, references."""

    source: Any  # row of hidden as [B * N, A]
    valid: Any  # 1 on the path, 0 after it
    place: Any  # index of the row's tile among those fetched for its output tile
    fetches: Any  # 1 if this row is the first that needs its tile


def gather_emitted(
    target_ids: Int[Array, "B N"],
    hidden: Float[Array, "B N A"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    *,
    interpret: bool = False,
) -> tuple[Int[Array, "B M"], Int[Array, "B"], Float[Array, "B M A"]]:
    """Compute reference.gather_emitted in one launch. interpret: run on a CPU, for tests."""
    batch, most = node_path.shape
    nodes, width = hidden.shape[1:]
    num_rows = batch * most
    num_tiles = pl.cdiv(num_rows, TILE_ROWS)
    plan = _plan_rows(node_path, num_accepted, nodes=nodes)
    flat = hidden.reshape(batch * nodes, width)
    flat = jnp.pad(flat, ((0, -flat.shape[0] % TILE_ROWS), (0, 0)))  # no-op if 8 divides B * N
    # A tile is 8 rows up to v6e, so this moves no data; v7x packs 16 bf16 rows by default.
    flat = flat.reshape(-1, TILE_ROWS, width)
    flat = pltpu.with_memory_space_constraint(flat, pltpu.HBM)  # all nodes would not fit VMEM
    in_smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    emitted, bonus, on_path = pl.pallas_call(
        partial(_gather_kernel, most=most),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.ShapeDtypeStruct((num_tiles, TILE_ROWS, width), hidden.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_tiles,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=[
                in_smem,
                in_smem,
                pl.BlockSpec((None, TILE_ROWS, width), lambda step, *_: (step, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((DEPTH, TILE_ROWS, TILE_ROWS, width), hidden.dtype),
                pltpu.SemaphoreType.DMA((DEPTH,)),
            ],
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="gather_emitted",
    )(plan, target_ids.reshape(-1), num_accepted, flat)
    on_path = on_path.reshape(-1, width)[:num_rows]
    return emitted.reshape(batch, most), bonus, on_path.reshape(batch, most, width)


def _plan_rows(node_path: jax.Array, num_accepted: jax.Array, *, nodes: int) -> _RowPlan:
    """Plan output row q = b * M + i, node_path[b, i] of row b; after a path its last node repeats.

    In:  N = 16, node_path = [[0, 1, 9, -1], [0, -1, -1, -1]], num_accepted = [2, 0]
    Out: source = [0 1 9 9, 16 16 16 16], valid = [1 1 1 0, 1 0 0 0]
         tiles are 0 0 1 1, 2 2 2 2: fetches = [1 0 1 0, 1 0 0 0], place = [0 0 1 1, 2 2 2 2]
    """
    batch, most = node_path.shape
    step = jnp.arange(most, dtype=jnp.int32)
    last = jnp.minimum(step, num_accepted[:, None])
    node = jnp.take_along_axis(node_path, last, axis=1, mode="clip")
    first = jnp.arange(batch, dtype=jnp.int32)[:, None] * nodes
    source = (first + jnp.clip(node, 0, nodes - 1)).reshape(-1)
    pad = -source.shape[0] % TILE_ROWS
    source = jnp.pad(source, (0, pad), mode="edge")
    valid = jnp.pad((step <= num_accepted[:, None]).astype(jnp.int32).reshape(-1), (0, pad))
    tile = (source // TILE_ROWS).reshape(-1, TILE_ROWS)
    fetches = jnp.pad(tile[:, 1:] != tile[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    fetches = fetches.astype(jnp.int32)
    place = jnp.cumsum(fetches, axis=1) - 1
    return _RowPlan(
        source=source, valid=valid, place=place.reshape(-1), fetches=fetches.reshape(-1)
    )


def _gather_kernel(
    plan: Any,
    target_ids: Any,
    num_accepted: Any,
    hidden: Any,
    emitted: Any,
    bonus: Any,
    on_path: Any,
    tiles: Any,
    arrived: Any,
    *,
    most: int,
) -> None:
    step, num_steps = pl.program_id(0), pl.num_programs(0)

    def for_each_tile(of_step: Any, act: Callable[[Any], None]) -> None:
        slot = of_step % DEPTH

        @pl.loop(of_step * TILE_ROWS, (of_step + 1) * TILE_ROWS)
        def _(q: Any) -> None:
            tile = hidden.at[plan.source[q] // TILE_ROWS]
            copy = pltpu.make_async_copy(tile, tiles.at[slot, plan.place[q]], arrived.at[slot])
            pl.when(plan.fetches[q] > 0)(partial(act, copy))

    def start(of_step: Any) -> None:
        for_each_tile(of_step, lambda copy: copy.start())

    @pl.when(step == 0)
    def _() -> None:
        _gather_ids(plan, target_ids, num_accepted, emitted, bonus, most=most)
        for ahead in range(DEPTH - 1):
            pl.when(ahead < num_steps)(partial(start, ahead))

    pl.when(step + DEPTH - 1 < num_steps)(partial(start, step + DEPTH - 1))
    for_each_tile(step, lambda copy: copy.wait())
    _assemble(plan, tiles.at[step % DEPTH], on_path, first=step * TILE_ROWS)


def _gather_ids(
    plan: Any, target_ids: Any, num_accepted: Any, emitted: Any, bonus: Any, *, most: int
) -> None:
    @pl.loop(0, emitted.shape[0])
    def _(q: Any) -> None:
        emitted[q] = jnp.where(plan.valid[q] > 0, target_ids[plan.source[q]], 0)

    @pl.loop(0, bonus.shape[0])
    def _(b: Any) -> None:
        bonus[b] = emitted[b * most + num_accepted[b]]


def _assemble(plan: Any, tiles: Any, out: Any, *, first: Any) -> None:
    """Rotate row source % 8 of a tile to sublane j, in float32: packed rows cannot be rotated."""
    width = out.shape[1]
    chunk = CHUNK if width % CHUNK == 0 else width
    sublane = jax.lax.broadcasted_iota(jnp.int32, (TILE_ROWS, chunk), 0)

    @pl.loop(0, width // chunk)
    def _(chunk_idx: Any) -> None:
        columns = pl.ds(pl.multiple_of(chunk_idx * chunk, chunk), chunk)
        block = jnp.zeros((TILE_ROWS, chunk), jnp.float32)
        for j in range(TILE_ROWS):
            tile = tiles[plan.place[first + j], :, columns].astype(jnp.float32)
            turn = (TILE_ROWS + j - plan.source[first + j] % TILE_ROWS) % TILE_ROWS
            wanted = (sublane == j) & (plan.valid[first + j] > 0)
            block = jnp.where(wanted, pltpu.roll(tile, turn, 0), block)
        out[:, columns] = block.astype(out.dtype)
