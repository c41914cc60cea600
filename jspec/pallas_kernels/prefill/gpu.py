"""Paged attention for packed prefill on Hopper GPUs: bf16, f16 or FP8 pools (Pallas Mosaic GPU).

The packed layout of attention/api.py, without a tail mask and with K and V already written.

  - A task is one block of packed queries, of any rows, and up to eight query heads of one kv head.
    Queries x heads fill the 64 rows of a wgmma product, and two consumers share what a producer
    loads. The grid is persistent; a producer loads for the next task early.
  - The producer copies whole pages by TMA into a ring in shared memory, row by row, from the first
    to the last block of keys that some query sees. Blocks that every query sees need no mask.
  - With `takes_turns` one consumer multiplies while the other computes its softmax (ping-pong).
  - For an FP8 pool one more warp group converts blocks to f16, into a second ring of two buffers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_plan import TILE_ROWS
from jspec.pallas_kernels.hopper import (
    LOG2E,
    NOTHING,
    add_values,
    check_attention,
    fold_scores,
    interpret_options,
    swizzled,
    wide_dtype,
    widened,
    zero_unwritten,
)
from jspec.pallas_kernels.prefill.gpu_plan import PrefillPlan, packed_heads, plan_prefill
from jspec.pallas_kernels.prefill.gpu_tasks import Task, Walk, for_each_task, walk_of
from jspec.pallas_kernels.prefill.tuning import Tuning, choose_tuning
from jspec.spec.cache_entry import FP8

BUFFERS = 2  # of converted blocks


@dataclass(frozen=True, kw_only=True)
class _Shape:
    num_queries: int  # a multiple of `block_queries`
    num_heads: int
    num_kv: int
    heads: int  # heads of a program
    width: int  # D
    page_size: int
    tuning: Tuning
    pool_dtype: Any
    dtype: Any  # of both products' operands and of the result
    scale: float
    windowed: bool
    sinks: bool
    interpreted: bool

    @property
    def tile_queries(self) -> int:
        return TILE_ROWS // self.heads

    @property
    def block_queries(self) -> int:
        return self.tile_queries * self.tuning.consumers

    @property
    def copies(self) -> int:
        return max(self.tuning.block_tokens // self.page_size, 1)

    @property
    def head_tiles(self) -> int:
        return self.num_heads // self.heads

    @property
    def tasks(self) -> int:
        return self.num_queries // self.block_queries * self.head_tiles

    @property
    def programs(self) -> int:
        return min(self.tuning.programs, self.tasks)

    @property
    def widens(self) -> bool:
        return bool(self.pool_dtype != self.dtype)

    @property
    def takes_turns(self) -> bool:
        return self.tuning.takes_turns and self.tuning.consumers == 2

    @property
    def slots(self) -> int:
        return BUFFERS if self.widens else self.tuning.stages


def attend_packed(
    q: jax.Array,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
    tuning: Tuning | None = None,
    plan: PrefillPlan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return out[T, H, D] like reference.attend with queries_per_row None; padding returns zeros.

    q[T, H, Dq], Dq <= D; kv_pages[NP, S, 2G, D] in bf16, f16 or FP8, D 64 or 128
    plan: may be shared by all layers with the same rows, window and tuning

    Raises ValueError for unsupported shapes, NotImplementedError with an older jax.
    """
    tuning = tuning or choose_tuning(kv_pages.dtype)
    _check(q, kv_pages, rows, tuning=tuning, scale=scale)
    num_kv, width = kv_pages.shape[2] // 2, kv_pages.shape[3]
    group = q.shape[1] // num_kv
    heads = packed_heads(group)
    block = TILE_ROWS // heads * tuning.consumers
    shape = _Shape(
        num_queries=-(-q.shape[0] // block) * block,
        num_heads=q.shape[1],
        num_kv=num_kv,
        heads=heads,
        width=width,
        page_size=kv_pages.shape[1],
        tuning=tuning,
        pool_dtype=kv_pages.dtype,
        dtype=wide_dtype(kv_pages.dtype),
        scale=scale,
        windowed=window is not None,
        sinks=sinks is not None,
        interpreted=interpret,
    )
    if plan is None:
        plan = plan_prefill(
            rows,
            q.shape[0],
            group=group,
            page_size=shape.page_size,
            window=window,
            block_tokens=tuning.block_tokens,
            consumers=tuning.consumers,
        )
    blocks = shape.num_queries // block
    if plan.bounds.shape != (blocks, 4):
        raise ValueError(f"the plan has {plan.bounds.shape[0]} blocks; expected {blocks}")
    packed = q.astype(shape.dtype)
    padding = ((0, shape.num_queries - q.shape[0]), (0, 0), (0, width - q.shape[2]))
    packed = jnp.pad(packed, padding).reshape(shape.num_queries, -1)
    pool = kv_pages.reshape(*kv_pages.shape[:2], -1)  # K_g and V_g adjacent: one TMA box of 2 D
    heights = jnp.zeros(q.shape[1]) if sinks is None else sinks.astype(jnp.float32) * LOG2E
    heights = jnp.repeat(heights, shape.tile_queries).reshape(-1, TILE_ROWS)
    out = _launch(packed, pool, rows.page_table, plan, heights, shape=shape)
    return out[: q.shape[0]].reshape(*q.shape[:2], width).astype(q.dtype)


def _check(
    q: jax.Array,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    tuning: Tuning,
    scale: float,
) -> None:
    block, width = tuning.block_tokens, kv_pages.shape[3]
    tokens = tuning.stages * block * kv_pages.dtype.itemsize
    tokens += BUFFERS * block * 2 * (kv_pages.dtype == FP8)
    used = (tokens * 2 + tuning.consumers * TILE_ROWS * 2) * width
    check_attention(
        (q.shape[0], q.shape[1], q.shape[2]),
        kv_pages,
        block_tokens=block,
        shared_bytes=used,
        scale=scale,
        reads_fp8=True,
    )
    if rows.tail_mask is not None:
        raise ValueError("the packed kernel takes no tail mask; expected None")


# ---- the kernel ----------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("shape",))
def _launch(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    plan: PrefillPlan,
    heights: jax.Array,
    *,
    shape: _Shape,
) -> jax.Array:
    """Return out[T, H * D]. An inner jit, so that it is compiled once for all layers."""
    tuning = shape.tuning
    of_pool, of_wide = swizzled(shape.pool_dtype, shape.width), swizzled(shape.dtype)
    scratch: dict[str, Any] = {
        "ring": plgpu.SMEM(
            (tuning.stages, tuning.block_tokens, 2 * shape.width),
            shape.pool_dtype,
            transforms=of_pool,
        ),
        "queries": plgpu.SMEM(
            (tuning.consumers, TILE_ROWS, shape.width), shape.dtype, transforms=of_wide
        ),
        "arrived": plgpu.Barrier(num_arrivals=shape.heads, num_barriers=tuning.consumers),
        "filled": plgpu.Barrier(num_arrivals=shape.copies, num_barriers=tuning.stages),
        "emptied": plgpu.Barrier(
            num_arrivals=1 if shape.widens else tuning.consumers, num_barriers=tuning.stages
        ),
        "cleaned": plgpu.Barrier(num_barriers=tuning.stages),
    }
    if shape.takes_turns:
        scratch["turn"] = plgpu.Barrier(num_arrivals=2)
    if shape.widens:
        scratch["widened"] = plgpu.Barrier(num_barriers=BUFFERS)
        scratch["released"] = plgpu.Barrier(num_arrivals=tuning.consumers, num_barriers=BUFFERS)
        scratch["wide"] = plgpu.SMEM(
            (BUFFERS, tuning.block_tokens, 2 * shape.width), shape.dtype, transforms=of_wide
        )
    if shape.interpreted:
        scratch["weights"] = plgpu.SMEM(
            (tuning.consumers, TILE_ROWS, tuning.block_tokens), shape.dtype, transforms=of_wide
        )
    kernel = plgpu.kernel(
        functools.partial(_attend, shape),
        out_type=jax.ShapeDtypeStruct(q.shape, shape.dtype),
        scratch_types=scratch,
        grid=(shape.programs,),
        grid_names=("program",),
        num_threads=tuning.consumers + 1 + shape.widens,
        thread_name="warpgroup",
        kernel_name="paged_attention_packed",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,  # reductions stay within four lanes
        ),
        **interpret_options(shape.interpreted),
    )
    out: jax.Array = kernel(q, pool, page_table, plan.bounds, plan.walks, plan.lines, heights)
    return out


