"""A mixture's experts for many tokens on Hopper GPUs: tiles by TMA, products by wgmma.

From some hundred tokens on every expert is touched and has pairs enough to fill the matrix
instruction's 64 rows. A producer warpgroup copies tiles of an expert's weights and of its pairs'
rows into a ring of shared memory, the others multiply; programs are persistent, and the ring runs
on across tiles, so that memory is read without a pause.

Pairs are sorted by expert, and each expert's rows start at a multiple of EIGHT, the least that a
copy can be cut at. A tile reads on into the next expert's rows, whose sums nobody stores.

Rounded where reference.run_experts rounds: each product, summed in float32, to bfloat16, the bias
added, and the gated result.
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
from jaxtyping import Array, BFloat16, Float, Int

from jspec.core.model_spec import Gate
from jspec.pallas_kernels.experts.blocks import ExpertBlocks, blocks_of
from jspec.pallas_kernels.experts.grouped_plan import EIGHT, GroupedTuning
from jspec.pallas_kernels.experts.mixed import Mixed
from jspec.pallas_kernels.experts.reference import CLAMP, SLOPE
from jspec.pallas_kernels.gated_mlp.plan import LANES
from jspec.pallas_kernels.hopper import LOG2E, each, require_mosaic_gpu, ring_barriers, swizzled

TALLEST = 16  # blocks of one expert that sweep its columns together


def run_experts(
    x: BFloat16[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    params: dict[str, Any],
    *,
    gate: Gate,
    tuning: GroupedTuning,
    interpret: Any = None,
) -> BFloat16[Array, "T E"]:
    """As experts.run_experts, for weights in bfloat16. interpret: the GPU interpreter's parameters.

    Raises ValueError without tokens, and for tiles that do not divide E and I.
    """
    num_experts, size, _ = params["gate_up"].shape
    inner = params["down"].shape[1]
    if problem := tuning.problem(size, inner):
        raise ValueError(f"the experts' tiles do not serve E {size} and I {inner}: {problem}")
    blocks = blocks_of(ids, num_experts=num_experts, tile_m=tuning.tile_m, align=EIGHT)
    rows = jnp.take(x, blocks.token, axis=0, mode="clip")
    mixed = gate_up_product(rows, params, blocks, gate=gate, tuning=tuning, interpret=interpret)
    out = down_product(mixed, params["down"], blocks, tuning=tuning, interpret=interpret)
    return Mixed(rows=out, weights=weights, ids=ids, place=blocks.place).sum()


def gate_up_product(
    rows: BFloat16[Array, "R E"],
    params: dict[str, Any],
    blocks: ExpertBlocks,
    *,
    gate: Gate,
    tuning: GroupedTuning,
    interpret: Any = None,
) -> BFloat16[Array, "R I"]:
    """Each pair's gated inner row. Rows that hold no pair are undefined."""
    return _launch(
        rows,
        params["gate_up"],
        params.get("gate_up_bias"),
        _tables(blocks),
        gate=gate,
        columns=tuning.gate_up_n,
        tuning=tuning,
        interpret=interpret,
    )


def down_product(
    inner_rows: BFloat16[Array, "R I"],
    down: BFloat16[Array, "X I E"],
    blocks: ExpertBlocks,
    *,
    tuning: GroupedTuning,
    interpret: Any = None,
) -> BFloat16[Array, "R E"]:
    """Each pair's row times its expert's `down`. Rows that hold no pair are undefined."""
    return _launch(
        inner_rows,
        down,
        None,
        _tables(blocks),
        gate=None,
        columns=tuning.down_n,
        tuning=tuning,
        interpret=interpret,
    )


# Rows of the table that a program reads, one number a block.
EXPERT, FIRST, NUM_PAIRS, GROUP, HEIGHT = range(5)


