"""Paged attention for Hopper GPUs (Mosaic GPU): rows of equal length, pools in bf16, f16 or FP8.

A program handles one row, one kv head, up to 64 packed queries (group x R, the M of a wgmma
product) and one share of the row's keys. It copies whole pages by TMA into a ring in shared memory
and keeps an online softmax in float32 registers. gpu_merge.py merges the shares.

P is cast to the pool's type before the second product, and each share's result before the merge.
For an FP8 pool (e4m3) this type is f16, to which a consumer converts each block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jspec.pallas_kernels.attention import gpu_plan
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_merge import in_order, merge_shares
from jspec.pallas_kernels.attention.gpu_plan import (
    TILE_ROWS,
    BlockPlan,
    can_place,
    pack_queries,
    tiles_of,
)
from jspec.pallas_kernels.attention.tuning import Tuning, choose_tuning
from jspec.pallas_kernels.hopper import (
    LOG2E,
    NOTHING,
    check_attention,
    fold_scores,
    interpret_options,
    swizzled,
    wide_dtype,
    widened,
    zero_unwritten,
)

MAX_QUERIES = 64  # R


@dataclass(frozen=True, kw_only=True)
class Shape:
    batch: int
    num_kv: int
    width: int  # D
    page_size: int
    queries: int  # R
    group: int  # heads of a kv head
    tiles: int
    stored: int  # queries of a tile, rounded up to 8
    splits: int
    tuning: Tuning
    pool_dtype: Any
    dtype: Any  # of both products' operands and of the results
    scale: float
    windowed: bool
    in_parts: bool  # the result is merged afterwards, even if it is one part
    interpreted: bool

    @property
    def copies(self) -> int:
        """Copies per block: one per page, or one if a block is part of a page."""
        return max(self.tuning.block_tokens // self.page_size, 1)

    @property
    def widens(self) -> bool:
        return bool(self.pool_dtype != self.dtype)

    @property
    def num_words(self) -> int:
        return self.tuning.block_tokens // 32

    @property
    def parts(self) -> int:
        return self.splits * self.tuning.consumers

    @property
    def is_direct(self) -> bool:
        """True if a program's result is final and written directly to the output."""
        return self.parts == 1 and not self.in_parts and can_place(self.queries, self.group)

    @property
    def warpgroups(self) -> int:
        return self.tuning.consumers + (self.tuning.loader == "producer")