@dataclass(frozen=True)
class _Refs:
    q: Any  # [T, H * D]
    pool: Any  # [NP, S, 2 G * D]
    page_table: Any
    bounds: Any
    walks: Any
    lines: Any
    heights: Any  # f32[H / heads, 64], log2 of a head's sink term
    out: Any  # [T, H * D]
    ring: Any  # [stages, block, 2 D]
    queries: Any  # [consumers, 64, D]
    arrived: Any  # a consumer's queries have arrived
    filled: Any  # a slot of the ring has been filled
    emptied: Any  # a slot may be filled again
    cleaned: Any  # a slot's unwritten V has been zeroed
    turn: Any = None  # the other consumer may multiply
    weights: Any = None  # [consumers, 64, block], P in interpret mode
    widened: Any = None  # a buffer has a converted block (FP8)
    released: Any = None  # a buffer may be written again
    wide: Any = None  # [BUFFERS, block, 2 D], converted blocks


def _attend(shape: _Shape, *args: Any, **scratch: Any) -> None:
    refs, consumers = _Refs(*args, **scratch), shape.tuning.consumers
    warpgroup = lax.axis_index("warpgroup")
    # 64 Ki registers: few for the producer, the others for the consumers.
    registers = {1: None, 2: (240, 24), 3: (160, 32)}[consumers]
    if shape.widens and consumers == 2:
        registers = (208, 24)

    @pl.when(warpgroup < consumers)
    def _consumer() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        for_each_task(shape, refs, functools.partial(_consume, shape, refs, warpgroup))

    @pl.when(warpgroup == consumers)
    def _producer() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="decrease")
        steps = for_each_task(shape, refs, functools.partial(_produce, shape, refs))

        @pl.loop(0, lax.min(steps, shape.tuning.stages))
        def _await_the_last(slot: Any) -> None:  # every barrier arrival must be awaited
            plgpu.barrier_wait(refs.emptied.at[slot])

    if shape.widens:

        @pl.when(warpgroup == consumers + 1)
        def _converter() -> None:
            if consumers == 2:
                plgpu.set_max_registers(72, action="decrease")
            steps = for_each_task(shape, refs, functools.partial(_convert, shape, refs))

            @pl.loop(0, lax.min(steps, BUFFERS))
            def _await_the_last(buffer: Any) -> None:
                plgpu.barrier_wait(refs.released.at[buffer])


