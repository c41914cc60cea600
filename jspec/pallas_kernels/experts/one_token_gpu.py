"""The experts of one token in one launch on a Hopper GPU (Mosaic GPU): choice, gate-up, down.

At one token a mixture's time is that of reading its experts' weights, and of memory idling where
one launch ends and the next begins. Here NUM_BLOCKS persistent programs, one a multiprocessor, each
with a ring of tiles in shared memory, do both products: a producer copies the tiles of gate and up
by TMA and runs on to those of `down` while the others still multiply, since which tiles it needs
is known from the choice. Only the consumers wait for each other, once, at a counter in memory.

    every program: the k best experts, from the shares of the router's logits (routing_gpu)
    unit of gate and up: one pair, 64 inner columns     -> inner[k, I], then the counter
    unit of down: one pair, 128 output columns          -> rows[k, E]

A product of one row is the matrix instruction's with 64 equal rows, held in registers.

No program may wait for one that is not running: the grid has one program a multiprocessor, and a
program takes so much shared memory that two never share one, so all are resident at once once
earlier launches have ended, which wait for nobody. `problem` refuses chips with fewer.

Rounded as few_gpu.py rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jspec.core.model_spec import Gate, MoESpec, Routing
from jspec.pallas_kernels.experts import simt_gpu
from jspec.pallas_kernels.hopper import SWIZZLE, each

TILE = 64  # inputs of a tile of weights
WIDE = 128  # its columns: 256 bytes of a row, which memory gives faster than twice 128
STAGES = 12  # tiles of 16 KiB on their way
NUM_BLOCKS = 132  # of an H200's multiprocessors
LANES = 128  # threads of a warpgroup
TILES_AT_ONCE = 4  # multiplied before any is given back
PRODUCER = 1  # the second warpgroup; the first multiplies


@dataclass(frozen=True, slots=True)
class _Shape:
    """Everything static of a call."""

    size: int
    inner: int
    num_experts: int
    top_k: int
    routing: Routing
    gate: Gate
    splits: int  # of the inputs of gate and up
    stages: int = STAGES
    blocks: int = NUM_BLOCKS

    @property
    def columns(self) -> int:
        """Tiles of 128 inner columns; the last may be half one."""
        return -(-self.inner // WIDE)

    @property
    def out_columns(self) -> int:
        """Tiles of 128 output columns; the last may be half one."""
        return -(-self.size // WIDE)

    @property
    def gate_up_units(self) -> int:
        return self.top_k * self.splits * self.columns

    @property
    def gate_up_deep(self) -> int:
        """Tiles of gate, and of up, along the inputs of a unit."""
        return self.size // TILE // self.splits

    @property
    def down_deep(self) -> int:
        return self.inner // TILE

    @property
    def down_units(self) -> int:
        return self.top_k * self.out_columns

    def turns(self, units: int, block: Any) -> Any:
        """How many of the units, dealt out in turns, are this block's."""
        return (units - block + self.blocks - 1) // self.blocks


