"""Attention over paged latents for Hopper GPUs (Mosaic GPU): rows of equal length, bf16 or f16.

A program handles one row, up to 64 of its queries (queries x heads, the M of a wgmma product) and
one share of the row's keys. A producer copies blocks of 64 records by TMA into a ring in shared
memory. Each of two consumers has half of V's columns, as registers limit the sums, and both compute
all scores, so no consumer waits for the other. gpu_merge.py merges the shares. P is cast to the
pool's type before the second product, and each share's result before the merge.
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
from jaxtyping import Array, Float

from jspec.pallas_kernels.attention import gpu_plan
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_merge import merge_shares
from jspec.pallas_kernels.attention.gpu_plan import NUM_SMS, TILE_ROWS, BlockPlan, tiles_of
from jspec.pallas_kernels.hopper import (
    LOG2E,
    NOTHING,
    add_values,
    fold_scores,
    has_mosaic_gpu,
    interpret_options,
    require_mosaic_gpu,
    swizzled,
    zero_unwritten,
)

MOST_QUERIES = 64  # of a row
LEAST_TOKENS = 4  # of a step; for fewer, a launch outside of a CUDA graph costs what this saves
BLOCK = 64  # keys of one iteration
STAGES = 2  # blocks in the ring; with the queries they fill the shared memory
CONSUMERS = 2
MOST_SHARES = 32  # of a row's keys; more would make the merge too expensive
COLUMNS = 64  # of a swizzled tile
MOST_RANK = CONSUMERS * 256  # float32 sums in registers


@dataclass(frozen=True, kw_only=True)
class _Shape:
    rank: int  # columns of V
    width: int  # of a record
    page_size: int
    tiles: int  # of a row
    stored: int  # queries of a tile, rounded up to 8
    group: int  # heads, of one query
    shares: int
    dtype: Any
    scale: float
    interpreted: bool

    @property
    def copies(self) -> int:
        return max(BLOCK // self.page_size, 1)

    @property
    def columns(self) -> int:
        return self.rank // CONSUMERS


def serves(q: jax.Array, pages: jax.Array, *, queries_per_row: int, rank: int) -> bool:
    """Return whether the kernel reads this pool, and is faster than gpu_wide.py for these rows."""
    page_size, width = pages.shape[1:]
    return (
        has_mosaic_gpu()
        and q.shape[0] >= LEAST_TOKENS
        and queries_per_row <= MOST_QUERIES
        and q.dtype == pages.dtype
        and pages.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[2] == width
        and rank <= MOST_RANK
        and rank % (CONSUMERS * COLUMNS) == width % COLUMNS == 0
        and width <= MOST_RANK + COLUMNS
        and page_size % 8 == 0
        and (BLOCK % page_size == 0 or page_size % BLOCK == 0)
    )


def choose_shares(*, items: int, max_blocks: int) -> int:
    """Return the shares of a row's keys that fill one wave, with a program per multiprocessor."""
    return max(1, min(NUM_SMS // items, max_blocks, MOST_SHARES))


def attend_rows(
    q: Float[Array, "T H D"],
    pages: Float[Array, "NP S D"],
    rows: AttentionMetadata,
    *,
    queries_per_row: int,
    rank: int,
    scale: float,
    shares: int | None = None,
    interpret: bool = False,
) -> Float[Array, "T H rank"]:
    """Return out like attention/api.py, for a pool of latents that has this call's tokens."""
    require_mosaic_gpu()
    batch, num_heads, width = rows.page_table.shape[0], q.shape[1], q.shape[2]
    tiles, stored = tiles_of(queries_per_row * num_heads)
    max_blocks = -(-rows.page_table.shape[1] * pages.shape[1] // BLOCK)
    shape = _Shape(
        rank=rank,
        width=width,
        page_size=pages.shape[1],
        tiles=tiles,
        stored=stored,
        group=num_heads,
        shares=shares or choose_shares(items=batch * tiles, max_blocks=max_blocks),
        dtype=pages.dtype,
        scale=scale,
        interpreted=interpret,
    )
    plan = gpu_plan.plan_blocks(
        rows, queries_per_row=queries_per_row, group=num_heads, window=None, block_tokens=BLOCK
    )
    packed = gpu_plan.pack_queries(q, batch, 1, queries_per_row, width=width)
    packed = packed.reshape(batch * tiles, stored, width)
    parts, heights = _launch(packed, pages, rows.page_table, plan, shape=shape)
    if shape.shares > 1:
        sizes: Any = {"num_heads": num_heads, "num_kv": 1}
        return merge_shares(parts, heights, plan.valid, **sizes, interpret=interpret)
    of_rows = parts.reshape(batch, tiles * stored, rank)[:, : queries_per_row * num_heads]
    return of_rows.reshape(batch * queries_per_row, num_heads, rank)


@functools.partial(jax.jit, static_argnames=("shape",))
def _launch(
    q: jax.Array, pages: jax.Array, page_table: jax.Array, plan: BlockPlan, *, shape: _Shape
) -> tuple[jax.Array, jax.Array]:
    items = q.shape[0]
    layout = swizzled(shape.dtype)
    scratch: dict[str, Any] = {
        "ring": plgpu.SMEM((STAGES, BLOCK, shape.width), shape.dtype, transforms=layout),
        # The result reuses the queries' memory.
        "queries": plgpu.RefUnion(
            plgpu.SMEM((TILE_ROWS, shape.width), shape.dtype, transforms=layout),
            plgpu.SMEM((CONSUMERS, TILE_ROWS, shape.columns), shape.dtype, transforms=layout),
        ),
        "arrived": plgpu.Barrier(),
        "filled": plgpu.Barrier(num_arrivals=shape.copies, num_barriers=STAGES),
        "emptied": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
        "met": plgpu.Barrier(num_arrivals=CONSUMERS),
    }
    if shape.interpreted:  # the interpreter's wgmma takes no operand from registers
        scratch["weights"] = plgpu.SMEM(
            (CONSUMERS, TILE_ROWS, BLOCK), shape.dtype, transforms=layout
        )
    array: Any = jax.ShapeDtypeStruct
    kernel = plgpu.kernel(
        functools.partial(_attend, shape),
        out_type=[
            array((shape.shares, items, shape.stored, shape.rank), shape.dtype),
            array((shape.shares, items, TILE_ROWS), jnp.float32),
        ],
        scratch_types=scratch,
        # The last axis varies fastest, so the tiles of a row read its records at about one time.
        grid=(items // shape.tiles, shape.shares, shape.tiles),
        grid_names=("row", "share", "tile"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="latent_attention_rows",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,  # reductions stay within four lanes
        ),
        **interpret_options(shape.interpreted),
    )
    parts, heights = kernel(q, pages, page_table, plan.bounds, plan.words)
    return parts, heights


@dataclass(frozen=True)
class _Refs:
    q: Any
    pool: Any
    page_table: Any
    bounds: Any
    words: Any
    parts: Any
    heights: Any
    ring: Any  # [stages, block, D]
    queries: Any  # [64, D]
    mean: Any  # [consumers, 64, rank / consumers], in the queries' memory
    arrived: Any  # the queries have arrived
    filled: Any  # a slot of the ring has been filled
    emptied: Any  # both consumers have read a slot
    met: Any  # both consumers are here
    weights: Any = None  # [consumers, 64, block], P if it passes through shared memory


@dataclass(frozen=True, kw_only=True)
class _Work:
    row: Any
    share: Any
    tile: Any
    item: Any  # index of (row, tile) in the packed queries and the results
    begin: Any  # this share is blocks [begin, end) of the row
    end: Any
    edge: Any  # first block that needs the mask
    keys: Any  # written slots of the row
    valid: Any  # valid queries of the row


def _locate(shape: _Shape, refs: _Refs) -> _Work:
    row, share, tile = (lax.axis_index(name) for name in ("row", "share", "tile"))
    _, edge, last, keys, valid = (refs.bounds[row, i] for i in range(5))
    return _Work(
        row=row,
        share=share,
        tile=tile,
        item=row * shape.tiles + tile,
        begin=lax.div(last * share, shape.shares),
        end=lax.div(last * (share + 1), shape.shares),
        edge=edge,
        keys=keys,
        valid=valid,
    )


def _attend(shape: _Shape, *args: Any, **scratch: Any) -> None:
    scratch["queries"], scratch["mean"] = scratch["queries"]
    refs = _Refs(*args, **scratch)
    if not shape.interpreted:
        # Programmatic dependent launch: wait here for the results of the preceding kernel.
        plgpu.griddepcontrol_wait()
    work = _locate(shape, refs)
    warpgroup = lax.axis_index("warpgroup")
    for number in range(CONSUMERS):  # a branch each: slices of swizzled memory are static

        @pl.when(warpgroup == number)
        def _consumer(number: int = number) -> None:
            plgpu.set_max_registers(240, action="increase")
            _consume(shape, refs, work, number)

    @pl.when(warpgroup == CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(24, action="decrease")
        _produce(shape, refs, work)


def _produce(shape: _Shape, refs: _Refs, work: _Work) -> None:
    plgpu.copy_gmem_to_smem(
        refs.q.at[work.item], refs.queries.at[pl.ds(0, shape.stored)], refs.arrived
    )
    tokens = min(shape.page_size, BLOCK)
    last = lax.max(lax.div(work.keys - 1, shape.page_size), 0)

    @pl.loop(0, work.end - work.begin)
    def _step(i: Any) -> None:
        block, slot = work.begin + i, lax.rem(i, STAGES)
        first = lax.div(block * BLOCK, shape.page_size)
        offset: Any = 0
        if shape.page_size > tokens:
            offset = lax.rem(block, shape.page_size // tokens) * tokens
        pages = [refs.page_table[work.row, lax.min(first + n, last)] for n in range(shape.copies)]
        pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(refs.emptied.at[slot]))
        for n, page in enumerate(pages):
            plgpu.copy_gmem_to_smem(
                refs.pool.at[page, pl.ds(offset, tokens)],
                refs.ring.at[slot, pl.ds(n * tokens, tokens)],
                refs.filled.at[slot],
            )

    steps = work.end - work.begin

    @pl.loop(lax.max(steps - STAGES, 0), steps)
    def _await_the_last(i: Any) -> None:  # every barrier arrival must be awaited
        plgpu.barrier_wait(refs.emptied.at[lax.rem(i, STAGES)])


def _consume(shape: _Shape, refs: _Refs, work: _Work, number: int) -> None:
    num_steps = work.end - work.begin
    num_whole = lax.max(lax.min(work.edge - work.begin, num_steps), 0)
    plgpu.barrier_wait(refs.arrived)

    def step(i: Any, carry: Any, *, masked: bool) -> Any:
        block, slot = work.begin + i, lax.rem(i, STAGES)
        # Issue global loads early, so that they have arrived when needed.
        words = _words(refs, work, block) if masked else []
        plgpu.barrier_wait(refs.filled.at[slot])
        carry = _absorb(shape, refs, work, number, slot, block, words, carry)
        plgpu.barrier_arrive(refs.emptied.at[slot])
        return carry

    by_row = plgpu.Layout.WGMMA.reduce(1)
    sums = jnp.zeros((TILE_ROWS, shape.columns), jnp.float32)
    carry = (
        plgpu.layout_cast(jnp.full((TILE_ROWS,), NOTHING, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), by_row),
        plgpu.layout_cast(sums, plgpu.Layout.WGMMA),
    )
    carry = lax.fori_loop(0, num_whole, functools.partial(step, masked=False), carry)
    carry = lax.fori_loop(num_whole, num_steps, functools.partial(step, masked=True), carry)
    _store(shape, refs, work, number, carry)


def _store(shape: _Shape, refs: _Refs, work: _Work, number: int, carry: Any) -> None:
    """Store this consumer's columns of the mean, zero for invalid queries."""
    top, total, mixed = carry
    safe = jnp.maximum(total, 1e-30)
    mean = mixed / lax.broadcast_in_dim(safe, mixed.shape, [0])
    row = plgpu.broadcasted_iota(jnp.int32, mean.shape, 0, layout=plgpu.Layout.WGMMA)
    mean = jnp.where(row < work.valid * shape.group - work.tile * TILE_ROWS, mean, 0.0)
    _wait_for_the_other(refs)  # the other consumer no longer reads the queries
    refs.mean[number] = mean.astype(shape.dtype)
    plgpu.commit_smem()
    if number == 0:
        height = jnp.where(total > 0, top + jnp.log(safe) * LOG2E, NOTHING)
        refs.heights[work.share, work.item] = height
    columns = pl.ds(number * shape.columns, shape.columns)
    plgpu.copy_smem_to_gmem(
        refs.mean.at[number, pl.ds(0, shape.stored)],
        refs.parts.at[work.share, work.item, :, columns],
    )
    plgpu.wait_smem_to_gmem(0)


def _wait_for_the_other(refs: _Refs) -> None:
    plgpu.barrier_arrive(refs.met)
    plgpu.barrier_wait(refs.met)


def _absorb(
    shape: _Shape,
    refs: _Refs,
    work: _Work,
    number: int,
    slot: Any,
    block: Any,
    words: list[Any],
    carry: Any,
) -> Any:
    """Add a block of records. words: the mask of the block; empty if all of it is seen."""
    top, total, mixed = carry
    records = refs.ring.at[slot]

    def score(acc: Any) -> Any:
        plgpu.wgmma(acc, refs.queries, records.transpose((1, 0)))
        return acc[...]

    scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef((TILE_ROWS, BLOCK), jnp.float32))
    if words:
        _clean(shape, refs, work, number, slot, block)
    factor = shape.scale * LOG2E
    new_top, fade, weights, total = fold_scores(_mask(scores, words), factor, top, total)
    mixed = mixed * lax.broadcast_in_dim(fade, mixed.shape, [0])
    rounded = weights.astype(shape.dtype)
    values = records.at[:, pl.ds(number * shape.columns, shape.columns)]
    staged = refs.weights.at[number] if shape.interpreted else None
    return new_top, total, add_values(mixed, rounded, values, staged=staged)


def _clean(shape: _Shape, refs: _Refs, work: _Work, number: int, slot: Any, block: Any) -> None:
    """Zero this consumer's V of the block's unwritten slots, once both have read its K."""
    written = work.keys - block * BLOCK

    @pl.when(written < BLOCK)
    def _ragged() -> None:
        _wait_for_the_other(refs)
        for column in range(0, shape.columns, COLUMNS):  # in pieces: there are few registers
            start = number * shape.columns + column
            zero_unwritten(refs.ring.at[slot, :, pl.ds(start, COLUMNS)], written)


def _words(refs: _Refs, work: _Work, block: Any) -> list[Any]:
    load: Any = plgpu.load
    return [
        load(
            refs.words.at[work.row, work.tile, block - work.edge, w],
            layout=plgpu.Layout.WGMMA.reduce(1),
            optimized=False,
        )
        for w in range(BLOCK // 32)
    ]


def _mask(scores: Any, words: list[Any]) -> Any:
    if not words:
        return scores
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    low, high = (lax.broadcast_in_dim(word, scores.shape, [0]) for word in words)
    bits = jnp.where(column < 32, low, high)
    seen = (lax.shift_right_logical(bits, column & 31) & 1) != 0
    return jnp.where(seen, scores, -jnp.inf)