def _convert(shape: _Shape, refs: _Refs, task: Task) -> None:
    tokens, width = shape.tuning.block_tokens, shape.width

    def convert(source: Any, target: Any, written: Any) -> None:
        for start in range(0, 2 * width, width):  # K, then V
            for first in range(0, tokens, TILE_ROWS):
                at = (pl.ds(first, TILE_ROWS), pl.ds(start, width))
                known = written - first if start and written is not None else None
                target.at[at][...] = widened(source.at[at], shape.dtype, written=known)

    @pl.loop(task.first_row, task.last_row)
    def _row(row: Any) -> None:
        walk = walk_of(refs, task, row)

        @pl.loop(walk.begin, walk.end)
        def _block(block: Any) -> None:
            step, written = walk.offset + block, walk.keys - block * tokens
            slot, buffer = lax.rem(step, shape.tuning.stages), lax.rem(step, BUFFERS)
            pl.when(step >= BUFFERS)(lambda: plgpu.barrier_wait(refs.released.at[buffer]))
            plgpu.barrier_wait(refs.filled.at[slot])
            both = refs.ring.at[slot], refs.wide.at[buffer]
            pl.when(written >= tokens)(lambda: convert(*both, None))
            pl.when(written < tokens)(lambda: convert(*both, written))
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.emptied.at[slot])
            plgpu.barrier_arrive(refs.widened.at[buffer])