def _tables(blocks: ExpertBlocks) -> tuple[jax.Array, jax.Array]:
    """([5, NB], [1]): of each block its expert, its first row in eights, its pairs, the first of
    the blocks that sweep the expert's columns together, and how many those are; blocks in use.

    In:  expert [0 0 0 1], TALLEST 2      Out: GROUP [0 0 2 3], HEIGHT [2 2 1 1]
    """
    block = jnp.arange(blocks.expert.shape[0], dtype=jnp.int32)
    used = block < blocks.num_used
    same = (blocks.expert[:, None] == blocks.expert) & used
    first = jnp.min(jnp.where(same, block, block.size), axis=1)
    group = first + (block - first) // TALLEST * TALLEST
    height = jnp.minimum(TALLEST, first + jnp.sum(same, axis=1, dtype=jnp.int32) - group)
    if blocks.first_row is None:
        raise ValueError("the blocks have no first rows; expected those of blocks_of")
    parts = (blocks.expert, blocks.first_row // EIGHT, blocks.num_pairs, group, height)
    return jnp.stack(parts), blocks.num_used[None]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a kernel body needs to know, all static."""

    tuning: GroupedTuning
    gate: Gate | None
    depth: int  # K
    width: int  # of the result
    columns: int  # of the result in one tile
    has_bias: bool
    interpreted: bool

    @property
    def halves(self) -> int:
        """Of a tile's weights: gate and up, or 1."""
        return 1 if self.gate is None else 2

    @property
    def k_tiles(self) -> int:
        return self.depth // self.tuning.tile_k

    @property
    def across(self) -> int:
        """Tiles side by side in the result."""
        return self.width // self.columns

    @property
    def piece(self) -> int:
        """Columns that an epilogue makes at a time."""
        return min(self.columns & -self.columns, LANES)

    @property
    def num_pieces(self) -> int:
        return self.columns // self.piece

    @property
    def num_buffers(self) -> int:
        """Of pieces, in turns: an odd number would begin with the one that it ended with."""
        return 1 if self.num_pieces % 2 else 2

    @property
    def num_stages(self) -> int:
        return self.tuning.stages(self.columns, halves=self.halves)


class _Tables:
    """The tables in a kernel: scalars, read where they are needed."""

    def __init__(self, plan: _Plan, table: Any, num_used: Any) -> None:
        self.plan, self.table, self.total = plan, table, num_used[0] * plan.across

    @property
    def turns(self) -> jax.Array:
        """How many tiles this program computes: every num_programs-th."""
        programs = self.plan.tuning.num_programs
        return (self.total - lax.axis_index("program") + programs - 1) // programs

    def place(self, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(block, column tile) of a turn: an expert's blocks take a column one after the other, so
        that its weights are read from memory once."""
        tile = lax.axis_index("program") + turn * self.plan.tuning.num_programs
        block = lax.div(tile, self.plan.across)
        first, height = self.table[GROUP, block], self.table[HEIGHT, block]
        inner = tile - first * self.plan.across
        return first + lax.rem(inner, height), lax.div(inner, height)


@partial(jax.jit, static_argnames=("gate", "columns", "tuning", "interpret"), inline=False)
def _launch(
    rows: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    tables: tuple[jax.Array, jax.Array],
    *,
    gate: Gate | None,
    columns: int,
    tuning: GroupedTuning,
    interpret: Any,
) -> jax.Array:
    """An inner jit: however many layers call it, it is lowered once, which takes a second."""
    require_mosaic_gpu()
    num_experts, depth, width = w.shape
    halves = 1 if gate is None else 2
    plan = _Plan(
        tuning=tuning,
        gate=gate,
        depth=depth,
        width=width // halves,
        columns=columns,
        has_bias=bias is not None,
        interpreted=interpret is not None,
    )
    operands = [rows, w.reshape(num_experts * depth, halves, plan.width), *tables]
    if bias is not None:
        operands.append(bias.reshape(num_experts, halves, plan.width))

    def experts_grouped_gpu(*refs: Any, **scratch: Any) -> None:  # the name that profiles show
        _body(plan, *refs, **scratch)

    out: jax.Array = plgpu.kernel(
        experts_grouped_gpu,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], plan.width), jnp.bfloat16),
        scratch_types=_scratch(plan),
        grid=(tuning.num_programs,),
        grid_names=("program",),
        num_threads=tuning.num_consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*operands)
    return out


def _scratch(plan: _Plan) -> dict[str, Any]:
    """The ring, its barriers, and the pieces that an epilogue stages.

    Gate and up of a tile come in one copy where there is a chip, as in gated_mlp/gpu.py.
    """
    tuning, stages = plan.tuning, plan.num_stages
    ring = partial(plgpu.SMEM, dtype=jnp.bfloat16)
    row_bytes = 2 * plan.piece  # of the weights' swizzled tiles
    if plan.interpreted:
        weights = ring((stages, tuning.tile_k, plan.halves * plan.columns))
    else:
        tiling = plgpu.TilingTransform((EIGHT, 1, plan.piece))
        weights = ring(
            (stages, tuning.tile_k, plan.halves, plan.columns),
            transforms=(tiling, plgpu.SwizzleTransform(row_bytes)),
        )
    return {
        "x_smem": ring(
            (stages, tuning.tile_m, tuning.tile_k), transforms=swizzled(jnp.bfloat16, row_bytes)
        ),
        "w_smem": weights,
        "staged": ring(
            (tuning.num_consumers, plan.num_buffers, LANES, plan.piece),
            transforms=swizzled(jnp.bfloat16, row_bytes),
        ),
        **ring_barriers(
            stages,
            copies=1 + (plan.halves if plan.interpreted else 1),
            consumers=tuning.num_consumers,
            cluster=1,
        ),
    }


def _body(
    plan: _Plan, rows: Any, w: Any, table: Any, num_used: Any, *rest: Any, **scratch: Any
) -> None:
    bias, out = rest if plan.has_bias else (None, rest[0])
    if not plan.interpreted:
        plgpu.griddepcontrol_wait()  # the tables are those of the programs ahead
    tables = _Tables(plan, table, num_used)
    lax.cond(
        lax.axis_index("warpgroup") == plan.tuning.num_consumers,
        lambda: _produce(plan, tables, rows, w, **scratch),
        lambda: _consume(plan, tables, bias, out, **scratch),
    )


def _produce(
    plan: _Plan,
    tables: _Tables,
    rows: Any,
    w: Any,
    *,
    x_smem: Any,
    w_smem: Any,
    full: Any,
    empty: Any,
    **_: Any,
) -> None:
    """Keeps the ring full."""
    tuning, k_tiles, stages = plan.tuning, plan.k_tiles, plan.num_stages
    plgpu.set_max_registers(24, action="decrease")
    turns = tables.turns

    def copy(
        step: jax.Array, expert: jax.Array, first: jax.Array, start: Any, k: jax.Array
    ) -> None:
        stage = lax.rem(step, stages)
        depth = pl.ds(expert * plan.depth + k * tuning.tile_k, tuning.tile_k)
        if plan.interpreted:
            for half in range(plan.halves):
                part = pl.ds(half * plan.columns, plan.columns)
                plgpu.copy_gmem_to_smem(
                    w.at[depth, half, start], w_smem.at[stage, :, part], full.at[stage]
                )
        else:
            plgpu.copy_gmem_to_smem(w.at[depth, :, start], w_smem.at[stage], full.at[stage])
        own = rows.at[pl.ds(first, tuning.tile_m), pl.ds(k * tuning.tile_k, tuning.tile_k)]
        plgpu.copy_gmem_to_smem(own, x_smem.at[stage], full.at[stage])

    def tile(turn: jax.Array) -> None:
        block, column = tables.place(turn)
        expert, first = tables.table[EXPERT, block], tables.table[FIRST, block] * EIGHT
        start = pl.ds(column * plan.columns, plan.columns)
        if not plan.interpreted:

            @pl.when(turn == turns - 1)
            def _() -> None:
                plgpu.griddepcontrol_launch_dependents()

        def refill(k: jax.Array) -> None:
            step = turn * k_tiles + k

            @pl.when(step >= stages)
            def _() -> None:
                _await_release(empty, step, stages)

            copy(step, expert, first, start, k)

        each(0, k_tiles, refill)

    each(0, turns, tile)
    total = turns * k_tiles
    each(total - jnp.minimum(total, stages), total, partial(_await_release, empty, stages=stages))


def _await_release(empty: Any, step: jax.Array, stages: int) -> None:
    """Until all consumers are done with what the stage of `step` held before."""
    plgpu.barrier_wait(empty.at[lax.rem(step, stages)])


def _consume(
    plan: _Plan,
    tables: _Tables,
    bias: Any,
    out: Any,
    *,
    x_smem: Any,
    w_smem: Any,
    staged: Any,
    full: Any,
    empty: Any,
) -> None:
    """Multiplies tile after tile; while its results are made, the ring fills for the next."""
    tuning, k_tiles, stages = plan.tuning, plan.k_tiles, plan.num_stages
    plgpu.set_max_registers(240, action="increase")
    own = pl.ds(lax.axis_index("warpgroup") * LANES, LANES)
    across = plan.halves * plan.columns

    def multiply(turn: jax.Array) -> jax.Array:
        """The sums of a tile, rounded."""
        first = turn * k_tiles

        def accumulate(acc: Any) -> jax.Array:
            def step(k: Any) -> None:
                position = first + k
                stage = lax.rem(position, stages)
                plgpu.barrier_wait(full.at[stage])
                weights = w_smem.at[stage]
                if not plan.interpreted:
                    weights = weights.reshape(tuning.tile_k, across)
                plgpu.wgmma(acc, x_smem.at[stage, own], weights)
                plgpu.wgmma_wait(1)  # all but the last product are done with their stages

                @pl.when(k > 0)
                def _() -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(position - 1, stages)])

            each(0, k_tiles, step)
            return acc[...]

        sums = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((LANES, across), jnp.float32))
        plgpu.barrier_arrive(empty.at[lax.rem(first + k_tiles - 1, stages)])
        return sums.astype(jnp.bfloat16)

    def tile(turn: jax.Array) -> None:
        sums = multiply(turn)
        block, column = tables.place(turn)
        eights = (tables.table[NUM_PAIRS, block] + EIGHT - 1) // EIGHT
        own_eights = eights - lax.axis_index("warpgroup") * (LANES // EIGHT)

        @pl.when(own_eights > 0)
        def _() -> None:
            for piece in range(plan.num_pieces):
                _write(plan, tables, bias, out, staged, (block, column), own_eights, sums, piece)

    each(0, tables.turns, tile)
    plgpu.wait_smem_to_gmem(0)


def _write(
    plan: _Plan,
    tables: _Tables,
    bias: Any,
    out: Any,
    staged: Any,
    place: tuple[jax.Array, jax.Array],
    eights: jax.Array,
    sums: jax.Array,
    number: int,
) -> None:
    """One piece of a consumer's results: of its rows that hold pairs, in eights, at least one."""
    block, column = place
    consumer, piece = lax.axis_index("warpgroup"), plan.piece
    start = number * piece
    at = pl.ds(column * plan.columns + start, piece)
    values = _biased(plan, tables, bias, block, at, sums[:, start : start + piece], 0)
    if plan.gate is not None:
        up = sums[:, plan.columns + start : plan.columns + start + piece]
        values = gated(values, _biased(plan, tables, bias, block, at, up, 1), gate=plan.gate)
    buffer = staged.at[consumer, number % plan.num_buffers]
    plgpu.wait_smem_to_gmem(plan.num_buffers - 1, wait_read_only=True)
    buffer[...] = values
    plgpu.commit_smem()
    first = tables.table[FIRST, block] + consumer * (LANES // EIGHT)

    def store(eight: Any, height: int = 1) -> None:
        rows = pl.ds(eight * EIGHT, height * EIGHT)
        there = pl.ds((first + eight) * EIGHT, height * EIGHT)
        plgpu.copy_smem_to_gmem(buffer.at[rows], out.at[there, at], commit_group=False)

    lax.cond(
        eights >= LANES // EIGHT,
        lambda: store(0, LANES // EIGHT),
        lambda: each(0, eights, store),
    )
    plgpu.commit_smem_to_gmem_group()


def _biased(
    plan: _Plan, tables: _Tables, bias: Any, block: jax.Array, at: Any, sums: jax.Array, half: int
) -> jax.Array:
    """A piece of the rounded sums, plus its expert's bias if there is one, again rounded."""
    if not plan.has_bias:
        return sums
    load: Any = plgpu.load
    source = bias.at[tables.table[EXPERT, block], half, at]
    row = load(source, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    added = lax.broadcast_in_dim(row.astype(jnp.float32), sums.shape, (1,))
    return (sums.astype(jnp.float32) + added).astype(sums.dtype)


def gated(first: jax.Array, up: jax.Array, *, gate: Gate) -> jax.Array:
    """reference.gated in float32, for a kernel: 1 / y is made as rsqrt(y) twice."""
    dtype = first.dtype
    first, up = first.astype(jnp.float32), up.astype(jnp.float32)
    if gate is Gate.SILU_WITHIN_7:
        wide = _times_sigmoid(first, 1.0)
        return (jnp.minimum(wide, CLAMP) * _within(up)).astype(dtype)
    if gate is Gate.CLAMPED:
        wide = _times_sigmoid(jnp.minimum(first, CLAMP), SLOPE)
        return ((_within(up) + 1.0) * wide).astype(dtype)
    return (_times_sigmoid(first, 1.0) * up).astype(dtype)


def _times_sigmoid(x: jax.Array, slope: float) -> jax.Array:
    root = lax.rsqrt(1.0 + jnp.exp2(x * (-slope * LOG2E)))
    return x * root * root


def _within(x: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, -CLAMP), CLAMP)
