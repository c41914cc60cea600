"""The gated product of an MLP on Hopper GPUs: silu(x @ gate) * (x @ up).

A tile of the result uses the same columns of gate and up, adjacent in one accumulator. A producer
warp group copies tiles by TMA into a ring in shared memory and two consumer warp groups multiply.
Blocks are persistent, and the ring continues across tiles. A tile's sums become results piece by
piece during the first steps of the next tile. Rounding is that of reference.gated_product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16

from jspec.pallas_kernels.gated_mlp.tuning import GatedTuning, Layout, Shared, fullest
from jspec.pallas_kernels.hopper import (
    MEMBER,
    SWIZZLE,
    Sweep,
    each,
    fill_ring,
    has_mosaic_gpu,
    require_mosaic_gpu,
    ring_barriers,
    silu_gated,
    swizzled,
)

DEFAULT = GatedTuning(piece=64)
# For up to MOST_NARROW tokens, tiles are as wide as fills the multiprocessors: 256 tokens of 14,336
# columns make 2 x 112 default tiles, two waves of 132 that are 85% full, and with 112 columns 2 x
# 128 tiles, 97%. Only OUT_IN allows such widths.
NARROW = GatedTuning(tile_n=112, piece=16, overlaps=False, layout=Layout.OUT_IN)
# Up to MOST_FEW tokens, time is one read of the weights: all shared memory holds bytes in flight,
# 256 contiguous, with one wide tile per multiprocessor.
FEW = GatedTuning(
    tile_m=64,
    tile_n=112,
    tile_k=128,
    num_consumers=1,
    num_stages=3,
    piece=16,
    overlaps=False,
    cluster=1,
    layout=Layout.OUT_IN,
)
WIDTHS = range(DEFAULT.tile_n, 0, -16)  # of tiles that follow a result's width
LEAST_DECODED = 1 << 25  # numbers of a weight: a decode step multiplies smaller ones by XLA
# The kernel speeds up decode steps from these token counts on. Prefill uses it from 128 tokens with
# either layout: all layouts and tiles sum in the same order, so K and V of a prompt are equal in
# engines with and without speculation.
LEAST_TOKENS, LEAST_TOKENS_BY_COLUMNS, LEAST_TOKENS_OF_PROMPTS = 1024, 128, 128
LEAST_FEW, MOST_FEW, MOST_NARROW = 16, 64, 512


def choose_gated(
    m: int, k: int, n2: int, *, dtype: DTypeLike, column_major: bool, of_prompts: bool
) -> GatedTuning | None:
    """Return the tuning for [m, k] @ [k, n2], None for XLA. column_major: stored as [n2, k]."""
    if not has_mosaic_gpu() or jnp.dtype(dtype) != jnp.bfloat16:
        return None
    width = n2 // 2
    if not of_prompts and m <= MOST_NARROW and k * n2 <= LEAST_DECODED:
        return None
    if column_major and not of_prompts and LEAST_FEW <= m <= MOST_FEW:
        few = of_width(FEW, 1, width)
        fits = m % 8 == 0 and few.problem(m, k, n2) is None and few.fills_one_turn(n2)
        return few if fits else None
    least = LEAST_TOKENS_BY_COLUMNS if column_major else LEAST_TOKENS
    if m < (LEAST_TOKENS_OF_PROMPTS if of_prompts else least):
        return None
    tuning = replace(DEFAULT, layout=Layout.OUT_IN if column_major else Layout.IN_OUT)
    if column_major and m <= MOST_NARROW:
        narrow = of_width(NARROW, -(-m // NARROW.tile_m), width)
        if narrow.tile_n < DEFAULT.tile_n and narrow.problem(m, k, n2) is None:
            tuning = narrow
    if m % (tuning.tile_m * tuning.cluster) != 0:
        tuning = replace(tuning, cluster=1)
    fits = m % tuning.tile_m == 0 and tuning.problem(m, k, n2) is None
    return tuning if fits else None


def of_width(tuning: GatedTuning, rows: int, width: int) -> GatedTuning:
    """Return the tuning with the tiles that fit `rows` tiles down and a result's `width`."""
    tile_n = fullest(rows, width, widths=WIDTHS, otherwise=DEFAULT.tile_n)
    return replace(tuning, tile_n=tile_n, piece=16 if tile_n % 32 else 32)