def _produce(shape: _Shape, refs: _Refs, task: Task) -> None:
    tokens, width = min(shape.page_size, shape.tuning.block_tokens), shape.width
    per_kv_head = shape.head_tiles // shape.num_kv
    kv_head = lax.div(task.head, per_kv_head) if per_kv_head > 1 else task.head
    columns = pl.ds(kv_head * (2 * width), 2 * width)

    @pl.loop(task.first_row, task.last_row)
    def _row(row: Any) -> None:
        walk = walk_of(refs, task, row)
        # The last written page is repeated, loaded but not seen, so that all blocks have the same
        # bytes and no index is out of bounds.
        last_page = lax.max(lax.div(walk.keys - 1, shape.page_size), 0)

        @pl.loop(walk.begin, walk.end)
        def _block(block: Any) -> None:
            step = walk.offset + block
            slot = lax.rem(step, shape.tuning.stages)
            first = lax.div(block * shape.tuning.block_tokens, shape.page_size)
            pages = [
                refs.page_table[row, lax.min(first + i, last_page)] for i in range(shape.copies)
            ]
            offset: Any = 0
            if shape.page_size > tokens:
                offset = lax.rem(block, shape.page_size // tokens) * tokens
            pl.when(step >= shape.tuning.stages)(lambda: plgpu.barrier_wait(refs.emptied.at[slot]))
            for i, page in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    refs.pool.at[page, pl.ds(offset, tokens), columns],
                    refs.ring.at[slot, pl.ds(i * tokens, tokens)],
                    refs.filled.at[slot],
                )


def _consume(shape: _Shape, refs: _Refs, warpgroup: Any, task: Task) -> None:
    boxes = _boxes(shape, task, warpgroup)
    for rows, at in boxes:
        plgpu.copy_gmem_to_smem(
            refs.q.at[at], refs.queries.at[warpgroup, rows], refs.arrived.at[warpgroup]
        )
    plgpu.barrier_wait(refs.arrived.at[warpgroup])
    if shape.takes_turns:
        pl.when(warpgroup == 1)(lambda: _pass_turn(refs))

    def step(walk: Walk, masked: bool, block: Any, carry: Any) -> Any:
        slot = lax.rem(walk.offset + block, shape.slots)
        # Issue global loads early, so that they have arrived when needed.
        rule = _rule(shape, refs, task, walk, warpgroup) if masked else []
        plgpu.barrier_wait((refs.widened if shape.widens else refs.filled).at[slot])
        held = (refs.wide if shape.widens else refs.ring).at[slot]
        if masked and not shape.widens:
            _clean(shape, refs, walk, warpgroup, slot, block)
        return _absorb(shape, refs, warpgroup, slot, held, block, rule, carry)

    def walk_row(row: Any, carry: Any) -> Any:
        walk = walk_of(refs, task, row)
        if shape.windowed:
            masked = functools.partial(step, walk, True)
            carry = lax.fori_loop(walk.begin, walk.whole_begin, masked, carry)
        whole = functools.partial(step, walk, False)
        carry = lax.fori_loop(walk.whole_begin, walk.whole_end, whole, carry)
        masked = functools.partial(step, walk, True)
        return lax.fori_loop(walk.whole_end, walk.end, masked, carry)

    by_row = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.full((TILE_ROWS,), NOTHING, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((TILE_ROWS, shape.width), jnp.float32), plgpu.Layout.WGMMA),
    )
    carry = lax.fori_loop(task.first_row, task.last_row, walk_row, carry)
    if shape.takes_turns:
        pl.when(warpgroup == 0)(lambda: _pass_turn(refs))
    refs.queries[warpgroup] = _result(shape, refs, task, warpgroup, carry).astype(shape.dtype)
    plgpu.commit_smem()
    for rows, at in boxes:
        plgpu.copy_smem_to_gmem(refs.queries.at[warpgroup, rows], refs.out.at[at])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the queries' memory may be reused


def _boxes(shape: _Shape, task: Task, warpgroup: Any) -> list[tuple[Any, Any]]:
    """Return (rows of the tile, place in [T, H * D]) of each head, whose queries are contiguous."""
    queries, width = shape.tile_queries, shape.width
    start = task.block * shape.block_queries + warpgroup * queries
    column = task.head * (shape.heads * width)
    return [
        (pl.ds(i * queries, queries), (pl.ds(start, queries), pl.ds(column + i * width, width)))
        for i in range(shape.heads)
    ]


def _pass_turn(refs: _Refs) -> None:
    """Synchronize the consumers, so that one is in its softmax while the other multiplies."""
    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.turn)


