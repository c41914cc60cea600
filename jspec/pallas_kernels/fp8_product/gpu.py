"""The product of quantized tokens and fp8 weights on Hopper GPUs (Mosaic GPU).

A producer warp group copies tiles by TMA into a ring in shared memory, and consumer warp groups
multiply them in fp8 (wgmma), which needs column-major weights. Blocks are persistent, and the ring
continues across tiles.

With few tokens a multiprocessor has one narrow strip of columns and no split of K. A stage is then
only as long as the tokens; the other rows of a product of 64 read the next stage, and their results
are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from jspec.device.fp8 import E4M3, FP8Weight
from jspec.pallas_kernels.fp8_product.api import (
    Activations,
    QuantizedTokens,
    WithCodes,
    rearranged,
    values_of,
)
from jspec.pallas_kernels.fp8_product.gpu_tokens import quantize
from jspec.pallas_kernels.fp8_product.tuning import DEPTH, ProductTuning, choose
from jspec.pallas_kernels.gated_mlp.tuning import LANES, Shared
from jspec.pallas_kernels.hopper import (
    MEMBER,
    Sweep,
    each,
    fill_ring,
    require_mosaic_gpu,
    ring_barriers,
    silu_gated,
    swizzled,
)

Columns = tuple[jax.Array, ...]  # of a product; of gate and up for a gated one


def chosen_product(
    x: Activations, weight: FP8Weight, *, is_gated: bool = False
) -> BFloat16[Array, "*b N"] | None:
    """Return `product` of quantized x, or None where XLA's is faster or no kernel fits."""
    shape: Any = jax.eval_shape(values_of, x)
    tuning = chosen(shape, weight, is_gated=is_gated)
    if tuning is None:
        return None
    if isinstance(x, WithCodes):
        tokens = x.tokens
    else:
        rows = rearranged(x, lambda numbers: numbers.reshape(-1, numbers.shape[-1]))
        tokens = quantize(rows, by_blocks=weight.block is not None)
    out = product(tokens, weight, tuning=tuning, is_gated=is_gated)
    return out.reshape(*shape.shape[:-1], -1)