def attend_rows(
    q: jax.Array,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    scale: float,
    queries_per_row: int,
    window: int | None = None,
    sinks: jax.Array | None = None,
    packed_heads: int | None = None,
    tuning: Tuning | None = None,
    plan: BlockPlan | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return out[T, H, D] like reference.attend, for T = B * R queries.

    q[T, H, Dq] with Dq <= D; kv_pages[NP, S, 2G, D] in bf16, f16 or FP8 (the result is then f16)
    plan: may be shared by all layers with the same rows, window and block_tokens
    packed_heads: H, if q is in the layout of gpu_plan.pack_queries

    Raises ValueError for unsupported shapes, NotImplementedError with a jax before 0.11.
    """
    tuning = tuning or choose_tuning(kv_pages.shape[3], windowed=window is not None)
    if interpret:  # the interpreter's wgmma takes no operand from registers
        tuning = replace(tuning, weights="shared")
    num_queries, num_heads = rows.page_table.shape[0] * queries_per_row, packed_heads or q.shape[1]
    shape = shape_of(
        (num_queries if packed_heads else q.shape[0], num_heads, q.shape[2]),
        kv_pages,
        rows,
        queries_per_row=queries_per_row,
        tuning=tuning,
        scale=scale,
        windowed=window is not None,
        in_parts=sinks is not None,
        interpreted=interpret,
    )
    if plan is None:
        plan = gpu_plan.plan_blocks(
            rows,
            queries_per_row=queries_per_row,
            group=shape.group,
            window=window,
            block_tokens=tuning.block_tokens,
        )
    if plan.words.shape[3] != shape.num_words:
        raise ValueError(f"the plan has {plan.words.shape[3]} words; expected {shape.num_words}")
    if packed_heads is None:
        size = (shape.batch, shape.num_kv, queries_per_row)
        q = pack_queries(q.astype(shape.dtype), *size, width=shape.width)
    packed = q.reshape(-1, shape.stored, shape.width)
    pool = kv_pages.reshape(*kv_pages.shape[:2], -1)  # K_g and V_g adjacent: one TMA box of 2 D
    results = launch(packed, pool, rows.page_table, plan, shape=shape)
    if shape.is_direct:
        return results[0].reshape(num_queries, num_heads, shape.width)
    parts, heights = results
    sizes: Any = {"num_heads": num_heads, "num_kv": shape.num_kv}
    if shape.parts > 1 or sinks is not None:
        out = merge_shares(parts, heights, plan.valid, sinks, **sizes, interpret=interpret)
    else:
        out = in_order(parts[0], plan.valid, **sizes)
    return out.astype(q.dtype)


def shape_of(
    q: tuple[int, int, int],  # T, H, Dq
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    queries_per_row: int,
    tuning: Tuning,
    **fixed: Any,  # scale, windowed, in_parts, interpreted
) -> Shape:
    _, page_size, two_g, width = kv_pages.shape
    batch, block = rows.page_table.shape[0], tuning.block_tokens
    wide = wide_dtype(kv_pages.dtype)
    ring = tuning.stages * kv_pages.dtype.itemsize + 2 * (wide != kv_pages.dtype)
    used = tuning.consumers * (ring * block * 2 + TILE_ROWS * 2) * width
    used += tuning.consumers * TILE_ROWS * block * 2 * (tuning.weights == "shared")
    limits: Any = {"block_tokens": block, "shared_bytes": used, "scale": fixed["scale"]}
    check_attention(q, kv_pages, **limits, reads_fp8=True)
    if not 1 <= queries_per_row <= MAX_QUERIES or q[0] != batch * queries_per_row:
        raise ValueError(
            f"{q[0]} queries, {queries_per_row} per row, {batch} rows; "
            f"expected the product, and at most {MAX_QUERIES} per row"
        )
    group = q[1] // (two_g // 2)
    tiles, stored = tiles_of(queries_per_row * group)
    splits = tuning.splits or gpu_plan.choose_splits(
        programs=batch * (two_g // 2) * tiles,
        max_blocks=-(-rows.page_table.shape[1] * page_size // block),
    )
    return Shape(
        batch=batch,
        num_kv=two_g // 2,
        width=width,
        page_size=page_size,
        queries=queries_per_row,
        group=group,
        tiles=tiles,
        stored=stored,
        splits=splits,
        tuning=tuning,
        pool_dtype=kv_pages.dtype,
        dtype=wide,
        **fixed,
    )


# ---- the kernel ----------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("shape",))
def launch(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    plan: BlockPlan,
    *,
    shape: Shape,
) -> list[jax.Array]:
    """Return [out[B, R, H, D]] if direct, else [parts, heights]; compiled once for all layers."""
    tuning, programs = shape.tuning, shape.batch * shape.num_kv * shape.tiles
    array: Any = jax.ShapeDtypeStruct
    results = [
        array((shape.parts, programs, shape.stored, shape.width), shape.dtype),
        array((shape.parts, programs, TILE_ROWS), jnp.float32),
    ]
    of_pool, of_wide = swizzled(shape.pool_dtype, shape.width), swizzled(shape.dtype)
    rings = tuning.consumers * tuning.stages
    scratch: dict[str, Any] = {
        "ring": plgpu.SMEM(
            (rings, tuning.block_tokens, 2 * shape.width), shape.pool_dtype, transforms=of_pool
        ),
        "queries": plgpu.SMEM(
            (tuning.consumers, TILE_ROWS, shape.width), shape.dtype, transforms=of_wide
        ),
        "arrived": plgpu.Barrier(num_barriers=tuning.consumers),
        "filled": plgpu.Barrier(num_arrivals=shape.copies, num_barriers=rings),
    }
    if tuning.weights == "shared":
        scratch["weights"] = plgpu.SMEM(
            (tuning.consumers, TILE_ROWS, tuning.block_tokens), shape.dtype, transforms=of_wide
        )
    if shape.widens:
        scratch["wide"] = plgpu.SMEM(
            (tuning.consumers, tuning.block_tokens, 2 * shape.width),
            shape.dtype,
            transforms=of_wide,
        )
    if tuning.loader == "producer":
        scratch["emptied"] = plgpu.Barrier(num_barriers=rings)
    if shape.is_direct:
        num_heads = shape.num_kv * shape.group
        results = [array((shape.batch, shape.queries, num_heads, shape.width), shape.dtype)]
        # The result uses tiles that can be cut between any two queries. It reuses the queries'
        # memory; otherwise two programs would not fit on a multiprocessor.
        cut = (plgpu.TilingTransform((math.gcd(shape.group, 8), 64)), of_wide[1])
        mean = plgpu.SMEM((1, TILE_ROWS, shape.width), shape.dtype, transforms=cut)
        scratch["queries"] = plgpu.RefUnion(scratch["queries"], mean)
    kernel = plgpu.kernel(
        functools.partial(_attend, shape),
        out_type=results,
        scratch_types=scratch,
        # The last axis varies fastest, so the heads of a page are read at about the same time.
        grid=(shape.batch * shape.splits, shape.tiles, shape.num_kv),
        grid_names=("share", "tile", "head"),
        num_threads=shape.warpgroups,
        thread_name="warpgroup",
        kernel_name="paged_attention_rows",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,  # reductions stay within four lanes
        ),
        **interpret_options(shape.interpreted),
    )
    return list(kernel(q, pool, page_table, plan.bounds, plan.words, plan.lowest))


@dataclass(frozen=True, kw_only=True)
class _Work:
    row: Any
    head: Any
    tile: Any
    split: Any
    begin: Any  # this share is blocks [begin, end) of the row
    end: Any
    edge: Any  # first block that needs the mask
    keys: Any  # written slots of the row
    valid: Any  # valid queries of the row
    program: Any  # index of (row, head, tile) in the packed queries and the results


def _locate(shape: Shape, bounds: Any) -> _Work:
    share, tile, head = (lax.axis_index(name) for name in ("share", "tile", "head"))
    row, split = lax.div(share, shape.splits), lax.rem(share, shape.splits)
    first, edge, last, keys, valid = (bounds[row, i] for i in range(5))
    blocks = last - first
    return _Work(
        row=row,
        head=head,
        tile=tile,
        split=split,
        begin=first + lax.div(blocks * split, shape.splits),
        end=first + lax.div(blocks * (split + 1), shape.splits),
        edge=edge,
        keys=keys,
        valid=valid,
        program=(row * shape.num_kv + head) * shape.tiles + tile,
    )


@dataclass(frozen=True)
class _Refs:
    q: Any
    pool: Any
    page_table: Any
    bounds: Any
    words: Any
    lowest: Any
    results: tuple[Any, ...]  # as `launch` returns them
    ring: Any  # [consumers * stages, block, 2 D]
    queries: Any  # [consumers, 64, D]
    arrived: Any  # the queries have arrived
    filled: Any  # a slot of a ring has been filled
    emptied: Any = None  # a slot may be filled again (producer)
    weights: Any = None  # [consumers, 64, block], P if it passes through shared memory
    wide: Any = None  # [consumers, block, 2 D], a converted block (FP8)
    mean: Any = None  # [1, 64, D], in the queries' memory (direct)


def _attend(shape: Shape, *args: Any, **scratch: Any) -> None:
    if shape.is_direct:
        scratch["queries"], scratch["mean"] = scratch["queries"]
    scratch["results"] = args[6:]
    refs = _Refs(*args[:6], **scratch)
    warpgroup = lax.axis_index("warpgroup")
    if not shape.interpreted:
        # Programmatic dependent launch: wait here for the results of the preceding kernel.
        plgpu.griddepcontrol_wait()
    work, consumers = _locate(shape, refs.bounds), shape.tuning.consumers
    if shape.tuning.loader == "self":
        _consume(shape, refs, work, warpgroup)
        return
    # Two consumers and a producer need more registers than exist, so the producer gives up some.
    rebalance = consumers == 2

    @pl.when(warpgroup < consumers)
    def _consumer() -> None:
        if rebalance:
            plgpu.set_max_registers(232, action="increase")
        _consume(shape, refs, work, warpgroup)

    @pl.when(warpgroup == consumers)
    def _producer() -> None:
        if rebalance:
            plgpu.set_max_registers(40, action="decrease")
        _produce(shape, refs, work)


def _pages_of(shape: Shape, refs: _Refs, work: _Work, block: Any) -> list[Any]:
    """Return a block's page ids. Past the last written page it is repeated: loaded but not seen."""
    last = lax.max(lax.div(work.keys - 1, shape.page_size), 0)
    first = lax.div(block * shape.tuning.block_tokens, shape.page_size)
    return [refs.page_table[work.row, lax.min(first + i, last)] for i in range(shape.copies)]


def _load(shape: Shape, refs: _Refs, work: _Work, block: Any, slot: Any, pages: list[Any]) -> None:
    tokens = min(shape.page_size, shape.tuning.block_tokens)
    offset: Any = 0
    if shape.page_size > tokens:
        offset = lax.rem(block, shape.page_size // tokens) * tokens
    columns = pl.ds(work.head * (2 * shape.width), 2 * shape.width)
    for i, page in enumerate(pages):
        plgpu.copy_gmem_to_smem(
            refs.pool.at[page, pl.ds(offset, tokens), columns],
            refs.ring.at[slot, pl.ds(i * tokens, tokens)],
            refs.filled.at[slot],
        )


def _produce(shape: Shape, refs: _Refs, work: _Work) -> None:
    consumers, stages = shape.tuning.consumers, shape.tuning.stages

    @pl.loop(0, work.end - work.begin)
    def _step(i: Any) -> None:
        block, step = work.begin + i, lax.div(i, consumers)
        slot = lax.rem(i, consumers) * stages + lax.rem(step, stages)
        pages = _pages_of(shape, refs, work, block)
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(refs.emptied.at[slot]))
        _load(shape, refs, work, block, slot, pages)


def _consume(shape: Shape, refs: _Refs, work: _Work, warpgroup: Any) -> None:
    consumers, stages = shape.tuning.consumers, shape.tuning.stages
    refills = shape.tuning.loader == "self"
    num_steps = lax.div(work.end - work.begin - warpgroup + (consumers - 1), consumers)
    num_whole = lax.div(work.edge - work.begin - warpgroup + (consumers - 1), consumers)
    num_whole = lax.max(lax.min(num_whole, num_steps), 0)
    plgpu.copy_gmem_to_smem(
        refs.q.at[work.program],
        refs.queries.at[warpgroup, pl.ds(0, shape.stored)],
        refs.arrived.at[warpgroup],
    )

    def block_of(step: Any) -> Any:
        return work.begin + step * consumers + warpgroup

    def slot_of(step: Any) -> Any:
        return warpgroup * stages + lax.rem(step, stages)

    if refills:
        for i in range(stages):

            @pl.when(i < num_steps)
            def _prime(i: int = i) -> None:
                block = block_of(i)
                pages = _pages_of(shape, refs, work, block)
                _load(shape, refs, work, block, warpgroup * stages + i, pages)

    plgpu.barrier_wait(refs.arrived.at[warpgroup])

    def step(i: Any, carry: Any, *, masked: bool) -> Any:
        slot, block = slot_of(i), block_of(i + stages)
        # Issue global loads early, so that they have arrived when needed.
        pages = _pages_of(shape, refs, work, block) if refills else []
        rule = _rule(shape, refs, work, block_of(i), masked=masked)
        plgpu.barrier_wait(refs.filled.at[slot])
        if masked and not shape.widens:
            _clean(shape, refs, work, slot, block_of(i))

        def release() -> None:
            @pl.when(i + stages < num_steps)
            def _release() -> None:
                if refills:
                    _load(shape, refs, work, block, slot, pages)
                else:
                    plgpu.barrier_arrive(refs.emptied.at[slot])

        absorb = functools.partial(_absorb, shape, refs, work, warpgroup, slot, block_of(i), rule)
        return absorb(carry, release, masked=masked)

    by_row = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.full((TILE_ROWS,), NOTHING, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((TILE_ROWS,), jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((TILE_ROWS, shape.width), jnp.float32), plgpu.Layout.WGMMA),
    )
    carry = lax.fori_loop(0, num_whole, functools.partial(step, masked=False), carry)
    carry = lax.fori_loop(num_whole, num_steps, functools.partial(step, masked=True), carry)
    (_place if shape.is_direct else _store)(shape, refs, work, warpgroup, carry)


def _store(shape: Shape, refs: _Refs, work: _Work, warpgroup: Any, carry: Any) -> None:
    top, total, mixed = carry
    parts, heights = refs.results
    safe = jnp.maximum(total, 1e-30)
    mean = mixed / lax.broadcast_in_dim(safe, mixed.shape, [0])
    refs.queries[warpgroup] = mean.astype(shape.dtype)
    plgpu.commit_smem()
    part = work.split * shape.tuning.consumers + warpgroup
    height = jnp.where(total > 0, top + jnp.log(safe) * LOG2E, NOTHING)
    heights[part, work.program] = height  # few bytes: stored directly to global memory
    plgpu.copy_smem_to_gmem(
        refs.queries.at[warpgroup, pl.ds(0, shape.stored)], parts.at[part, work.program]
    )
    plgpu.wait_smem_to_gmem(0)


def _place(shape: Shape, refs: _Refs, work: _Work, warpgroup: Any, carry: Any) -> None:
    """Store the mean at its queries and heads of the output, zero for invalid queries.

    In:  R = 40, group 4, tile 2    Out: its rows 0 to 31 are queries 32 to 39
    """
    _, total, mixed = carry
    group, full = shape.group, TILE_ROWS // shape.group  # queries of a full tile
    mean = mixed / lax.broadcast_in_dim(jnp.maximum(total, 1e-30), mixed.shape, [0])
    row = plgpu.broadcasted_iota(jnp.int32, mean.shape, 0, layout=plgpu.Layout.WGMMA)
    is_valid = row < work.valid * group - work.tile * TILE_ROWS
    refs.mean[warpgroup] = jnp.where(is_valid, mean, 0.0).astype(shape.dtype)
    plgpu.commit_smem()

    def copy(num_queries: int) -> None:
        for i in range(num_queries):
            place = (work.row, work.tile * full + i, pl.ds(work.head * group, group))
            plgpu.copy_smem_to_gmem(
                refs.mean.at[warpgroup, pl.ds(i * group, group)], refs.results[0].at[place]
            )

    if shape.tiles > 1:
        pl.when(work.tile < shape.tiles - 1)(lambda: copy(full))
    last = shape.queries - (shape.tiles - 1) * full
    pl.when(work.tile == shape.tiles - 1)(lambda: copy(last))
    plgpu.wait_smem_to_gmem(0)


def _absorb(
    shape: Shape,
    refs: _Refs,
    work: _Work,
    warpgroup: Any,
    slot: Any,
    block: Any,
    rule: list[Any],
    carry: Any,
    release: Callable[[], None],
    *,
    masked: bool,
) -> Any:
    top, total, mixed = carry
    tokens, width = shape.tuning.block_tokens, shape.width
    stored = refs.ring.at[slot]
    held = refs.wide.at[warpgroup] if shape.widens else stored
    keys, values = held.at[:, pl.ds(0, width)], held.at[:, pl.ds(width, width)]
    if shape.widens:
        # These buffers can be overwritten: all warps finished the product of the last block's keys
        # before they read its values, and finish with those before they have converted these keys.
        keys[...] = widened(stored.at[:, pl.ds(0, width)], shape.dtype)
        plgpu.commit_smem()

    def score(acc: Any) -> Any:
        plgpu.wgmma(acc, refs.queries.at[warpgroup], keys.transpose((1, 0)))
        if shape.widens:  # meanwhile
            written = work.keys - block * tokens
            half = stored.at[:, pl.ds(width, width)]
            values[...] = widened(half, shape.dtype, written=written if masked else None)
        return acc[...]

    scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef((TILE_ROWS, tokens), jnp.float32))
    if shape.widens:
        plgpu.commit_smem()
        release()
    factor = shape.scale * LOG2E
    scores = _mask(shape, block, scores, rule, masked=masked)
    new_top, fade, weights, total = fold_scores(scores, factor, top, total)
    operand = weights.astype(shape.dtype)
    if shape.tuning.weights == "shared":
        refs.weights[warpgroup] = operand
        plgpu.commit_smem()
        operand = refs.weights.at[warpgroup]

    def mix(acc: Any) -> Any:
        plgpu.wgmma(acc, operand, values)
        return acc[...]

    added = pl.run_scoped(mix, plgpu.WGMMAAccumulatorRef((TILE_ROWS, width), jnp.float32))
    if not shape.widens:
        release()
    return new_top, total, mixed * lax.broadcast_in_dim(fade, mixed.shape, [0]) + added


