"""Products of mxfp4 experts on Hopper GPUs (Mosaic GPU), rounded like reference.run_experts.

Tokens are the right operand: [64 output columns, inputs] @ [inputs, tokens]. So the weights of a
tile are the left operand, which wgmma reads from registers: codes are unpacked there, and never
written to memory. A producer warp group copies codes, scales and the block's rows into a ring by
TMA; each consumer unpacks and multiplies a tile of its own. Programs are persistent, and the ring
continues across tiles.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jspec.device.mxfp4 import BLOCK, GROUP, GROUPS, MXFP4Weight, bits_of, decoded, powers_of
from jspec.pallas_kernels.experts import gpu_inline
from jspec.pallas_kernels.experts.api import Mixed
from jspec.pallas_kernels.experts.gpu_blocks import make_blocks
from jspec.pallas_kernels.experts.reference import gated
from jspec.pallas_kernels.gated_mlp.tuning import LANES, NUM_BLOCKS, SHARED_BYTES
from jspec.pallas_kernels.hopper import interpret_options, require_mosaic_gpu, swizzled
from jspec.spec.layers.feed_forward import Gate

DEPTH = GROUPS * GROUP  # inputs of a stage of the ring
MOST_STAGES, MOST_CONSUMERS = 8, 4
REGISTERS = {2: 232, 3: 152, 4: 112}  # of a consumer's thread
OF_ROWS = plgpu.Layout.WGMMA.reduce(1)


def run_experts(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    params: dict[str, Any],
    *,
    gate: Gate,
    tile_m: int,
    interpret: bool = False,
) -> Mixed:
    """Return the terms that reference.run_experts sums. tile_m: rows of a block (choose_packed)."""
    how: dict[str, Any] = {"tile_m": tile_m, **interpret_options(interpret)}
    num_experts, bias, place = params["down"].shape[0], params.get("gate_up_bias"), None
    if x.shape[0] == 1:
        rows, expert = x, ids[0]
        how["num_pairs"], height = None, 1
    else:
        made = make_blocks(ids, num_experts=num_experts, tile_m=tile_m, interpret=interpret)
        rows = jnp.take(x, made.token, axis=0, mode="clip")
        expert, place = made.expert, made.place
        how["num_pairs"], height = made.num_pairs, tile_m
    inner = packed_product(rows, params["gate_up"], expert, bias, gate=gate, **how)
    out = packed_product(inner, params["down"], expert, height=height, **how)
    return Mixed(rows=out, weights=weights, ids=ids, place=place)


def packed_product(
    rows: Float[Array, "R K"],
    weight: MXFP4Weight,
    expert: Int[Array, "B"],
    bias: Float[Array, "X N"] | None = None,
    *,
    num_pairs: Int[Array, "B"] | None,
    tile_m: int,
    height: int | None = None,
    gate: Gate | None = None,
    interpret: Any = None,
) -> Float[Array, "_ out"]:
    """Multiply the rows of each block by its expert's weights.

    rows: tile_m for each of B blocks, or fewer that all blocks have
    num_pairs: nothing is written for a block with 0; None: for one of another shard, whose id is X
    tile_m: a multiple of 8
    height: rows of a block that are written, the first; None: all
    gate: activation of the result's two halves, to half of the columns
    """
    how = {"tile_m": tile_m, "height": height or tile_m, "gate": gate, "interpret": interpret}
    return _launch(rows, weight, expert, bias, num_pairs, **how)


@dataclass(frozen=True, slots=True)
class _Plan:
    num_blocks: int
    tile_m: int  # rows of a block
    height: int  # those that are written
    width: int  # columns of the result
    steps: int  # of DEPTH inputs
    halves: int
    is_shared: bool  # all blocks have the same rows
    consumers: int  # tiles of a program's turn
    interpreted: bool

    @property
    def columns(self) -> int:
        """Columns of a tile of the result."""
        return LANES // self.halves

    @property
    def wide(self) -> int:
        """Columns of the result of a turn."""
        return self.columns * self.consumers

    @property
    def turns(self) -> int:
        """Turns of a block."""
        return self.width // self.wide

    @property
    def pieces(self) -> int:
        """Copies of codes of a half; a consumer's gate and up are side by side."""
        return self.consumers if self.halves == 2 else 1

    @property
    def scales_pieces(self) -> int:
        """Copies of scales of a half, of 256 numbers at most."""
        return 1 if GROUPS * self.wide <= 256 else self.consumers

    @property
    def scales_share(self) -> int:
        return GROUPS * self.wide // self.scales_pieces

    @property
    def programs(self) -> int:
        return min(NUM_BLOCKS, self.num_blocks * self.turns)

    @property
    def stages(self) -> int:
        if self.interpreted:
            return 2
        per_consumer = 2 * LANES * GROUPS * (BLOCK + 2)  # codes and scales
        rows = 2 * self.tile_m * DEPTH
        staged = 2 * self.consumers * LANES * self.tile_m
        free = SHARED_BYTES - 2048 - staged
        return min(MOST_STAGES, free // (self.consumers * per_consumer + rows))


@partial(jax.jit, static_argnames=("tile_m", "height", "gate", "interpret"), inline=False)
def _launch(
    rows: jax.Array,
    weight: MXFP4Weight,
    expert: jax.Array,
    bias: jax.Array | None,
    num_pairs: jax.Array | None,
    *,
    tile_m: int,
    height: int,
    gate: Gate | None,
    interpret: Any,
) -> jax.Array:
    require_mosaic_gpu()
    _, length, columns = weight.shape
    halves = 1 if gate is None else 2
    plan = _Plan(
        num_blocks=expert.shape[0],
        tile_m=tile_m,
        height=height,
        width=columns // halves,
        steps=-(-length // DEPTH),
        halves=halves,
        is_shared=rows.shape[0] < expert.shape[0] * tile_m,
        consumers=max(
            count for count in range(1, MOST_CONSUMERS + 1) if columns % (LANES * count) == 0
        ),
        interpreted=interpret is not None,
    )
    if plan.interpreted:  # a chip reads zeros past the end
        rows = _padded(rows, max(rows.shape[0], tile_m), plan.steps * DEPTH)
    optional = {"bias": bias, "num_pairs": num_pairs}
    given = {name: array for name, array in optional.items() if array is not None}

    def experts_mxfp4_gpu(*refs: Any, **scratch: Any) -> None:  # the name that profiles show
        _body(plan, gate, tuple(given), *refs, **scratch)

    out: jax.Array = plgpu.kernel(
        experts_mxfp4_gpu,
        out_type=jax.ShapeDtypeStruct((plan.num_blocks * height, plan.width), rows.dtype),
        scratch_types=_scratch(plan, rows.dtype),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=plan.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(expert, rows, weight.codes, weight.scales, *given.values())
    return out


def _padded(array: jax.Array, rows: int, columns: int) -> jax.Array:
    missing = (rows - array.shape[-2], columns - array.shape[-1])
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, count) for count in missing])