def gated_product(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "K N2"],
    *,
    tuning: GatedTuning = DEFAULT,
    interpret: Any = None,
) -> BFloat16[Array, "M N"]:
    """Return silu(x @ w[:, :N]) * (x @ w[:, N:]). Raises ValueError if `tuning` does not fit.
    Layout.OUT_IN reads w as w.T, which is free if it is stored so."""
    return _launch(x, w, tuning=tuning, interpret=interpret)


@dataclass(frozen=True, slots=True)
class _Plan:
    tuning: GatedTuning
    m: int
    k: int
    width: int  # columns of the result
    interpreted: bool

    @property
    def columns(self) -> int:
        return self.tuning.tile_n

    @property
    def k_tiles(self) -> int:
        return self.k // self.tuning.tile_k

    @property
    def grid(self) -> tuple[int, int]:
        down, across = self.tuning.cluster_tiles
        return -(-self.m // (self.tuning.tile_m * down)), self.width // (self.columns * across)

    @property
    def rows(self) -> int:
        return self.grid[0] * self.tuning.cluster_tiles[0] * self.tuning.tile_m

    @property
    def written(self) -> int:
        """Rows of the output: a copy may end past them, but not within a swizzled tile's 8 rows."""
        return self.rows if self.interpreted else -(-self.m // 8) * 8

    @property
    def num_blocks(self) -> int:
        return min(self.tuning.num_blocks // self.tuning.cluster, self.grid[0] * self.grid[1])

    @property
    def weight_tile(self) -> tuple[int, int]:
        across, deep = 2 * self.tuning.tile_n, self.tuning.tile_k
        return (deep, across) if self.tuning.layout is Layout.IN_OUT else (across, deep)

    def cut(self, w: jax.Array) -> jax.Array:
        if self.tuning.layout is Layout.IN_OUT:
            return w.reshape(self.k, 2, self.width)
        return w.T.reshape(2, self.width, self.k)

    @property
    def pieces(self) -> int:
        return self.columns // self.tuning.piece

    @property
    def num_buffers(self) -> int:
        """Alternating buffers; one if a tile would otherwise start with the last one used."""
        return 1 if self.pieces % 2 else 2

    @property
    def sweep(self) -> Sweep:
        return Sweep(self.grid, self.num_blocks, self.tuning.group, self.tuning.cluster_tiles)


@partial(jax.jit, static_argnames=("tuning", "interpret"), inline=False)
def _launch(x: jax.Array, w: jax.Array, *, tuning: GatedTuning, interpret: Any) -> jax.Array:
    """Run the kernel. An inner jit, so that it is lowered once for all layers."""
    require_mosaic_gpu()
    (m, k), columns = x.shape, w.shape[1]
    problem = tuning.problem(m, k, columns)
    if problem is not None:
        raise ValueError(f"[{m}, {k}] @ [{k}, {columns}]: {problem}")
    if m % 8:  # a copy may not end within a swizzled tile
        x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    plan = _Plan(tuning, m, k, columns // 2, interpreted=interpret is not None)

    def gated_product_gpu(*refs: Any, **scratch: Any) -> None:  # the name that profiles show
        _body(plan, *refs, **scratch)

    out = plgpu.kernel(
        gated_product_gpu,
        out_type=jax.ShapeDtypeStruct((plan.written, plan.width), jnp.bfloat16),
        scratch_types=_scratch(plan),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        cluster=(tuning.cluster,) if tuning.cluster > 1 else (),
        cluster_names=(MEMBER,) if tuning.cluster > 1 else (),
        num_threads=tuning.num_consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(x, plan.cut(w))
    return out if plan.written == m else out[:m]


def _scratch(plan: _Plan) -> dict[str, Any]:
    """Return the ring, its barriers and the epilogue's staging buffers. The interpreter cannot read
    [tile_k, 2, tile_n] as [tile_k, 2 * tile_n], so it copies gate and up separately."""
    tuning, stages = plan.tuning, plan.tuning.num_stages
    ring = partial(plgpu.SMEM, dtype=jnp.bfloat16)
    split, tiling = (tuning.tile_k, 2, plan.columns), (8, 1, 64)
    if tuning.layout is Layout.OUT_IN:
        split, tiling = (2, plan.columns, tuning.tile_k), (1, 8, 64)
    piece = (tuning.num_consumers, plan.num_buffers, tuning.rows_per_consumer, tuning.piece)
    return {
        "x_smem": ring((stages, tuning.tile_m, tuning.tile_k), transforms=swizzled(jnp.bfloat16)),
        "w_smem": ring((stages, *plan.weight_tile))
        if plan.interpreted
        else ring(
            (stages, *split),
            transforms=(plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(SWIZZLE)),
        ),
        "staged": ring(piece, transforms=swizzled(jnp.bfloat16, tuning.piece)),
        **ring_barriers(
            stages,
            copies=1 + (2 if plan.interpreted else 1),
            consumers=tuning.num_consumers,
            cluster=tuning.cluster,
        ),
    }


def _body(plan: _Plan, x: Any, w: Any, out: Any, **scratch: Any) -> None:
    lax.cond(
        lax.axis_index("warpgroup") == plan.tuning.num_consumers,
        lambda: _produce(plan, x, w, **scratch),
        lambda: _consume(plan, out, **scratch),
    )


def _produce(
    plan: _Plan, x: Any, w: Any, *, x_smem: Any, w_smem: Any, full: Any, empty: Any, **_: Any
) -> None:
    tuning = plan.tuning
    plgpu.set_max_registers(24, action="decrease")
    shared = tuning.shared if tuning.cluster > 1 else None

    def copy_weights(stage: Any, column: jax.Array, k: jax.Array) -> None:
        depth = pl.ds(k * tuning.tile_k, tuning.tile_k)
        columns = pl.ds(column * plan.columns, plan.columns)
        axes = MEMBER if shared is Shared.WEIGHTS else None
        turned = tuning.layout is Layout.OUT_IN
        if not plan.interpreted:
            source = w.at[:, columns, depth] if turned else w.at[depth, :, columns]
            plgpu.copy_gmem_to_smem(source, w_smem.at[stage], full.at[stage], collective_axes=axes)
            return
        for half in range(2):
            source = w.at[half, columns, depth] if turned else w.at[depth, half, columns]
            part = pl.ds(half * plan.columns, plan.columns)
            target = w_smem.at[stage, part] if turned else w_smem.at[stage, :, part]
            plgpu.copy_gmem_to_smem(source, target, full.at[stage], collective_axes=axes)

    def copy_tokens(stage: Any, row: jax.Array, k: jax.Array) -> None:
        # Rows past M read zeros on hardware; their results are dropped.
        tile = x.at[
            pl.ds(row * tuning.tile_m, tuning.tile_m), pl.ds(k * tuning.tile_k, tuning.tile_k)
        ]
        axes = MEMBER if shared is Shared.TOKENS else None
        plgpu.copy_gmem_to_smem(tile, x_smem.at[stage], full.at[stage], collective_axes=axes)

    fill_ring(
        plan.sweep,
        k_tiles=plan.k_tiles,
        num_stages=tuning.num_stages,
        empty=empty,
        copy_weights=copy_weights,
        copy_tokens=copy_tokens,
        starts_early=tuning.early_start and not plan.interpreted,
        releases_early=tuning.early_release and not plan.interpreted,
    )


def _consume(
    plan: _Plan, out: Any, *, x_smem: Any, w_smem: Any, staged: Any, full: Any, empty: Any
) -> None:
    tuning, k_tiles = plan.tuning, plan.k_tiles
    plgpu.set_max_registers(240, action="increase")
    if tuning.early_start and not plan.interpreted:
        plgpu.griddepcontrol_wait()  # `out` may still be read by an earlier kernel
    block = lax.axis_index("block")
    turns = plan.sweep.turns(block)
    rows = tuning.rows_per_consumer
    own = pl.ds(lax.axis_index("warpgroup") * rows, rows)

    def multiply(turn: Any, meanwhile: Callable[[int], None] | None = None) -> jax.Array:
        """Return a tile's rounded sums; meanwhile(i) runs during the product of step i."""
        first = turn * k_tiles

        def accumulate(acc: Any) -> jax.Array:
            def step(k: Any) -> None:
                position = first + k
                stage = lax.rem(position, tuning.num_stages)
                plgpu.barrier_wait(full.at[stage])
                weights = w_smem.at[stage]
                if not plan.interpreted:
                    weights = weights.reshape(*plan.weight_tile)
                if tuning.layout is Layout.OUT_IN:
                    weights = weights.T
                plgpu.wgmma(acc, x_smem.at[stage, own], weights)
                plgpu.wgmma_wait(1)  # only the last product still uses its stage
                if not isinstance(k, int) or k > 0:
                    plgpu.barrier_arrive(empty.at[lax.rem(position - 1, tuning.num_stages)])

            head = 1 if meanwhile is None else min(plan.pieces, k_tiles)
            for k in range(head):
                step(k)
                if meanwhile is not None:
                    for piece in range(k * plan.pieces // head, (k + 1) * plan.pieces // head):
                        meanwhile(piece)
            each(head, k_tiles, step)
            return acc[...]

        shape = plgpu.WGMMAAccumulatorRef((rows, 2 * tuning.tile_n), jnp.float32)
        sums = pl.run_scoped(accumulate, shape)
        plgpu.barrier_arrive(empty.at[lax.rem(first + k_tiles - 1, tuning.num_stages)])
        return sums.astype(jnp.bfloat16)

    def write(turn: Any, sums: jax.Array, piece: int) -> None:
        _write(plan, out, staged, plan.sweep.place(block, turn), sums, piece)

    def tile(turn: jax.Array, sums: jax.Array) -> jax.Array:
        meanwhile = partial(write, turn - 1, sums)
        if tuning.overlaps:
            return multiply(turn, meanwhile)
        for piece in range(plan.pieces):
            meanwhile(piece)
        return multiply(turn)

    sums = lax.fori_loop(1, turns, tile, multiply(0))
    for piece in range(plan.pieces):
        write(turns - 1, sums, piece)
    plgpu.wait_smem_to_gmem(0)


def _write(
    plan: _Plan,
    out: Any,
    staged: Any,
    place: tuple[jax.Array, jax.Array],
    sums: jax.Array,
    piece: int,
) -> None:
    tuning, rows = plan.tuning, plan.tuning.rows_per_consumer
    consumer = lax.axis_index("warpgroup")
    first = piece * tuning.piece
    up = plan.columns + first
    values = silu_gated(sums[:, first : first + tuning.piece], sums[:, up : up + tuning.piece])
    buffer = staged.at[consumer, piece % plan.num_buffers]
    plgpu.wait_smem_to_gmem(plan.num_buffers - 1, wait_read_only=True)
    buffer[...] = values
    plgpu.commit_smem()
    row, column = place
    own = pl.ds(row * tuning.tile_m + consumer * rows, rows)
    plgpu.copy_smem_to_gmem(buffer, out.at[own, pl.ds(column * plan.columns + first, tuning.piece)])
