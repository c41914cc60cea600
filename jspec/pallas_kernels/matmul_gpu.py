"""Matrix products on Hopper GPUs: weights streamed through a ring of shared memory.

One program in two orientations (tuning.Rows). A producer warpgroup copies tiles of the weights
and of the tokens with the tensor memory accelerator, a ring of stages ahead; one or two consumer
warpgroups multiply. Blocks are persistent: each walks its share of a Schedule, and the ring runs
on across tiles, so reading never pauses for an epilogue. Where several blocks share a tile each
writes its own partial sum in float32, and XLA adds them in slot order, fused into whatever reads
the product: no atomics, the same bits in every run.

It knows nothing of layers or sharding. `reference` is the specification. On an H200 it beats XLA's
products alone at one token and not in a step (docs/kernels.md), so no layer uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float

from jspec.pallas_kernels.hopper import MEMBER, each, require_mosaic_gpu, ring_barriers, swizzled
from jspec.pallas_kernels.tuning import (
    STAGED_TOKENS,
    Layout,
    MatmulTuning,
    Rows,
    Schedule,
    measured,
    schedule_of,
)

STAGED_BYTES = 64  # of a row, in each of the two buffers that an epilogue alternates


def reference(
    x: Float[Array, "M K"], w: Float[Array, "K N"], *, out_dtype: DTypeLike = jnp.bfloat16
) -> Float[Array, "M N"]:
    """x @ w, accumulated in float32."""
    return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(out_dtype)


def choose_matmul(
    m: int, k: int, n: int, *, dtype: DTypeLike, platform: str
) -> MatmulTuning | None:
    """The measured program for [m, k] @ [k, n], or None: XLA's.

    platform: of the devices that run it, as jax names it.
    """
    if platform not in {"gpu", "cuda"} or jnp.dtype(dtype) != jnp.bfloat16:
        return None
    return measured(m, k, n)


def pack_weights(w: Float[Array, "K N"], tuning: MatmulTuning) -> jax.Array:
    """`w` in the layout that `tuning` reads; done once, at load."""
    if tuning.layout is Layout.IN_OUT:
        return w
    if tuning.layout is Layout.OUT_IN:
        return w.T
    k, n = w.shape
    tile_k, tile_n = tuning.tile_k, tuning.tile_n
    return w.reshape(k // tile_k, tile_k, n // tile_n, tile_n).transpose(2, 0, 1, 3)


def stream_matmul(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "..."],
    *,
    tuning: MatmulTuning,
    out_dtype: DTypeLike = jnp.bfloat16,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """x @ w for M <= 16, bound by the reading of w.

    w: as `pack_weights` lays it out. tuning: static, Rows.WEIGHTS. interpret: parameters of the
    GPU interpreter. Raises ValueError where `tuning` does not fit the shapes.
    """
    if tuning.rows is not Rows.WEIGHTS or x.shape[0] > 16:
        raise ValueError(f"expected Rows.WEIGHTS and M <= 16, got {tuning.rows}, M {x.shape[0]}")
    return _matmul(x, w, tuning=tuning, out_dtype=out_dtype, interpret=interpret)


def tuned_matmul(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "..."],
    *,
    tuning: MatmulTuning,
    out_dtype: DTypeLike = jnp.bfloat16,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """x @ w for M = 64 to 1,024, either orientation; otherwise as `stream_matmul`."""
    return _matmul(x, w, tuning=tuning, out_dtype=out_dtype, interpret=interpret)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a kernel body needs to know, all static."""

    tuning: MatmulTuning
    schedule: Schedule
    m: int
    interpreted: bool

    @property
    def m_tiles(self) -> int:
        """Tiles of the schedule down M."""
        return -(-self.m // (self.tuning.tile_m * self.tuning.cluster))

    def place(self, unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(row tile, column tile, K tile) of a unit in this block. Tiles of the same weights are
        neighbours in time: the second one finds them in the L2 cache."""
        tile = unit // self.schedule.k_tiles
        row = tile % self.m_tiles
        if self.tuning.cluster > 1:
            row = row * self.tuning.cluster + lax.axis_index(MEMBER)
        return row, tile // self.m_tiles, unit % self.schedule.k_tiles


def _matmul(
    x: jax.Array, w: jax.Array, *, tuning: MatmulTuning, out_dtype: DTypeLike, interpret: Any
) -> jax.Array:
    require_mosaic_gpu()
    (m, k), n = x.shape, _width(w, x.shape[1], tuning)
    problem = tuning.problem(m, k, n)
    if problem is not None:
        raise ValueError(f"[{m}, {k}] @ [{k}, {n}]: {problem}")
    if m > 8 and m % 8:  # a copy may reach outside, but not in the middle of a swizzled tile
        x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    schedule = schedule_of(tuning, m, k, n)
    slots = schedule.slots_of_tiles()
    kept = out_dtype if max(slots) == 1 else jnp.float32
    plan = _Plan(
        tuning=tuning,
        schedule=replace(schedule, minimum=jnp.minimum),
        m=m,
        interpreted=interpret is not None,
    )

    def matmul_gpu(*refs: Any, **scratch: Any) -> None:  # the name that profiles show
        _body(*refs, plan=plan, **scratch)

    partials = plgpu.kernel(
        matmul_gpu,
        out_type=jax.ShapeDtypeStruct((max(slots), m, n), kept),
        scratch_types=_scratch(tuning, kept),
        grid=(schedule.num_blocks,),
        grid_names=("block",),
        cluster=(tuning.cluster,) if tuning.cluster > 1 else (),
        cluster_names=(MEMBER,) if tuning.cluster > 1 else (),
        num_threads=tuning.num_consumers + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )(x, w)
    return _merge(partials, slots, plan).astype(out_dtype)


def _width(w: jax.Array, k: int, tuning: MatmulTuning) -> int:
    """N of weights in the layout of `tuning`. Raises ValueError where they are not [k, N]."""
    tiles = (tuning.tile_k, tuning.tile_n)
    expected = {
        Layout.IN_OUT: f"[{k}, N]",
        Layout.OUT_IN: f"[N, {k}]",
        Layout.TILED: f"[N/{tiles[1]}, {k}/{tiles[0]}, {tiles[0]}, {tiles[1]}]",
    }[tuning.layout]
    fits = {
        Layout.IN_OUT: w.ndim == 2 and w.shape[0] == k,
        Layout.OUT_IN: w.ndim == 2 and w.shape[-1] == k,
        Layout.TILED: w.ndim == 4 and w.shape[2:] == tiles and w.shape[1] * tiles[0] == k,
    }[tuning.layout]
    if not fits:
        raise ValueError(f"weights {w.shape}: expected {expected}")
    if tuning.layout is Layout.TILED:
        return int(w.shape[0] * w.shape[3])
    return int(w.shape[0] if tuning.layout is Layout.OUT_IN else w.shape[1])


def _scratch(tuning: MatmulTuning, out_dtype: DTypeLike) -> dict[str, Any]:
    """The ring, its barriers, and the tile that an epilogue stages."""
    stages, consumers = tuning.num_stages, tuning.num_consumers
    ring = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=swizzled(jnp.bfloat16))
    w_tile = (tuning.tile_k, tuning.tile_n)
    if tuning.layout is Layout.OUT_IN:
        w_tile = (tuning.tile_n, tuning.tile_k)
    rows = tuning.rows_per_consumer
    if tuning.rows is Rows.WEIGHTS:
        chunk = min(tuning.tile_m, STAGED_TOKENS)
        staged = plgpu.SMEM((consumers, tuning.num_buffers, chunk, rows), out_dtype)
    else:
        chunk = STAGED_BYTES // jnp.dtype(out_dtype).itemsize
        transforms = swizzled(out_dtype, STAGED_BYTES)
        shape = (consumers, tuning.num_buffers, rows, chunk)
        staged = plgpu.SMEM(shape, out_dtype, transforms=transforms)
    return {
        "x_smem": ring((stages, tuning.tile_m, tuning.tile_k)),
        "w_smem": ring((stages, *w_tile)),
        "staged": staged,
        **ring_barriers(stages, copies=2, consumers=consumers, cluster=tuning.cluster),
    }


def _body(
    x: Any,
    w: Any,
    out: Any,
    *,
    plan: _Plan,
    x_smem: Any,
    w_smem: Any,
    staged: Any,
    full: Any,
    empty: Any,
) -> None:
    lax.cond(
        lax.axis_index("warpgroup") == plan.tuning.num_consumers,
        lambda: _produce(plan, x, w, x_smem, w_smem, full, empty),
        lambda: _consume(plan, out, x_smem, w_smem, staged, full, empty),
    )


def _produce(plan: _Plan, x: Any, w: Any, x_smem: Any, w_smem: Any, full: Any, empty: Any) -> None:
    """Keeps the ring full: weights first, as they depend on no earlier program."""
    tuning, schedule = plan.tuning, plan.schedule
    if tuning.num_consumers > 1:
        plgpu.set_max_registers(40, action="decrease")
    block = lax.axis_index("block")
    total = schedule.num_units(block)

    def copy_weights(step: jax.Array) -> None:
        _, column, k = plan.place(schedule.unit(block, step))
        stage = lax.rem(step, tuning.num_stages)
        plgpu.copy_gmem_to_smem(
            _weight_tile(w, tuning, column, k),
            w_smem.at[stage],
            full.at[stage],
            collective_axes=MEMBER if tuning.cluster > 1 else None,
        )

    def copy_tokens(step: jax.Array) -> None:
        row, _, k = plan.place(schedule.unit(block, step))
        stage = lax.rem(step, tuning.num_stages)
        # Rows from M on lie outside: zeros on a chip. Their products are never stored.
        rows = pl.ds(row * tuning.tile_m, tuning.tile_m)
        tile = x.at[rows, pl.ds(k * tuning.tile_k, tuning.tile_k)]
        plgpu.copy_gmem_to_smem(tile, x_smem.at[stage], full.at[stage])

    def refill(step: jax.Array) -> None:
        _await_release(empty, step, tuning)
        copy_weights(step)
        copy_tokens(step)

    first = jnp.minimum(total, tuning.num_stages)
    each(0, first, copy_weights)
    if tuning.early_start and not plan.interpreted:
        plgpu.griddepcontrol_wait()
    each(0, first, copy_tokens)
    each(first, total, refill)
    each(total - first, total, partial(_await_release, empty, tuning=tuning))


def _await_release(empty: Any, step: jax.Array, tuning: MatmulTuning) -> None:
    """Until all consumers are done with what the stage of `step` holds."""
    plgpu.barrier_wait(empty.at[lax.rem(step, tuning.num_stages)])


def _weight_tile(w: Any, tuning: MatmulTuning, column: jax.Array, k: jax.Array) -> Any:
    if tuning.layout is Layout.TILED:
        return w.at[column, k]
    columns = pl.ds(column * tuning.tile_n, tuning.tile_n)
    depth = pl.ds(k * tuning.tile_k, tuning.tile_k)
    return w.at[columns, depth] if tuning.layout is Layout.OUT_IN else w.at[depth, columns]


def _consume(
    plan: _Plan, out: Any, x_smem: Any, w_smem: Any, staged: Any, full: Any, empty: Any
) -> None:
    """Multiplies run by run; a run ends where its tile or its share of K does."""
    tuning, schedule = plan.tuning, plan.schedule
    if tuning.num_consumers > 1:
        plgpu.set_max_registers(232, action="increase")
    block = lax.axis_index("block")
    total = schedule.num_units(block)
    columns = tuning.tile_m if tuning.rows is Rows.WEIGHTS else tuning.tile_n
    if tuning.early_start and not plan.interpreted:
        plgpu.griddepcontrol_wait()  # `out` may still be read by an earlier program

    def run(step: jax.Array) -> jax.Array:
        length = schedule.run_length(block, step)

        def accumulate(acc: Any) -> jax.Array:
            def multiply(position: jax.Array) -> None:
                stage = lax.rem(position, tuning.num_stages)
                plgpu.barrier_wait(full.at[stage])
                plgpu.wgmma(acc, *_operands(tuning, x_smem.at[stage], w_smem.at[stage]))
                plgpu.wgmma_wait(1)  # all but the last product are done with their stages

                @pl.when(position > step)
                def _() -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(position - 1, tuning.num_stages)])

            each(step, step + length, multiply)
            return acc[...]

        shape = plgpu.WGMMAAccumulatorRef((tuning.rows_per_consumer, columns), jnp.float32)
        acc = pl.run_scoped(accumulate, shape)
        plgpu.barrier_arrive(empty.at[lax.rem(step + length - 1, tuning.num_stages)])
        unit = schedule.unit(block, step)
        row, column, _ = plan.place(unit)
        _write(acc, out.at[schedule.slot(block, unit)], plan, staged, row, column)
        return step + length

    lax.while_loop(lambda step: step < total, run, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _operands(tuning: MatmulTuning, x_tile: Any, w_tile: Any) -> tuple[Any, Any]:
    """The instruction's two operands, of this consumer's rows."""
    rows = tuning.rows_per_consumer
    own = pl.ds(lax.axis_index("warpgroup") * rows, rows)
    if tuning.rows is Rows.TOKENS:
        transposed = tuning.layout is Layout.OUT_IN
        return x_tile.at[own], w_tile.T if transposed else w_tile
    if tuning.layout is Layout.OUT_IN:
        return w_tile.at[own], x_tile.T
    return w_tile.at[:, own].T, x_tile.T


def _write(
    acc: jax.Array, out: Any, plan: _Plan, staged: Any, row: jax.Array, column: jax.Array
) -> None:
    """One run's sums to `out` [M, N]: staged in shared memory piece by piece, the copies going on
    behind the next piece and the next run."""
    tuning, rows = plan.tuning, plan.tuning.rows_per_consumer
    weights_first = tuning.rows is Rows.WEIGHTS
    consumer = lax.axis_index("warpgroup")
    acc = acc.astype(staged.dtype)
    first = column * tuning.tile_n
    width = staged.shape[2 if weights_first else 3]
    for step, start in enumerate(range(0, acc.shape[1], width)):
        buffer = staged.at[consumer, step % tuning.num_buffers]
        piece = acc[:, start : start + width]
        plgpu.wait_smem_to_gmem(tuning.num_buffers - 1, wait_read_only=True)
        if weights_first:
            taken = piece.shape[1]
            turned = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED)
            buffer.at[pl.ds(0, taken)].T[...] = turned
            tokens = min(taken, plan.m - start)
            source = buffer.at[pl.ds(0, tokens)]
            target = out.at[pl.ds(start, tokens), pl.ds(first + consumer * rows, rows)]
        else:
            buffer[...] = piece
            source = buffer
            own = pl.ds(row * tuning.tile_m + consumer * rows, rows)
            target = out.at[own, pl.ds(first + start, width)]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(source, target)


def _merge(partials: jax.Array, slots: list[int], plan: _Plan) -> jax.Array:
    """[slots, M, N] -> [M, N]: slots added in order; a slot that its tile does not use holds
    whatever the memory held."""
    num_slots, m, n = partials.shape
    if num_slots == 1:
        return partials[0]
    num_rows, num_columns = plan.m_tiles, n // plan.tuning.tile_n
    tiled = partials.reshape(num_slots, num_rows, m // num_rows, num_columns, plan.tuning.tile_n)
    used = np.asarray(slots).reshape(num_columns, num_rows).T  # tiles run down M first
    total = tiled[0]
    for slot in range(1, num_slots):
        total = total + jnp.where((used > slot)[:, None, :, None], tiled[slot], 0.0)
    return total.reshape(m, n)