def _result(shape: _Shape, refs: _Refs, task: Task, warpgroup: Any, carry: Any) -> Any:
    top, total, mixed = carry
    by_row = plgpu.Layout.WGMMA.reduce(1)
    load: Any = plgpu.load
    if shape.sinks:
        height = load(refs.heights.at[task.head], layout=by_row, optimized=False)
        new_top = jnp.maximum(top, height)
        fade = jnp.exp2(top - new_top)
        total = total * fade + jnp.exp2(height - new_top)
        mixed = mixed * lax.broadcast_in_dim(fade, mixed.shape, [0])
    tile = task.block * shape.tuning.consumers + warpgroup
    last = load(refs.lines.at[tile, 1], layout=by_row, optimized=False)
    mean = mixed / lax.broadcast_in_dim(jnp.maximum(total, 1e-30), mixed.shape, [0])
    exists = lax.broadcast_in_dim(last, mixed.shape, [0]) > 0
    return jnp.where(exists, mean, jnp.zeros_like(mean))


def _absorb(
    shape: _Shape,
    refs: _Refs,
    warpgroup: Any,
    slot: Any,
    held: Any,
    block: Any,
    rule: list[Any],
    carry: Any,
) -> Any:
    top, total, mixed = carry
    tokens, width = shape.tuning.block_tokens, shape.width
    keys, values = held.at[:, pl.ds(0, width)], held.at[:, pl.ds(width, width)]

    def score(acc: Any) -> Any:
        plgpu.wgmma(acc, refs.queries.at[warpgroup], keys.transpose((1, 0)))
        if shape.takes_turns:
            _pass_turn(refs)  # the product is running, so the other consumer may finish its softmax
        return acc[...]

    scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef((TILE_ROWS, tokens), jnp.float32))
    factor = shape.scale * LOG2E
    scores = _mask(shape, block, scores, rule)
    new_top, fade, weights, total = fold_scores(scores, factor, top, total)
    mixed = mixed * lax.broadcast_in_dim(fade, mixed.shape, [0])
    operand = weights.astype(shape.dtype)
    if shape.takes_turns:
        # The softmax must not be moved past this point, into the other's turn.
        operand, new_top, total, mixed = lax.optimization_barrier((operand, new_top, total, mixed))
        _pass_turn(refs)
    staged = refs.weights.at[warpgroup] if shape.interpreted else None
    mixed = add_values(mixed, operand, values, staged=staged)
    plgpu.barrier_arrive((refs.released if shape.widens else refs.emptied).at[slot])
    return new_top, total, mixed


def _clean(shape: _Shape, refs: _Refs, walk: Walk, warpgroup: Any, slot: Any, block: Any) -> None:
    """Zero the V of the block's unwritten slots, in the first consumer, which must not wait."""
    tokens, width = shape.tuning.block_tokens, shape.width
    written = walk.keys - block * tokens

    @pl.when((written < tokens) & (warpgroup == 0))
    def _ragged() -> None:
        zero_unwritten(refs.ring.at[slot, :, pl.ds(width, width)], written)
        if shape.tuning.consumers > 1:
            plgpu.barrier_arrive(refs.cleaned.at[slot])

    @pl.when((written < tokens) & (warpgroup > 0))
    def _behind() -> None:
        plgpu.barrier_wait(refs.cleaned.at[slot])


def _rule(shape: _Shape, refs: _Refs, task: Task, walk: Walk, warpgroup: Any) -> list[Any]:
    """Return the end of each query's slots in this row and, with a window, their start."""
    tile = task.block * shape.tuning.consumers + warpgroup
    load: Any = plgpu.load
    numbers = range(3) if shape.windowed else range(1, 3)
    lines = [
        load(refs.lines.at[tile, i], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        for i in numbers
    ]
    *first, last, row = lines
    return [jnp.where(row == walk.row, last, jnp.zeros_like(last)), *first]


def _mask(shape: _Shape, block: Any, scores: Any, rule: list[Any]) -> Any:
    if not rule:
        return scores
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    last, *first = [
        lax.broadcast_in_dim(x - block * shape.tuning.block_tokens, scores.shape, [0]) for x in rule
    ]
    seen = column < last
    for x in first:
        seen = seen & (column >= x)
    return jnp.where(seen, scores, -jnp.inf)