def splits_of(size: int, inner: int, top_k: int) -> int:
    """Into how many parts the inputs of gate and up are cut, so that the programs have about as
    many tiles each: of those that divide them, up to 8, the one with the shortest longest."""
    deep, units = size // TILE, top_k * -(-inner // WIDE)
    fit = [splits for splits in range(1, 9) if deep % splits == 0]
    return min(fit, key=lambda splits: -(-units * splits // NUM_BLOCKS) * (deep // splits))


def problem(*, size: int, inner: int, num_experts: int, top_k: int) -> str | None:
    """Why the kernel does not serve experts of E = size and I = inner, or None."""
    if size % TILE or inner % TILE:
        return f"E {size} and I {inner}; expected multiples of {TILE}"
    if num_experts > LANES:
        return f"{num_experts} experts; expected at most {LANES}"
    if not 1 <= top_k <= 16:
        return f"{top_k} experts a token; expected 1 to 16"
    return None


def run_one(
    normed: Float[Array, "one E"],
    shares: Float[Array, "S one X"],
    counter: Int[Array, "1"],
    router_bias: Float[Array, "X"] | None,
    params: Mapping[str, jax.Array],
    *,
    spec: MoESpec,
) -> tuple[Float[Array, "k E"], Int[Array, "one k"], Float[Array, "one k"]]:
    """(each pair's row of `down`, ids, weights) of one token.

    shares: of the router's logits, without its bias. counter: 0; it is used up.
    """
    num_experts, inner, size = params["down"].shape
    if found := problem(size=size, inner=inner, num_experts=num_experts, top_k=spec.top_k):
        raise ValueError(f"the kernel of one token does not serve {found}")
    splits = splits_of(size, inner, spec.top_k)
    shape = _Shape(size, inner, num_experts, spec.top_k, spec.routing, spec.gate, splits)
    dtype = normed.dtype
    operands = [
        normed.reshape(-1),
        shares,
        counter,
        params["gate_up"].reshape(num_experts * size, 2 * inner // TILE, TILE),
        params["down"].reshape(num_experts * inner, size // TILE, TILE),
    ]
    has_bias, has_router_bias = "gate_up_bias" in params, router_bias is not None
    operands += [params["gate_up_bias"]] if has_bias else []
    operands += [] if router_bias is None else [router_bias]

    def experts_one_token_gpu(*refs: Any, **scratch: Any) -> None:  # the name that profiles show
        _body(shape, has_bias, has_router_bias, *refs, **scratch)

    longest = max(size, inner)
    rows, ids, weights, _ = plgpu.kernel(
        experts_one_token_gpu,
        out_type=(
            jax.ShapeDtypeStruct((shape.top_k, size), dtype),
            jax.ShapeDtypeStruct((1, shape.top_k), jnp.int32),
            jax.ShapeDtypeStruct((1, shape.top_k), jnp.float32),
            jax.ShapeDtypeStruct((shape.top_k, shape.splits, 2, shape.columns * WIDE), jnp.float32),
        ),
        scratch_types={
            "ring": plgpu.SMEM(
                (shape.stages, TILE, 2, TILE),
                dtype,
                transforms=(plgpu.TilingTransform((8, 1, TILE)), plgpu.SwizzleTransform(SWIZZLE)),
            ),
            "row": plgpu.SMEM((longest,), dtype),
            "table": plgpu.SMEM((LANES,), jnp.int32),
            "sums": plgpu.SMEM((2, LANES // 32), jnp.float32),
            "best": plgpu.SMEM((2, 16), jnp.int32),
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=shape.stages),
            "empty": plgpu.Barrier(num_arrivals=1, num_barriers=shape.stages),
            "chosen": plgpu.Barrier(num_arrivals=1),
        },
        grid=(shape.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands)
    return rows, ids, weights


def _body(shape: _Shape, has_bias: bool, has_router_bias: bool, *refs: Any, **scratch: Any) -> None:
    normed, shares, counter, gate_up, down, *rest = refs
    bias = rest.pop(0) if has_bias else None
    router_bias = rest.pop(0) if has_router_bias else None
    rows, ids, weights, partials = rest
    lax.cond(
        lax.axis_index("warpgroup") == PRODUCER,
        lambda: _produce(shape, shares, router_bias, gate_up, down, ids, weights, **scratch),
        lambda: _consume(shape, normed, counter, bias, rows, partials, **scratch),
    )


def _unit(shape: _Shape, turn: Any, *, down: bool) -> tuple[Any, Any]:
    """(pair, tile of columns) of this block's unit. The last blocks begin with `down`: where
    there are fewer units of gate and up than blocks, they have none of those."""
    block = lax.axis_index("block")
    first = shape.blocks - 1 - block if down else block
    unit = first + turn * shape.blocks
    columns = shape.out_columns if down else shape.splits * shape.columns
    return unit // columns, unit % columns


def _both_turns(shape: _Shape) -> tuple[Any, Any]:
    block = lax.axis_index("block")
    last = shape.blocks - 1 - block
    return shape.turns(shape.gate_up_units, block), shape.turns(shape.down_units, last)


def _produce(
    shape: _Shape,
    shares: Any,
    router_bias: Any,
    gate_up: Any,
    down: Any,
    ids: Any,
    weights: Any,
    *,
    ring: Any,
    table: Any,
    sums: Any,
    best: Any,
    full: Any,
    empty: Any,
    chosen: Any,
    **_: Any,
) -> None:
    """Chooses, then keeps the ring full: first gate and up, then `down` without a stop."""
    simt_gpu.choose(
        shares,
        router_bias,
        table,
        sums,
        best,
        ids,
        weights,
        lax.axis_index("block") == 0,
        top_k=shape.top_k,
        routing=shape.routing,
        dtype=ring.dtype,
    )
    plgpu.barrier_arrive(chosen)
    gate_up_turns, down_turns = _both_turns(shape)

    def load(step: Any, source: Any) -> None:
        stage = lax.rem(step, shape.stages)

        @pl.when(step >= shape.stages)
        def _() -> None:
            plgpu.barrier_wait(empty.at[stage])

        plgpu.copy_gmem_to_smem(source, ring.at[stage], full.at[stage])

    deep, deep_down = shape.gate_up_deep, shape.down_deep

    def gate_up_unit(turn: Any) -> None:
        pair, place = _unit(shape, turn, down=False)
        split, column = place // shape.columns, place % shape.columns
        start = best[0, pair] * shape.size + split * deep * TILE

        def tiles(k: Any) -> None:
            depth = pl.ds(start + k * TILE, TILE)
            for half in range(2):
                # The last tile may run on from gate into up: those sums are left alone.
                group = half * (shape.inner // TILE) + 2 * column
                load(2 * (turn * deep + k) + half, gate_up.at[depth, pl.ds(group, 2)])

        each(0, deep, tiles)

    def down_unit(turn: Any) -> None:
        pair, column = _unit(shape, turn, down=True)
        start = best[0, pair] * shape.inner
        before = 2 * gate_up_turns * deep + turn * deep_down

        def tile(k: Any) -> None:
            depth = pl.ds(start + k * TILE, TILE)
            load(before + k, down.at[depth, pl.ds(2 * column, 2)])

        each(0, deep_down, tile)

    each(0, gate_up_turns, gate_up_unit)
    each(0, down_turns, down_unit)
    # Every tile is consumed before a program ends, so its shared memory outlives all copies.


def _consume(
    shape: _Shape,
    normed: Any,
    counter: Any,
    bias: Any,
    rows: Any,
    partials: Any,
    *,
    ring: Any,
    row: Any,
    best: Any,
    full: Any,
    empty: Any,
    chosen: Any,
    **_: Any,
) -> None:
    gate_up_turns, down_turns = _both_turns(shape)
    deep, deep_down = shape.gate_up_deep, shape.down_deep

    def left_of(k: Any) -> jax.Array:
        """64 inputs of the row, in 64 equal rows."""
        part = plgpu.load(
            row.at[pl.ds(k * TILE, TILE)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
        )
        spread = lax.broadcast_in_dim(part, (TILE, TILE), [1])
        return plgpu.layout_cast(spread, plgpu.Layout.WGMMA)

    def multiply(sums: list[Any], first: Any, k: Any, count: int) -> None:
        """sums += inputs k, k + 1, ... @ their tiles, which come from `first` on in turns."""
        lefts = [left_of(k + i) for i in range(count)]
        stages = [lax.rem(first + i, shape.stages) for i in range(count * len(sums))]
        for i, stage in enumerate(stages):
            plgpu.barrier_wait(full.at[stage])
            weights = ring.at[stage].reshape(TILE, WIDE)
            plgpu.wgmma(sums[i % len(sums)], lefts[i // len(sums)], weights)
        plgpu.wgmma_wait(0)
        for stage in stages:
            plgpu.barrier_arrive(empty.at[stage])

    def products(num: int, first: Any, k: Any, deep: int) -> tuple[jax.Array, ...]:
        """The next num * deep tiles' products with the row from k on: num of f32[64, 128]."""

        def accumulate(*sums: Any) -> tuple[jax.Array, ...]:
            at_once = TILES_AT_ONCE // num

            def step(i: Any) -> None:
                multiply([*sums], first + num * at_once * i, k + at_once * i, at_once)

            each(0, deep // at_once, step)
            left = deep % at_once
            if left:
                multiply([*sums], first + num * (deep - left), k + deep - left, left)
            return tuple(total[...] for total in sums)

        kind = plgpu.WGMMAAccumulatorRef((TILE, WIDE), jnp.float32)
        return pl.run_scoped(accumulate, *[kind] * num)

    simt_gpu.copy_row(normed, row, shape.size)

    def gate_up_unit(turn: Any) -> None:
        pair, place = _unit(shape, turn, down=False)
        split, column = place // shape.columns, place % shape.columns
        both = products(2, 2 * turn * deep, split * deep, deep)
        for half, sums in enumerate(both):
            columns = pl.ds(column * WIDE, WIDE)
            simt_gpu.store_row(sums, partials.at[pair, split, half, columns])

    each(0, gate_up_turns, gate_up_unit)
    simt_gpu.arrive(counter)
    plgpu.barrier_wait(chosen)
    simt_gpu.wait_for(counter, shape.blocks)

    def down_unit(turn: Any) -> None:
        pair, column = _unit(shape, turn, down=True)
        its_bias = None if bias is None else bias.at[best[0, pair]]
        gate_row = partial(simt_gpu.gate_row, inner=shape.inner, gate=shape.gate)
        gate_row(partials.at[pair], its_bias, row)
        first = 2 * gate_up_turns * deep + turn * deep_down
        (sums,) = products(1, first, 0, deep_down)
        rounded = sums.astype(rows.dtype)
        for half in range(2):
            start = column * WIDE + half * TILE

            @pl.when(start < shape.size)
            def _(half: int = half, start: Any = start) -> None:
                values = rounded[:, half * TILE : (half + 1) * TILE]
                simt_gpu.store_row(values, rows.at[pair, pl.ds(start, TILE)])

    each(0, down_turns, down_unit)