def _clean(shape: Shape, refs: _Refs, work: _Work, slot: Any, block: Any) -> None:
    tokens, width = shape.tuning.block_tokens, shape.width
    written = work.keys - block * tokens

    @pl.when(written < tokens)
    def _ragged() -> None:
        zero_unwritten(refs.ring.at[slot, :, pl.ds(width, width)], written)


def _rule(shape: Shape, refs: _Refs, work: _Work, block: Any, *, masked: bool) -> list[Any]:
    """Load the mask of a block, per query: words of bits, or the lowest visible slot."""
    load: Any = plgpu.load
    if masked:
        edge = block - work.edge
        words = [refs.words.at[work.row, work.tile, edge, w] for w in range(shape.num_words)]
    else:
        words = [refs.lowest.at[work.row, work.tile]] if shape.windowed else []
    return [load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False) for ref in words]


def _mask(shape: Shape, block: Any, scores: Any, rule: list[Any], *, masked: bool) -> Any:
    """Set scores of hidden keys to -inf. `top` stays finite, so no difference is NaN."""
    if not rule:
        return scores
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    spread = [lax.broadcast_in_dim(x, scores.shape, [0]) for x in rule]
    if masked:
        bits = spread[0]
        for w, word in enumerate(spread[1:], start=1):
            bits = jnp.where(column < 32 * w, bits, word)
        seen = (lax.shift_right_logical(bits, column & 31) & 1) != 0
    else:
        seen = column + block * shape.tuning.block_tokens >= spread[0]
    return jnp.where(seen, scores, -jnp.inf)