def _scratch(plan: _Plan, dtype: Any) -> dict[str, Any]:
    copies = 1 + plan.halves * (plan.scales_pieces + plan.pieces)
    rows = (plan.stages * plan.tile_m, DEPTH)
    interpreted = {}
    if plan.interpreted:  # whose product reads its left operand from memory
        interpreted["unpacked"] = plgpu.SMEM((plan.consumers, GROUPS, LANES, GROUP), dtype)
    return {
        "rows_smem": plgpu.SMEM(rows, dtype, transforms=swizzled(dtype, BLOCK)),
        "codes_smem": plgpu.SMEM(
            (plan.stages, plan.consumers * LANES, GROUPS * BLOCK),
            jnp.uint16,
            transforms=swizzled(jnp.uint16, BLOCK),
        ),
        "scales_smem": plgpu.SMEM((plan.stages, plan.consumers * GROUPS * LANES), jnp.uint32),
        "staged": plgpu.SMEM((plan.consumers, plan.halves, plan.tile_m, plan.columns), dtype),
        **interpreted,
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
        "empty": plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages),
    }


def _body(plan: _Plan, gate: Gate | None, names: tuple[str, ...], *refs: Any, **smem: Any) -> None:
    expert, rows, codes, scales, *others, out = refs
    given = dict(zip(names, others, strict=True))
    if not plan.interpreted:
        plgpu.griddepcontrol_wait()
    program = lax.axis_index("program")
    turns = (plan.num_blocks * plan.turns - program + plan.programs - 1) // plan.programs

    def place(turn: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (block, turn of the block, steps: none without pairs)."""
        item = program + turn * plan.programs
        block, tile = lax.div(item, plan.turns), lax.rem(item, plan.turns)
        if "num_pairs" in given:
            is_used = given["num_pairs"][block] > 0
        else:
            is_used = expert[block] < codes.shape[0]
        return block, tile, jnp.where(is_used, plan.steps, 0)

    lax.cond(
        lax.axis_index("warpgroup") == plan.consumers,
        lambda: _produce(plan, place, turns, expert, rows, codes, scales, **smem),
        lambda: _consume(plan, gate, place, turns, expert, given.get("bias"), out, **smem),
    )


def _produce(
    plan: _Plan,
    place: Any,
    turns: jax.Array,
    expert: Any,
    rows: Any,
    codes: Any,
    scales: Any,
    *,
    rows_smem: Any,
    codes_smem: Any,
    scales_smem: Any,
    full: Any,
    empty: Any,
    **_: Any,
) -> None:
    """Keep the ring full, by two warps: a copy that a warp group starts takes longer to start."""
    if plan.consumers > 1:  # leave registers for the consumers
        plgpu.set_max_registers(40, action="decrease")

    def codes_of(which: jax.Array, turn: jax.Array, k: jax.Array, stage: jax.Array) -> None:
        height = plan.wide // plan.pieces
        for half, piece in itertools.product(range(plan.halves), range(plan.pieces)):
            columns = pl.ds(half * plan.width + turn * plan.wide + piece * height, height)
            target = codes_smem.at[stage, pl.ds(piece * LANES + half * plan.columns, height)]
            plgpu.copy_gmem_to_smem(codes.at[which, k, columns], target, full.at[stage])

    def scales_of(which: jax.Array, turn: jax.Array, k: jax.Array, stage: jax.Array) -> None:
        share = plan.scales_share
        for half, piece in itertools.product(range(plan.halves), range(plan.scales_pieces)):
            start = half * GROUPS * plan.width + (turn * plan.scales_pieces + piece) * share
            target = scales_smem.at[
                stage, pl.ds((half * plan.scales_pieces + piece) * share, share)
            ]
            source = scales.at[which, k, pl.ds(start, share)]
            plgpu.copy_gmem_to_smem(source, target, full.at[stage])

    def turn(warp: int, index: jax.Array, done: jax.Array) -> jax.Array:
        block, turn, steps = place(index)
        which = expert[block]
        first = 0 if plan.is_shared else block * plan.tile_m

        def step(k: jax.Array, done: jax.Array) -> jax.Array:
            stage = lax.rem(done, plan.stages)
            pl.when(done >= plan.stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
            if warp == 0:
                codes_of(which, turn, k, stage)
            else:
                scales_of(which, turn, k, stage)
                source = rows.at[pl.ds(first, plan.tile_m), pl.ds(k * DEPTH, DEPTH)]
                target = rows_smem.at[pl.ds(stage * plan.tile_m, plan.tile_m)]
                plgpu.copy_gmem_to_smem(source, target, full.at[stage])
            return done + 1

        return lax.fori_loop(0, steps, step, done)

    def drain(step: jax.Array, _: Any) -> None:
        plgpu.barrier_wait(empty.at[lax.rem(step, plan.stages)])

    def run(warp: int) -> None:
        total = lax.fori_loop(0, turns, partial(turn, warp), jnp.int32(0))
        lax.fori_loop(jnp.maximum(total - plan.stages, 0), total, drain, None)

    def each_warp(warp: jax.Array) -> None:
        pl.when(warp == 0)(lambda: run(0))
        pl.when(warp == 1)(lambda: run(1))

    plgpu.warp_map(each_warp)


def _consume(
    plan: _Plan,
    gate: Gate | None,
    place: Any,
    turns: jax.Array,
    expert: Any,
    bias: Any,
    out: Any,
    *,
    rows_smem: Any,
    codes_smem: Any,
    scales_smem: Any,
    staged: Any,
    full: Any,
    empty: Any,
    unpacked: Any = None,
) -> None:
    consumer = lax.axis_index("warpgroup")
    if plan.consumers > 1:
        plgpu.set_max_registers(REGISTERS[plan.consumers], action="increase")

    def turn(index: jax.Array, done: jax.Array) -> jax.Array:
        block, tile, steps = place(index)

        def accumulate(acc: Any) -> jax.Array:
            def step(k: jax.Array, _: Any) -> None:
                stage = lax.rem(done + k, plan.stages)
                plgpu.barrier_wait(full.at[stage])
                for group in range(GROUPS):
                    own = pl.ds(consumer * LANES, LANES), pl.ds(group * BLOCK, BLOCK)
                    codes = _load(codes_smem.at[stage, *own], plgpu.Layout.WGMMA)
                    scales = _scales(plan, scales_smem.at[stage], consumer, group)
                    left: Any = _unpacked(plan, codes, scales)
                    if unpacked is not None:
                        unpacked[consumer, group] = left
                        plgpu.commit_smem()
                        left = unpacked.at[consumer, group]
                    inputs = pl.ds(group * GROUP, GROUP)
                    right = rows_smem.at[pl.ds(stage * plan.tile_m, plan.tile_m), inputs]
                    plgpu.wgmma(acc, left, right.T)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[stage])

            lax.fori_loop(0, steps, step, None)
            return acc[...]

        sums = pl.run_scoped(
            accumulate, plgpu.WGMMAAccumulatorRef((LANES, plan.tile_m), jnp.float32)
        )

        @pl.when(steps > 0)
        def _() -> None:
            column = tile * plan.wide + consumer * plan.columns
            added = [] if bias is None else [bias.at[expert[block]]]
            _write(plan, gate, sums, added, block, column, out, staged.at[consumer])

        return done + steps

    lax.fori_loop(0, turns, turn, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _load(ref: Any, layout: Any) -> jax.Array:
    load: Any = plgpu.load  # whose index is optional from jax 0.11 on
    loaded: jax.Array = load(ref, layout=layout, optimized=layout is plgpu.Layout.WGMMA)
    return loaded


def _scales(plan: _Plan, scales: Any, consumer: jax.Array, group: int) -> jax.Array:
    """Return the u32 scales of the consumer's 64 columns. Blocks of 32 have those of a stage."""
    share = GROUPS * BLOCK
    first = group * BLOCK + consumer * share * (2 // plan.halves)
    second = first + (share if plan.halves == 1 else plan.consumers * share) - BLOCK
    own, other = (_load(scales.at[pl.ds(start, LANES)], OF_ROWS) for start in (first, second))
    row = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=OF_ROWS)
    return jnp.where(row < BLOCK, own, other)


def _unpacked(plan: _Plan, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return the bf16 numbers [64, 128] of u16 codes [64, 32] and u32 scales [64]."""
    if not plan.interpreted:
        return gpu_inline.unpacked(codes, scales, layouts=(plgpu.Layout.WGMMA, OF_ROWS))
    shape = codes.shape
    parts = [
        jnp.ldexp(decoded(bits), lax.broadcast_in_dim(power, shape, [0]))
        for bits, power in zip(bits_of(codes), powers_of(scales), strict=True)
    ]
    return jnp.concatenate(parts, axis=1).astype(jnp.bfloat16)


def _write(
    plan: _Plan,
    gate: Gate | None,
    sums: jax.Array,
    bias: list[Any],
    block: jax.Array,
    column: jax.Array,
    out: Any,
    staged: Any,
) -> None:
    """Round sums [64, tile_m], add the bias, and write them transposed and activated."""
    plgpu.wait_smem_to_gmem(0)
    values = sums.astype(out.dtype)
    for half in range(plan.halves if plan.interpreted else 0):
        own = values[half * plan.columns : (half + 1) * plan.columns].T
        for each in bias:
            added = each[pl.ds(half * plan.width + column, plan.columns)]
            own = own.astype(jnp.float32) + added.astype(jnp.float32)[None]
        staged[half] = own.astype(out.dtype)
    if not plan.interpreted:
        starts = [half * plan.width + column for half in range(plan.halves)]
        added = [each.at[pl.ds(start, plan.columns)] for each in bias for start in starts]
        gpu_inline.store_turned(values, staged, added, layout=plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    if gate is not None:
        layout = plgpu.Layout.WG_STRIDED((plan.tile_m, plan.columns), vec_size=2)
        first, up = (_load(staged.at[half], layout).astype(jnp.float32) for half in range(2))
        staged[0] = gated(first, up, gate=gate).astype(out.dtype)
        plgpu.commit_smem()
    rows = pl.ds(block * plan.height, plan.height)
    plgpu.copy_smem_to_gmem(
        staged.at[0, pl.ds(0, plan.height)], out.at[rows, pl.ds(column, plan.columns)]
    )