def chosen(x: Any, weight: FP8Weight, *, is_gated: bool = False) -> ProductTuning | None:
    """Return the tuning for x [.., K], an array or its shape; None: use XLA's product."""
    if x.dtype != jnp.bfloat16:
        return None
    halves, by_blocks = 2 if is_gated else 1, weight.block is not None
    return choose(x.size // x.shape[-1], *weight.shape, halves=halves, by_blocks=by_blocks)


def product(
    x: QuantizedTokens,
    weight: FP8Weight,
    *,
    tuning: ProductTuning,
    is_gated: bool = False,
    interpret: Any = None,
) -> BFloat16[Array, "M N"]:
    """Return x @ weight; is_gated: silu(x @ gate) * (x @ up), of the weight's two halves. weight:
    read as codes.T, which is free if stored so. Raises ValueError if `tuning` does not fit."""
    return _launch(x, weight, tuning=tuning, is_gated=is_gated, interpret=interpret)


@dataclass(frozen=True, slots=True)
class _Plan:
    tuning: ProductTuning
    m: int
    k: int
    width: int  # columns of the result
    halves: int
    by_blocks: bool
    interpreted: bool

    @property
    def k_tiles(self) -> int:
        return self.k // self.tuning.tile_k

    @property
    def grid(self) -> tuple[int, int]:
        down, across = self.tuning.cluster_tiles
        return -(-self.m // (self.tuning.tile_m * down)), self.width // (
            self.tuning.tile_n * across
        )

    @property
    def rows(self) -> int:
        return self.grid[0] * self.tuning.cluster_tiles[0] * self.tuning.tile_m

    @property
    def num_blocks(self) -> int:
        return min(self.tuning.num_blocks // self.tuning.cluster, self.grid[0] * self.grid[1])

    @property
    def loaded(self) -> int:
        """Tokens of a stage. The interpreter would see the rows of the next stage as a race."""
        return self.tuning.tile_m if self.interpreted else self.tuning.rows_loaded(self.m)

    @property
    def ring_rows(self) -> int:
        return self.tuning.num_stages * self.loaded + self.tuning.tile_m - self.loaded

    @property
    def piece(self) -> int:
        """Columns of one copy of results; 64 that are swizzled if tokens and columns allow it."""
        is_whole = self.m % 8 == 0 and self.tuning.tile_n % LANES == 0
        return LANES if is_whole else self.tuning.tile_n

    @property
    def sweep(self) -> Sweep:
        return Sweep(self.grid, self.num_blocks, self.tuning.group, self.tuning.cluster_tiles)


@partial(jax.jit, static_argnames=("tuning", "is_gated", "interpret"), inline=False)
def _launch(
    x: QuantizedTokens, weight: FP8Weight, *, tuning: ProductTuning, is_gated: bool, interpret: Any
) -> jax.Array:
    """Run the kernel. An inner jit, so that it is lowered once for all layers."""
    require_mosaic_gpu()
    (k, columns), halves, by_blocks = weight.shape, 2 if is_gated else 1, weight.block is not None
    problem = tuning.problem(x.num, k, columns, halves=halves, by_blocks=by_blocks)
    if problem is not None:
        raise ValueError(f"[{x.num}, {k}] @ [{k}, {columns}]: {problem}")
    plan = _Plan(
        tuning, x.num, k, columns // halves, halves, by_blocks, interpreted=interpret is not None
    )
    scales = x.scales
    if scales.shape[1] < plan.rows:
        scales = jnp.pad(scales, ((0, 0), (0, plan.rows - scales.shape[1])))

    def fp8_product_gpu(*refs: Any, **scratch: Any) -> None:  # the name that profiles show
        _body(plan, *refs, **scratch)

    # A chip drops rows past the end, but writes more than eight rows only in whole eights.
    written = plan.m if plan.m < 8 else -(-plan.m // 8) * 8
    written = plan.rows if plan.interpreted else written
    out = plgpu.kernel(
        fp8_product_gpu,
        out_type=jax.ShapeDtypeStruct((written, plan.width), jnp.bfloat16),
        scratch_types=_scratch(plan),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        cluster=(tuning.cluster,) if tuning.cluster > 1 else (),
        cluster_names=(MEMBER,) if tuning.cluster > 1 else (),
        num_threads=tuning.num_consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(x.codes, scales, weight.codes.T.reshape(halves, plan.width, k), weight.scales)
    return out if written == plan.m else out[: plan.m]


def _scratch(plan: _Plan) -> dict[str, Any]:
    tuning, stages = plan.tuning, plan.tuning.num_stages
    is_swizzled = plan.piece == LANES and plan.m % 8 == 0
    return {
        "x_smem": plgpu.SMEM((plan.ring_rows, tuning.tile_k), E4M3, transforms=swizzled(E4M3)),
        "w_smem": plgpu.SMEM(
            (stages, plan.halves * tuning.tile_n, tuning.tile_k), E4M3, transforms=swizzled(E4M3)
        ),
        "staged": plgpu.SMEM(
            (tuning.num_consumers, tuning.tile_n // plan.piece, LANES, plan.piece),
            jnp.bfloat16,
            transforms=swizzled(jnp.bfloat16) if is_swizzled else (),
        ),
        **ring_barriers(
            stages,
            copies=1 + plan.halves,
            consumers=tuning.num_consumers,
            cluster=tuning.cluster,
        ),
    }


def _body(plan: _Plan, x: Any, x_scales: Any, w: Any, w_scales: Any, out: Any, **smem: Any) -> None:
    lax.cond(
        lax.axis_index("warpgroup") == plan.tuning.num_consumers,
        lambda: _produce(plan, x, w, **smem),
        lambda: _consume(plan, x_scales, w_scales, out, **smem),
    )


def _produce(
    plan: _Plan, x: Any, w: Any, *, x_smem: Any, w_smem: Any, full: Any, empty: Any, **_: Any
) -> None:
    tuning = plan.tuning
    if tuning.num_consumers > 1:  # one leaves registers for both
        plgpu.set_max_registers(40, action="decrease")
    shared = tuning.shared if tuning.cluster > 1 else None

    def copy_weights(stage: Any, column: jax.Array, k: jax.Array) -> None:
        depth = pl.ds(k * tuning.tile_k, tuning.tile_k)
        columns = pl.ds(column * tuning.tile_n, tuning.tile_n)
        axes = MEMBER if shared is Shared.WEIGHTS else None
        for half in range(plan.halves):
            target = w_smem.at[stage, pl.ds(half * tuning.tile_n, tuning.tile_n)]
            source = w.at[half, columns, depth]
            plgpu.copy_gmem_to_smem(source, target, full.at[stage], collective_axes=axes)

    def copy_tokens(stage: Any, row: jax.Array, k: jax.Array) -> None:
        # Rows past the tokens read zeros on hardware; their results are dropped.
        source = x.at[
            pl.ds(row * tuning.tile_m, plan.loaded), pl.ds(k * tuning.tile_k, tuning.tile_k)
        ]
        target = x_smem.at[pl.ds(stage * plan.loaded, plan.loaded)]
        axes = MEMBER if shared is Shared.TOKENS else None
        plgpu.copy_gmem_to_smem(source, target, full.at[stage], collective_axes=axes)

    fill_ring(
        plan.sweep,
        k_tiles=plan.k_tiles,
        num_stages=tuning.num_stages,
        empty=empty,
        copy_weights=copy_weights,
        copy_tokens=copy_tokens,
        starts_early=not plan.interpreted,
        releases_early=not plan.interpreted,
    )


def _consume(
    plan: _Plan,
    x_scales: Any,
    w_scales: Any,
    out: Any,
    *,
    x_smem: Any,
    w_smem: Any,
    staged: Any,
    full: Any,
    empty: Any,
) -> None:
    tuning, stages = plan.tuning, plan.tuning.num_stages
    if tuning.num_consumers > 1:
        plgpu.set_max_registers(232, action="increase")
    if not plan.interpreted:
        plgpu.griddepcontrol_wait()  # scales come from an earlier kernel, `out` may be read by one
    block = lax.axis_index("block")
    own = lax.axis_index("warpgroup") * LANES

    def operands(stage: jax.Array) -> tuple[Any, Any]:
        return x_smem.at[pl.ds(stage * plan.loaded + own, LANES)], w_smem.at[stage]

    def tile(turn: jax.Array) -> None:
        row, column = plan.sweep.place(block, turn)
        rows = pl.ds(row * tuning.tile_m + own, LANES)
        first = turn * plan.k_tiles
        if plan.by_blocks:
            factor = _BlockScales(plan, x_scales, w_scales, rows, column * tuning.tile_n)
            sums = _promoted(plan, first, operands, full, empty, factor)
        else:
            # Scales are loaded before the product, which hides their latency.
            of_columns = _of_columns(plan, w_scales, column)
            of_rows = _load(x_scales.at[0, rows], 1)
            sums = _summed(plan, first, operands, full, empty)
            sums = tuple(
                total
                * lax.broadcast_in_dim(of_rows, total.shape, [0])
                * lax.broadcast_in_dim(scale, total.shape, [1])
                for total, scale in zip(sums, of_columns, strict=True)
            )
        plgpu.barrier_arrive(empty.at[lax.rem(first + plan.k_tiles - 1, stages)])
        _write(plan, out, staged, rows, column, sums)

    each(0, plan.sweep.turns(block), tile)
    plgpu.wait_smem_to_gmem(0)


def _load(ref: Any, axis: int) -> jax.Array:
    layout = plgpu.Layout.WGMMA.reduce(axis)
    load: Any = plgpu.load  # whose index is optional from jax 0.11 on
    loaded: jax.Array = load(ref, layout=layout, optimized=False)
    return loaded


def _of_columns(plan: _Plan, w_scales: Any, column: jax.Array) -> Columns:
    n = plan.tuning.tile_n
    starts = (half * plan.width + column * n for half in range(plan.halves))
    return tuple(_load(w_scales.at[pl.ds(start, n)], 0) for start in starts)


def _split(plan: _Plan, sums: jax.Array) -> Columns:
    n = plan.tuning.tile_n
    return tuple(sums[:, half * n : (half + 1) * n] for half in range(plan.halves))


def _summed(plan: _Plan, first: jax.Array, operands: Any, full: Any, empty: Any) -> Columns:
    stages = plan.tuning.num_stages

    def accumulate(acc: Any) -> jax.Array:
        def step(k: Any) -> None:
            stage = lax.rem(first + k, stages)
            plgpu.barrier_wait(full.at[stage])
            x, w = operands(stage)
            plgpu.wgmma(acc, x, w.T)
            plgpu.wgmma_wait(1)  # only the last product still uses its stage
            if not isinstance(k, int):
                plgpu.barrier_arrive(empty.at[lax.rem(first + k - 1, stages)])

        step(0)
        each(1, plan.k_tiles, step)
        return acc[...]

    shape = (LANES, plan.halves * plan.tuning.tile_n)
    return _split(plan, pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32)))


def _promoted(
    plan: _Plan, first: jax.Array, operands: Any, full: Any, empty: Any, factor: _BlockScales
) -> Columns:
    """Return the products of a tile: those of 128 inputs each, scaled and summed in float32."""
    tuning, stages = plan.tuning, plan.tuning.num_stages
    shape = (LANES, plan.halves * tuning.tile_n)
    parts = tuning.tile_k // DEPTH

    def multiply(stage: jax.Array, part: int) -> Columns:
        x, w = operands(stage)
        depth = pl.ds(part * DEPTH, DEPTH)

        def accumulate(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, x.at[:, depth], w.at[:, depth].T)
            return acc[...]

        return _split(
            plan, pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        )

    def step(k: Any, carry: Any) -> Any:
        totals, scales = carry
        stage = lax.rem(first + k, stages)
        # The scales of the next step are loaded here to hide their latency.
        following = factor.at(jnp.minimum(k + 1, plan.k_tiles - 1) * parts)
        plgpu.barrier_wait(full.at[stage])
        for part in range(parts):
            products = factor.scaled(multiply(stage, part), scales[part])
            totals = tuple(a + b for a, b in zip(totals, products, strict=True))
        pl.when(k < plan.k_tiles - 1)(lambda: plgpu.barrier_arrive(empty.at[stage]))
        return totals, following

    zeros = plgpu.layout_cast(jnp.zeros((LANES, tuning.tile_n), jnp.float32), plgpu.Layout.WGMMA)
    start = (zeros,) * plan.halves, factor.at(jnp.int32(0))
    totals, _ = lax.fori_loop(0, plan.k_tiles, step, start)
    found: Columns = totals
    return found


@dataclass(frozen=True)
class _BlockScales:
    """Scales of blocks of 128 inputs, for 64 tokens and for columns in at most two blocks."""

    plan: _Plan
    x_scales: Any
    w_scales: Any
    rows: Any
    column: jax.Array  # the first of the tile

    @property
    def is_split(self) -> bool:
        return bool(DEPTH % self.plan.tuning.tile_n)

    def at(self, block: jax.Array) -> Any:
        plan = self.plan
        return [
            (
                _load(self.x_scales.at[block + part, self.rows], 1),
                [self._of_weights(block + part, half) for half in range(plan.halves)],
            )
            for part in range(plan.tuning.tile_k // DEPTH)
        ]

    def _of_weights(self, block: jax.Array, half: int) -> list[jax.Array]:
        start = half * self.plan.width + self.column
        ends = [start, start + self.plan.tuning.tile_n - 1][: 2 if self.is_split else 1]
        return [self.w_scales[block, end // DEPTH] for end in ends]

    def scaled(self, products: Columns, scales: Any) -> Columns:
        of_rows, of_weights = scales
        shape = products[0].shape
        wide = lax.broadcast_in_dim(of_rows, shape, [0])
        found = []
        for half, (product, ends) in enumerate(zip(products, of_weights, strict=True)):
            if not self.is_split:
                found.append(product * (wide * ends[0]))
                continue
            start = half * self.plan.width + self.column
            at = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            is_first = at < DEPTH - lax.rem(start, DEPTH)
            found.append(product * jnp.where(is_first, wide * ends[0], wide * ends[1]))
        return tuple(found)


def _write(plan: _Plan, out: Any, staged: Any, rows: Any, column: jax.Array, sums: Columns) -> None:
    consumer = lax.axis_index("warpgroup")
    values = [total.astype(jnp.bfloat16) for total in sums]
    result = values[0] if plan.halves == 1 else silu_gated(*values)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    pieces = range(plan.tuning.tile_n // plan.piece)
    for piece in pieces:
        staged[consumer, piece] = result[:, piece * plan.piece : (piece + 1) * plan.piece]
    plgpu.commit_smem()
    for piece in pieces:
        columns = pl.ds(column * plan.tuning.tile_n + piece * plan.piece, plan.piece)
        plgpu.copy_smem_to_gmem(staged.at[consumer, piece], out.at[rows, columns])
