"""Paged attention for packed prefill on a TPU (Mosaic TPU), without a tail mask (attention/api.py).

  - A grid step handles one block of packed queries, of any rows. For each row with a query in the
    block it streams the row's prefix from the pool: whole pages by double-buffered DMA, several per
    step, from the first to the last slot that some query of the block sees.
  - This call's K and V are one more stream, packed like the queries. The same array is copied to
    the aliased pool by DMA (HBM to HBM) while the block attends, so query blocks are independent:
    the grid is parallel, and a chip with two cores may split it.
  - A block's queries are split into tiles. Each skips the keys that none of its queries sees, and
    masks only where some query does not see a key; few keys, as at a prompt's diagonal, are
    multiplied at half the width.
  - Products are in the pool's dtype with float32 sums. Softmax is online, in powers of two, and its
    totals stay in lanes until the end. Several heads go through each stage together, because a
    product or a reduction over lanes takes hundreds of cycles until its result is there.

A page may be read while new tokens are written to its other slots, so values outside the range to
read are replaced by zeros before any product. It has not run on a TPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.kv_write.reference import pool_rows
from jspec.pallas_kernels.prefill.api import LINES, ROW, join_spans, plan_packed
from jspec.pallas_kernels.prefill.tuning import LANES, BlockSizes

SMEM_BYTES = 512 * 1024  # scalar memory of one core
VMEM_LIMIT = 48 * 1024 * 1024

# Masked scores are below the lowest running maximum, so their weight is exactly 0.
LOWEST, MASKED = -1e30, -2e30

# Scores are kept in powers of two, which the core has an instruction for.
LOG2_E = math.log2(math.e)
TOGETHER_SCORES = 512 * 1024  # scores that go through the online softmax together

Ref: TypeAlias = Any  # a Pallas reference, or a slice of one
Act: TypeAlias = Callable[[Any], None]  # starts a copy, or waits for it
Carry: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]  # stream, step, half of the buffer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The static sizes of a call."""

    batch: int
    pages_per_row: int
    page_size: int
    num_kv: int
    group: int
    queries: int  # queries of a block
    tile: int  # queries that are masked or skipped together
    keys: int  # keys of a step
    num_blocks: int
    scale: float
    writes: bool
    has_sinks: bool
    interpreted: bool

    @property
    def rows(self) -> int:
        return self.queries * self.group

    @property
    def tile_rows(self) -> int:
        return self.tile * self.group

    @property
    def together(self) -> int:
        """Heads whose products go through the online softmax together."""
        most = max(TOGETHER_SCORES // (self.tile_rows * self.keys), 1)
        return max(n for n in range(1, most + 1) if self.num_kv % n == 0)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths, in keys, at which a tile that sees a step in part is compiled."""
        half = self.keys // 2
        return (half, self.keys) if half % LANES == 0 else (self.keys,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refs:
    """The kernel's arrays. New tokens are stream number `batch`, after the rows' streams."""

    cu: Ref  # i32[B + 1]
    prefix: Ref  # i32[B]
    table: Ref  # i32[B * P]
    tiles: Ref  # i32[4 * tiles * (B + 1)], PackedPlan.spans of each tile
    blocks: Ref  # i32[2 * blocks * (B + 1)], first and last key that some query of a block sees
    q: Ref  # [G, rows, D]
    ranges: Ref  # i32[LINES, rows]
    sinks: Ref  # f32[G rounded up, rows], in powers of two
    new: Ref  # [T rounded up, 2G, D], HBM
    out: Ref  # [G, rows, D]
    pool: Ref  # [NP, S, 2G, D], HBM
    landing: Ref  # [2, keys, 2G, D]
    pairs: Ref  # [2, G, keys, D], K and V of the step
    ceiling: Ref  # f32[tile_rows, keys], MASKED where a tile's row does not see the key
    top: Ref  # f32[G, rows, 128], all lanes equal
    total: Ref  # f32[G, rows, 128], their sum is the total
    mixed: Ref  # f32[G, rows, D]
    landed: Ref  # DMA semaphores [2]
    stored: Ref  # DMA semaphore


def attend_packed(
    q: jax.Array,
    k_new: jax.Array | None,
    v_new: jax.Array | None,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
    sizes: BlockSizes | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Return (out[T, H, D], kv_pages') for q[T, H, Dq] packed by row (attention/api.py). Padding
    queries return zeros. interpret: pallas_call's argument. Raises ValueError."""
    head_bytes = kv_pages.shape[3] * kv_pages.dtype.itemsize
    sizes = sizes or BlockSizes.for_heads(kv_pages.shape[2] // 2, head_bytes)
    _check(q, kv_pages, rows, scale=scale, sizes=sizes)
    num_queries, num_heads, width = q.shape[0], q.shape[1], kv_pages.shape[3]
    num_kv = kv_pages.shape[2] // 2
    batch, pages_per_row = rows.page_table.shape
    group = num_heads // num_kv
    queries = sizes.block_queries(num_queries, group)
    num_blocks = -(-num_queries // queries)
    shape = Shape(
        batch=batch,
        pages_per_row=pages_per_row,
        page_size=kv_pages.shape[1],
        num_kv=num_kv,
        group=group,
        queries=queries,
        tile=sizes.tile_queries(queries, group),
        keys=sizes.block_keys(kv_pages.shape[1]),
        num_blocks=num_blocks,
        scale=scale,
        writes=k_new is not None and v_new is not None,
        has_sinks=sinks is not None,
        interpreted=interpret is not False,
    )
    _check_scalars(rows, shape)
    padded = num_blocks * queries
    plan = plan_packed(
        rows,
        padded,
        block_queries=shape.tile,
        page_size=shape.page_size,
        writes=shape.writes,
        window=window,
    )
    new = jnp.zeros((shape.keys, *kv_pages.shape[2:]), kv_pages.dtype)
    if k_new is not None and v_new is not None:
        new = pool_rows(k_new, v_new, width=width, dtype=kv_pages.dtype)
        new = jnp.pad(new, ((0, -num_queries % shape.keys), (0, 0), (0, 0)))
    out, kv_pages = _pallas_call(shape, q.dtype, kv_pages, interpret)(
        rows.cu_q_lens,
        rows.prefix_lens,
        rows.page_table.reshape(-1),
        plan.spans.reshape(-1),
        join_spans(plan.spans, queries // shape.tile).reshape(-1),
        _pack(q.astype(kv_pages.dtype), padded=padded, num_kv=num_kv, width=width),
        jnp.repeat(plan.ranges, group, axis=1),
        _sink_rows(sinks, shape),
        new,
        kv_pages,
    )
    out = out.reshape(num_kv, padded, group, width)[:, :num_queries].transpose(1, 0, 2, 3)
    valid = plan.ranges[ROW, :num_queries] < batch
    return jnp.where(valid[:, None, None], out.reshape(num_queries, num_heads, width), 0), kv_pages


def _check(
    q: jax.Array, kv_pages: jax.Array, rows: AttentionMetadata, *, scale: float, sizes: BlockSizes
) -> None:
    _, page_size, two_g, width = kv_pages.shape
    if rows.tail_mask is not None:
        raise ValueError("a tail mask needs rows of equal length; expected tail_mask None")
    if q.shape[1] % (two_g // 2):
        raise ValueError(
            f"{q.shape[1]} query heads over {two_g // 2} kv heads; expected a multiple"
        )
    if width % LANES or q.shape[2] > width:
        raise ValueError(
            f"q is {q.shape[2]} wide, the pool {width}; expected a multiple of {LANES} and "
            f"q at most that: narrower heads are padded in a pool of {LANES}"
        )
    if kv_pages.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the pool holds {kv_pages.dtype}; expected bfloat16 or float32")
    if scale <= 0:
        raise ValueError(f"scale is {scale}; expected more than 0")
    if sizes.rows % LANES or sizes.keys % LANES:
        raise ValueError(f"{sizes}; expected multiples of {LANES}")
    if page_size % LANES and sizes.keys % page_size:
        raise ValueError(f"pages of {page_size}; expected a divisor or a multiple of {LANES}")


def _check_scalars(rows: AttentionMetadata, shape: Shape) -> None:
    batch, num_blocks, table = shape.batch, shape.num_blocks, rows.page_table.shape
    spans = num_blocks * (4 * (shape.queries // shape.tile) + 2) * (batch + 1)
    held = 4 * (rows.page_table.size + spans + 2 * batch + 1)
    if held > SMEM_BYTES:
        raise ValueError(
            f"a page table of {table} and {num_blocks} blocks of queries take {held} bytes of "
            f"scalar memory; expected at most {SMEM_BYTES}: larger pages, or fewer rows a prefill"
        )


def _pack(q: jax.Array, *, padded: int, num_kv: int, width: int) -> jax.Array:
    q = jnp.pad(q, ((0, padded - q.shape[0]), (0, 0), (0, width - q.shape[2])))
    q = q.reshape(padded, num_kv, -1, width).transpose(1, 0, 2, 3)
    return q.reshape(num_kv, -1, width)


def _sink_rows(sinks: jax.Array | None, shape: Shape) -> jax.Array:
    """Return f32[G rounded up to 8, rows]: the initial score of each row's softmax."""
    lines = -(-shape.num_kv // 8) * 8
    if sinks is None:
        return jnp.full((lines, shape.rows), LOWEST, jnp.float32)
    by_head = (sinks.astype(jnp.float32) * LOG2_E).reshape(shape.num_kv, shape.group)
    return jnp.pad(jnp.tile(by_head, (1, shape.queries)), ((0, lines - shape.num_kv), (0, 0)))


def _pallas_call(
    shape: Shape, dtype: jnp.dtype, pool: jax.Array, interpret: Any
) -> Callable[..., Any]:
    two_g, width = pool.shape[2:]
    rows, num_kv = shape.rows, shape.num_kv
    by_block = pl.BlockSpec((num_kv, rows, width), lambda i, *_: (0, i, 0))
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=5,
        grid=(shape.num_blocks,),
        in_specs=[
            by_block,
            pl.BlockSpec((LINES, rows), lambda i, *_: (0, i)),
            pl.BlockSpec((-(-num_kv // 8) * 8, rows), lambda *_: (0, 0)),
            in_place,
            in_place,
        ],
        out_specs=[by_block, in_place],
        scratch_shapes=[
            pltpu.VMEM((2, shape.keys, two_g, width), pool.dtype),
            pltpu.VMEM((2, num_kv, shape.keys, width), pool.dtype),
            pltpu.VMEM((shape.tile_rows, shape.keys), jnp.float32),
            pltpu.VMEM((num_kv, rows, LANES), jnp.float32),
            pltpu.VMEM((num_kv, rows, LANES), jnp.float32),
            pltpu.VMEM((num_kv, rows, width), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA,
        ],
    )
    packed = (num_kv, shape.num_blocks * rows, width)
    return pl.pallas_call(
        functools.partial(_kernel, shape),
        grid_spec=spec,
        out_shape=[
            jax.ShapeDtypeStruct(packed, dtype),
            pltpu.HBM(pool.shape, pool.dtype),  # or XLA would copy a small pool to VMEM
        ],
        input_output_aliases={9: 1},  # the pool; indices include the five scalar arrays
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="paged_prefill",
        interpret=interpret,
    )


def _kernel(shape: Shape, *args: Ref) -> None:
    inputs, outputs, scratch = args[:9], args[10:12], args[12:]  # 9 is the pool, aliased to 11
    names = [field.name for field in dataclasses.fields(_Refs)]
    refs = _Refs(**dict(zip(names, (*inputs, *outputs, *scratch), strict=True)))

    def next_stream(stream: jax.Array) -> jax.Array:
        """Return the first stream from `stream` on that this block needs, B + 1 if none."""
        return lax.while_loop(
            lambda s: (s <= shape.batch) & (_num_steps(shape, refs, s) == 0),
            lambda s: s + 1,
            stream,
        )

    def body(carry: Carry) -> Carry:
        stream, step, half = carry
        ended = step + 1 >= _num_steps(shape, refs, stream)
        coming = next_stream(jnp.where(ended, stream + 1, stream))
        coming_step = jnp.where(ended, 0, step + 1)

        @pl.when(coming <= shape.batch)
        def _prefetch() -> None:
            _each_copy_in(shape, refs, coming, coming_step, 1 - half, _start)

        _each_copy_in(shape, refs, stream, step, half, _wait)
        _split(shape, refs, stream, step, half)
        _absorb_step(shape, refs, stream, step)
        return coming, coming_step, 1 - half

    zero = jnp.int32(0)
    first = next_stream(zero)

    @pl.when(first <= shape.batch)
    def _first_copies() -> None:
        _each_copy_in(shape, refs, first, zero, zero, _start)

    _each_copy_out(shape, refs, _start)
    _begin(shape, refs)
    lax.while_loop(lambda carry: carry[0] <= shape.batch, body, (first, zero, zero))
    _finish(shape, refs)
    _each_copy_out(shape, refs, _wait)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _span(shape: Shape, refs: _Refs, stream: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first and last key that some query of the block sees."""
    streams = shape.batch + 1
    at = pl.program_id(0) * streams + jnp.minimum(stream, shape.batch)
    return refs.blocks[at], refs.blocks[shape.num_blocks * streams + at]


def _tile_span(
    shape: Shape, refs: _Refs, tile: jax.Array, stream: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the first and last key that some query of a tile sees, then that every one does."""
    per_block, streams = shape.queries // shape.tile, shape.batch + 1
    at = (pl.program_id(0) * per_block + tile) * streams + stream
    size = shape.num_blocks * per_block * streams
    return tuple(refs.tiles[at + line * size] for line in range(4))


def _origin(shape: Shape, stream: jax.Array, first: jax.Array) -> jax.Array:
    """Return the start of a stream: a whole page, or a whole block of new tokens."""
    page, block = lax.div(first, shape.page_size), lax.div(first, shape.keys)
    return jnp.where(stream == shape.batch, block * shape.keys, page * shape.page_size)


def _num_steps(shape: Shape, refs: _Refs, stream: jax.Array) -> jax.Array:
    first, last = _span(shape, refs, stream)
    keys = last - _origin(shape, stream, first)
    return jnp.where(last > first, lax.div(keys + shape.keys - 1, shape.keys), 0)


def _each_copy_in(
    shape: Shape, refs: _Refs, stream: jax.Array, step: jax.Array, half: jax.Array, act: Act
) -> None:
    first, last = _span(shape, refs, stream)
    origin = _origin(shape, stream, first) + step * shape.keys
    size = shape.page_size

    @pl.when(stream == shape.batch)
    def _new_tokens() -> None:
        source = refs.new.at[pl.ds(pl.multiple_of(origin, shape.keys), shape.keys)]
        act(pltpu.make_async_copy(source, refs.landing.at[half], refs.landed.at[half]))

    @pl.when(stream < shape.batch)
    def _pages() -> None:
        page = lax.div(origin, size)
        stop = jnp.minimum(page + shape.keys // size, lax.div(last + size - 1, size))

        def one(p: jax.Array, carry: jax.Array) -> jax.Array:
            target = refs.landing.at[half, pl.ds((p - page) * size, size)]
            source = refs.pool.at[refs.table[stream * shape.pages_per_row + p]]
            act(pltpu.make_async_copy(source, target, refs.landed.at[half]))
            return carry

        lax.fori_loop(page, stop, one, jnp.int32(0))


def _each_copy_out(shape: Shape, refs: _Refs, act: Act) -> None:
    """Start or await the copies of this block's new tokens to their slots, page by page, in pieces
    of 2^i slots: DMA sizes are static."""
    if not shape.writes:
        return
    size = shape.page_size
    pieces = [1 << bit for bit in reversed(range(size.bit_length()))]
    begin = pl.program_id(0) * shape.queries

    def of_row(row: jax.Array, carry: jax.Array) -> jax.Array:
        shift = refs.prefix[row] - refs.cu[row]
        end = jnp.minimum(refs.cu[row + 1], begin + shape.queries)
        end = jnp.minimum(end, shape.pages_per_row * size - shift)

        def of_page(token: jax.Array) -> jax.Array:
            slot = token + shift
            page = refs.table[row * shape.pages_per_row + lax.div(slot, size)]
            offset = lax.rem(slot, size)
            count = jnp.minimum(size - offset, end - token)
            for piece in pieces:
                done = count & ~(2 * piece - 1)

                @pl.when((count & piece) != 0)
                def _copy(piece: int = piece, done: jax.Array = done) -> None:
                    source = refs.new.at[pl.ds(token + done, piece)]
                    target = refs.pool.at[page, pl.ds(offset + done, piece)]
                    act(pltpu.make_async_copy(source, target, refs.stored))

            return token + count

        lax.while_loop(lambda t: t < end, of_page, jnp.maximum(refs.cu[row], begin))
        return carry

    lax.fori_loop(0, shape.batch, of_row, jnp.int32(0))


def _begin(shape: Shape, refs: _Refs) -> None:
    """Start every softmax at its sink, whose weight is in one lane of the totals; without sinks at
    a score so low that the first real key cancels it."""
    if shape.has_sinks:
        sinks = refs.sinks[...].T
        for head in range(shape.num_kv):
            refs.top[head] = jnp.broadcast_to(sinks[:, head : head + 1], (shape.rows, LANES))
    else:
        refs.top[...] = jnp.full_like(refs.top, LOWEST)
    first_lane = lax.broadcasted_iota(jnp.int32, refs.total.shape, 2) == 0
    refs.total[...] = jnp.where(first_lane, 1.0, 0.0)
    refs.mixed[...] = jnp.zeros_like(refs.mixed)


def _split(shape: Shape, refs: _Refs, stream: jax.Array, step: jax.Array, half: jax.Array) -> None:
    """Split the landed keys into K and V of each head, with zeros outside of the range to read: a
    weight of 0 would not hide the NaN of unwritten slots."""
    first, last = _span(shape, refs, stream)
    origin = _origin(shape, stream, first) + step * shape.keys

    def split(whole: bool) -> None:
        key = origin + lax.broadcasted_iota(jnp.int32, (shape.keys, refs.landing.shape[3]), 0)
        inside = (key >= first) & (key < last)
        for head in range(shape.num_kv):
            for n, landed in enumerate(_key_and_value(shape, refs, half, head)):
                kept = landed if whole else jnp.where(inside, landed, 0.0)
                refs.pairs[n, head] = kept.astype(refs.pairs.dtype)

    whole = (first <= origin) & (origin + shape.keys <= last)
    pl.when(whole)(functools.partial(split, whole=True))
    pl.when(jnp.logical_not(whole))(functools.partial(split, whole=False))


def _key_and_value(
    shape: Shape, refs: _Refs, half: jax.Array, head: int
) -> tuple[jax.Array, jax.Array]:
    """Return f32[keys, D] of K and of V of one head from the landed pairs of all heads. A bfloat16
    pair is one 32-bit word, K low, of which one strided load takes every G-th line."""
    num_kv, packed = shape.num_kv, refs.landing.dtype == jnp.bfloat16
    if shape.interpreted or refs.landing.shape[3] != LANES:
        landed = refs.landing[half]
        words = pltpu.bitcast(landed, jnp.uint32)[:, head] if packed else landed[:, 2 * head]
        second = words if packed else landed[:, 2 * head + 1]
    else:
        flat = refs.landing.at[half].reshape(shape.keys * 2 * num_kv, refs.landing.shape[3])
        if packed:
            words = second = flat.bitcast(jnp.uint32)[pl.ds(head, shape.keys, num_kv), :]
        else:
            words = flat[pl.ds(2 * head, shape.keys, 2 * num_kv), :]
            second = flat[pl.ds(2 * head + 1, shape.keys, 2 * num_kv), :]
    if not packed:
        return words, second
    k = pltpu.bitcast(words << 16, jnp.float32)
    return k, pltpu.bitcast(words & jnp.uint32(0xFFFF0000), jnp.float32)


def _absorb_step(shape: Shape, refs: _Refs, stream: jax.Array, step: jax.Array) -> None:
    """Add the step's keys to every tile that sees some of them."""
    origin = _origin(shape, stream, _span(shape, refs, stream)[0]) + step * shape.keys
    end = origin + shape.keys

    def absorb_masked(start: jax.Array, keys: int) -> None:
        _mask(shape, refs, start, stream, origin, keys)
        absorb_tile(shape, refs, start, keys, masked=True)

    def one(tile: jax.Array, carry: jax.Array) -> jax.Array:
        first, last, every_first, every_last = _tile_span(shape, refs, tile, stream)
        sees = (first < end) & (last > origin) & (first < last)
        whole = (every_first <= origin) & (end <= every_last)
        start = tile * shape.tile_rows
        pl.when(sees & whole)(
            functools.partial(absorb_tile, shape, refs, start, shape.keys, masked=False)
        )
        least = 0
        for keys in shape.widths:
            fits = sees & jnp.logical_not(whole) & (last - origin > least)
            if keys < shape.keys:
                fits = fits & (last - origin <= keys)
            pl.when(fits)(functools.partial(absorb_masked, start, keys))
            least = keys
        return carry

    lax.fori_loop(0, shape.queries // shape.tile, one, jnp.int32(0))


def _mask(
    shape: Shape, refs: _Refs, start: jax.Array, stream: jax.Array, origin: jax.Array, keys: int
) -> None:
    """Set the upper bound of a tile's scores: very high where a row sees the key, else MASKED."""
    at, is_new = _rows_at(shape, start), stream == shape.batch
    new_first, new_last, pool_first, pool_last, row = (
        refs.ranges[n : n + 1, at] for n in range(ROW + 1)
    )
    first = _column(jnp.where(is_new, new_first, pool_first))
    last = _column(jnp.where(is_new, new_last, jnp.where(row == stream, pool_last, 0)))
    first, last = (jnp.broadcast_to(x, (shape.tile_rows, LANES)) for x in (first, last))
    for lane in range(0, keys, LANES):
        key = origin + lane + lax.broadcasted_iota(jnp.int32, first.shape, 1)
        seen = (key >= first) & (key < last)
        refs.ceiling[:, lane : lane + LANES] = jnp.where(seen, -MASKED, MASKED)


def _column(line: jax.Array) -> jax.Array:
    """Transpose [1, n] to [n, 1]."""
    return jnp.broadcast_to(line, (8, line.shape[1])).T[:, :1]


def _rows_at(shape: Shape, start: jax.Array) -> Any:
    return pl.ds(pl.multiple_of(start, LANES), shape.tile_rows)


def absorb_tile(shape: Shape, refs: _Refs, start: jax.Array, keys: int, *, masked: bool) -> None:
    """Add the step's first `keys` keys to the online softmax of a tile, for all heads."""
    absorb = functools.partial(_absorb_heads, shape, refs, start, keys=keys, masked=masked)
    if shape.together == shape.num_kv:
        absorb(0)
    else:  # a loop, because a program of all heads takes minutes to compile
        groups = shape.num_kv // shape.together
        lax.fori_loop(0, groups, lambda n, _: absorb(n * shape.together), None)


def _absorb_heads(
    shape: Shape, refs: _Refs, start: jax.Array, low: jax.Array | int, *, keys: int, masked: bool
) -> None:
    dtype = refs.pairs.dtype
    dot = functools.partial(
        lax.dot_general,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    ats = [(low + n, _rows_at(shape, start)) for n in range(shape.together)]
    scores = [dot(refs.q[at], refs.pairs[0, at[0], :keys], (((1,), (1,)), ((), ()))) for at in ats]
    weights, fades = [], []
    for at, score in zip(ats, scores, strict=True):
        score = score * (shape.scale * LOG2_E)
        if masked:
            score = jnp.minimum(score, refs.ceiling[:, :keys])
        pieces = [score[:, lane : lane + LANES] for lane in range(0, keys, LANES)]
        most = jnp.max(functools.reduce(jnp.maximum, pieces), axis=1, keepdims=True)
        top = jnp.maximum(refs.top[at], most)
        fade = jnp.exp2(refs.top[at] - top)
        parts = [jnp.exp2(piece - top) for piece in pieces]
        refs.top[at] = top
        refs.total[at] = refs.total[at] * fade + functools.reduce(jnp.add, parts)
        weights.append(jnp.concatenate([part.astype(dtype) for part in parts], axis=1))
        fades.append(fade)
    mixed = [
        dot(weight, refs.pairs[1, at[0], :keys], (((1,), (0,)), ((), ())))
        for weight, at in zip(weights, ats, strict=True)
    ]
    for at, fade, mix in zip(ats, fades, mixed, strict=True):
        refs.mixed[at] = refs.mixed[at] * _across(fade, mix.shape[1]) + mix


def _finish(shape: Shape, refs: _Refs) -> None:
    for head in range(shape.num_kv):
        total = jnp.maximum(jnp.sum(refs.total[head], axis=1, keepdims=True), 1e-30)
        refs.out[head] = (refs.mixed[head] / total).astype(refs.out.dtype)


def _across(x: jax.Array, width: int) -> jax.Array:
    return jnp.concatenate([x] * (width // LANES), axis=1)
