"""The Mosaic kernel of TPU attention for rows of equal length: one program on one core.

A grid step handles a few rows. A producer copies pages with visible keys from HBM into a ring of
buffers, NUM_BUFFERS - 1 blocks ahead and across rows, and one row of the page table at a time into
SMEM. New tokens are copied from HBM to HBM in runs of powers of two within a page, and also stored
into the block in VMEM, so no read waits for a write. Blocks that all queries see need no mask;
others are compiled at several widths, so that a few keys cost little.

In:  R = 2, group = 3
Out: packed rows 0 1 2 | 3 4 5 are queries 0 0 0 | 1 1 1; padded to 8 rows, which see nothing
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
NUM_BUFFERS = 4
# Computed, not measured: a block is at least what HBM delivers during one DMA's latency.
BLOCK_BYTES, MAX_BLOCK_BYTES = 1024 * 1024, 2 * 1024 * 1024
MIN_BLOCK_KEYS, MAX_BLOCK_KEYS = 256, 2048
MAX_SCORES = 128 * 1024
MAX_UNROLLED_COPIES = 32
TOGETHER_SCORES = 128 * 1024  # scores of the heads whose products overlap
ROWS_BYTES, MAX_ROWS_PER_STEP = 2 * 1024 * 1024, 8
# Running maxima start at LOW; hidden keys score UNSEEN, so their weight is exactly 0 even in a row
# that has seen nothing.
LOW, UNSEEN = -1e30, -3e38
# Scores are kept in powers of two, which the core has an instruction for.
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsPlan:
    batch: int
    queries: int  # R
    group: int
    page_size: int
    two_g: int
    width: int  # the pool's D
    pages_per_row: int
    tail: int  # W, 0 without a tail mask
    dtype: Any  # of the pool
    writes: bool
    scale: float
    window: int | None
    interpret: bool

    @property
    def packed(self) -> int:
        """M of one kv head's products: R * group, rounded up to whole sublanes."""
        return -(-self.queries * self.group // 8) * 8

    @property
    def num_words(self) -> int:
        return -(-self.tail // 32)

    @property
    def has_query_info(self) -> bool:
        return self.tail > 0 or self.window is not None

    @property
    def block_pages(self) -> int:
        """Pages of one buffer: a power of two of keys, at least a vector of lanes."""
        key_bytes = self.two_g * max(self.width, LANES) * self.dtype.itemsize
        keys = min(MIN_BLOCK_KEYS, MAX_BLOCK_BYTES // key_bytes)
        keys = min(max(keys, BLOCK_BYTES // key_bytes), MAX_BLOCK_KEYS)
        keys = min(keys, MAX_SCORES // self.packed, self.pages_per_row * self.page_size)
        if self.window is not None:  # the last keys, which a window sees, begin anywhere in a block
            keys = min(keys, max(2 * self.window, MIN_BLOCK_KEYS))
        keys = max(1 << keys.bit_length() - 1, LANES)
        return max(keys // self.page_size, 1)

    @property
    def block_keys(self) -> int:
        return self.block_pages * self.page_size

    @property
    def masked_widths(self) -> tuple[int, ...]:
        """Widths, in keys, at which a partly visible block is compiled."""
        keys = self.block_keys
        shares = (8, 2, 1) if self.packed <= LANES else (1,)  # wide trees take long to compile
        return tuple(sorted({min(max(keys // share, LANES), keys) for share in shares}))

    @property
    def heads_together(self) -> int:
        """Heads whose products overlap: their scores fit roughly into the registers."""
        return max(TOGETHER_SCORES // (self.packed * self.block_keys), 1)

    @property
    def num_splits(self) -> int:
        """Parts of the batch, one per core on chips with two cores."""
        return 2 if self.batch % 2 == 0 else 1

    @property
    def rows_per_step(self) -> int:
        row_bytes = self.two_g * max(self.width, LANES) * (self.packed + self.queries) * 4
        share = self.batch // self.num_splits
        most = min(max(ROWS_BYTES // row_bytes, 1), MAX_ROWS_PER_STEP)
        return max(n for n in range(1, most + 1) if share % n == 0)

    @property
    def vmem_bytes(self) -> int:
        """The VMEM limit: twice the buffers, for the products' temporaries, plus a margin."""
        width = max(self.width, LANES)
        buffers = NUM_BUFFERS * self.block_keys * self.two_g * width * self.dtype.itemsize
        partial = self.two_g // 2 * self.packed * (2 * LANES + width) * 4
        windows = 2 * self.rows_per_step * self.two_g * (self.packed + self.queries) * width * 4
        return max(2 * (buffers + partial + windows) + (8 << 20), 16 << 20)

    @property
    def has_strided_heads(self) -> bool:
        """True if a head's K and V can be loaded as every G-th row of 32-bit words."""
        # The interpreter supports no such view; the compiler needs whole tiles and 128 lanes.
        sublanes = self.two_g * self.dtype.itemsize // 4
        whole = sublanes in {1, 2, 4} or sublanes % 8 == 0
        return whole and self.width <= LANES and not self.interpret


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsMemory:
    """The kernel's memory; `row` indexes the batch, `i` the N rows of a grid step."""

    prefix_lens: Any  # SMEM i32[B]
    limits: Any  # SMEM i32[B], keys of the row, including this call's
    firsts: Any  # SMEM i32[B], first key that some query may see
    q: Any  # VMEM [N, G, packed, D]
    table: Any  # HBM i32[B, 1, P]
    pages: Any  # HBM [NP, S, 2G, D], where pages are read
    out: Any  # VMEM [N, G, packed, D]
    buffers: Any  # VMEM [NUM_BUFFERS, block_keys, 2G, D]
    table_ring: Any  # SMEM i32[2, 1, P]
    state: Any  # SMEM i32[4], see the constants below
    top: Any  # VMEM f32[G, packed, LANES]
    total: Any  # VMEM f32[G, packed, LANES]
    mixed: Any  # VMEM f32[G, packed, D]
    page_sems: Any  # DMA[NUM_BUFFERS]
    table_sem: Any  # DMA
    write_sem: Any  # DMA
    tail_positions: Any = None  # SMEM i32[B, W]
    query_info: Any = None  # VMEM i32[N, R up to 8s, words + 1]: mask words, position
    packed_info: Any = None  # VMEM i32[packed, words + 1]: of each packed row's query
    sinks: Any = None  # VMEM f32[G, packed, 1]
    new: Any = None  # VMEM [N, R, 2G, D]
    new_source: Any = None  # HBM [B, R, 2G, D]
    pages_out: Any = None  # HBM, the pool again, where new tokens are written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The mask of a block's first `keys` keys."""

    seen: Any  # bool[packed, keys]
    held: Any  # bool[keys, D]
    keys: int


# Indices of RowsMemory.state: the producer's next (row, block), and the numbers of blocks produced
# and consumed.
ROW, BLOCK, PRODUCED, CONSUMED = range(4)


def attend_kernel(plan: RowsPlan, order: list[str], *memory: Any) -> None:
    refs = RowsMemory(**dict(zip(order, memory, strict=True)))
    share = plan.batch // plan.num_splits
    first_row = pl.program_id(0) * share
    last_row = first_row + share  # one past this core's rows

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        refs.state[ROW] = first_row
        refs.state[PRODUCED] = refs.state[CONSUMED] = 0
        _copy_table(refs, first_row).start()
        _enter_row(plan, refs, first_row, last_row)
        _skip_finished_rows(plan, refs, last_row)

        def start(_: jax.Array, carry: None) -> None:
            _produce(plan, refs, last_row)
            return carry

        lax.fori_loop(0, NUM_BUFFERS - 1, start, None)

    def consume(i: jax.Array, carry: None) -> None:
        row = first_row + pl.program_id(1) * plan.rows_per_step + i
        _attend_row(plan, refs, i, row, last_row)
        return carry

    lax.fori_loop(0, plan.rows_per_step, consume, None)


# The producer: page tables, new tokens and pages, all by DMA.


def _blocks_of(plan: RowsPlan, refs: RowsMemory, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (
        lax.div(refs.firsts[row], plan.block_keys),
        lax.div(refs.limits[row] + plan.block_keys - 1, plan.block_keys),
    )


def _pages_of(
    plan: RowsPlan, refs: RowsMemory, row: jax.Array, block: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the row's pages [first, last) to copy for a block: those with earlier tokens."""
    held = jnp.minimum(refs.prefix_lens[row], refs.limits[row]) if plan.writes else refs.limits[row]
    last = lax.div(held + plan.page_size - 1, plan.page_size)
    start = block * plan.block_pages
    first = jnp.maximum(lax.div(refs.firsts[row], plan.page_size), start)
    return first, jnp.minimum(last, start + plan.block_pages)


def _copy_table(refs: RowsMemory, row: jax.Array) -> Any:
    return pltpu.make_async_copy(
        refs.table.at[row], refs.table_ring.at[lax.rem(row, 2)], refs.table_sem
    )


def _copy_page(
    plan: RowsPlan, refs: RowsMemory, page: jax.Array, buffer: jax.Array, place: Any
) -> Any:
    target = refs.buffers.at[buffer, pl.ds(place * plan.page_size, plan.page_size)]
    return pltpu.make_async_copy(refs.pages.at[page], target, refs.page_sems.at[buffer])


def _enter_row(plan: RowsPlan, refs: RowsMemory, row: jax.Array, last_row: jax.Array) -> None:
    _copy_table(refs, row).wait()

    @pl.when(row + 1 < last_row)
    def _() -> None:
        _copy_table(refs, row + 1).start()

    refs.state[BLOCK] = _blocks_of(plan, refs, row)[0]
    if plan.writes:
        _start_writes(plan, refs, row)


def _skip_finished_rows(plan: RowsPlan, refs: RowsMemory, last_row: jax.Array) -> None:
    def is_finished(row: jax.Array) -> jax.Array:
        # Clamp the index: last_row may be past the end of the arrays.
        there = jnp.minimum(row, last_row - 1)
        return (row < last_row) & (refs.state[BLOCK] >= _blocks_of(plan, refs, there)[1])

    def advance(row: jax.Array) -> jax.Array:
        pl.when(row + 1 < last_row)(lambda: _enter_row(plan, refs, row + 1, last_row))
        return row + 1

    refs.state[ROW] = lax.while_loop(is_finished, advance, refs.state[ROW])


def _produce(plan: RowsPlan, refs: RowsMemory, last_row: jax.Array) -> None:
    row, block = refs.state[ROW], refs.state[BLOCK]

    @pl.when(row < last_row)
    def _() -> None:
        buffer = lax.rem(refs.state[PRODUCED], NUM_BUFFERS)
        first, last = _pages_of(plan, refs, row, block)
        start = block * plan.block_pages

        def copy_some(low: Any, count: int) -> None:
            places = [low + n for n in range(count)]
            slots = [start + place for place in places]
            pages = [refs.table_ring[lax.rem(row, 2), 0, slot] for slot in slots]
            for place, page in zip(places, pages, strict=True):
                _copy_page(plan, refs, page, buffer, place).start()

        whole = last - first == plan.block_pages

        @pl.when(whole)
        def _() -> None:
            count = min(plan.block_pages, MAX_UNROLLED_COPIES)
            turns = plan.block_pages // count
            lax.fori_loop(0, turns, lambda n, _: copy_some(count * n, count), None)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            low, count = first - start, last - first
            fours = lax.shift_right_logical(jnp.maximum(count, 0), 2)
            lax.fori_loop(0, fours, lambda n, _: copy_some(low + 4 * n, 4), None)
            lax.fori_loop(low + 4 * fours, low + count, lambda n, _: copy_some(n, 1), None)

        refs.state[PRODUCED] += 1
        refs.state[BLOCK] = block + 1
        _skip_finished_rows(plan, refs, last_row)


def _await_block(
    plan: RowsPlan, refs: RowsMemory, row: jax.Array, block: jax.Array, buffer: Any
) -> None:
    """Wait for a block. DMA semaphores count bytes, so one wait covers a whole block."""
    first, last = _pages_of(plan, refs, row, block)
    whole = last - first == plan.block_pages
    all_keys = refs.buffers.at[buffer]

    @pl.when(whole)
    def _() -> None:
        pltpu.make_async_copy(all_keys, all_keys, refs.page_sems.at[buffer]).wait()

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        def wait(_: jax.Array, count: int) -> None:
            some = refs.buffers.at[buffer, pl.ds(0, count * plan.page_size)]
            pltpu.make_async_copy(some, some, refs.page_sems.at[buffer]).wait()

        _runs(plan.block_pages - 1, jnp.maximum(last - first, 0), wait)


def _runs(most: int, count: jax.Array, act: Any) -> None:
    """Call act(offset, size) for each power of two in `count`: 5 -> (0, 4), (4, 1)."""
    for bit in reversed(range(most.bit_length())):
        size = 1 << bit
        offset = count & ~(2 * size - 1)
        pl.when((count & size) != 0)(functools.partial(act, offset, size))


def _start_writes(plan: RowsPlan, refs: RowsMemory, row: jax.Array) -> None:
    """Copy the row's new K and V to their pages; nothing is written past the page table."""
    prefix, size = refs.prefix_lens[row], plan.page_size

    def write(index: jax.Array, carry: None) -> None:
        page = refs.table_ring[lax.rem(row, 2), 0, index]
        start = jnp.maximum(prefix, index * size)
        end = jnp.minimum(refs.limits[row], index * size + size)

        def act(offset: jax.Array, count: int) -> None:
            source = refs.new_source.at[row, pl.ds(start - prefix + offset, count)]
            slot = start - index * size + offset
            target = refs.pages_out.at[page, pl.ds(slot, count)]
            pltpu.make_async_copy(source, target, refs.write_sem).start()

        _runs(min(plan.queries, size), end - start, act)
        return carry

    last = lax.div(refs.limits[row] + size - 1, size)
    lax.fori_loop(lax.div(prefix, size), last, write, None)


def _await_writes(plan: RowsPlan, refs: RowsMemory, row: jax.Array) -> None:
    def act(_: jax.Array, count: int) -> None:
        rows = refs.new_source.at[0, pl.ds(0, count)]
        pltpu.make_async_copy(rows, rows, refs.write_sem).wait()

    _runs(plan.queries, jnp.maximum(refs.limits[row] - refs.prefix_lens[row], 0), act)


# The consumer: one row's online softmax over its blocks.


def _attend_row(
    plan: RowsPlan, refs: RowsMemory, i: jax.Array, row: jax.Array, last_row: Any
) -> None:
    heads = plan.two_g // 2
    if refs.sinks is None:
        refs.top[...] = jnp.full_like(refs.top, LOW)
        refs.total[...] = jnp.zeros_like(refs.total)
    else:  # a sink is a key without a value
        sink = jnp.broadcast_to(refs.sinks[...] * LOG2_E, refs.top.shape)
        refs.top[...] = jnp.maximum(sink, LOW)
        first_lane = lax.broadcasted_iota(jnp.int32, sink.shape, 2) == 0
        refs.total[...] = jnp.where(first_lane, jnp.exp2(sink - jnp.maximum(sink, LOW)), 0.0)
    refs.mixed[...] = jnp.zeros_like(refs.mixed)
    if plan.has_query_info:
        for j in range(plan.queries):
            info = refs.query_info[i, j : j + 1]
            of_query = pl.ds(j * plan.group, plan.group)
            refs.packed_info[of_query] = jnp.broadcast_to(info, (plan.group, info.shape[1]))
    # Keys before this slot are in the pool and visible to every query of the row.
    prefix = refs.prefix_lens[row]
    seen_by_all = jnp.minimum(jnp.minimum(prefix, refs.limits[row]), _tail_start(plan, prefix))

    def absorb(block: jax.Array, carry: None) -> None:
        buffer = lax.rem(refs.state[CONSUMED], NUM_BUFFERS)
        refs.state[CONSUMED] += 1
        _await_block(plan, refs, row, block, buffer)
        _produce(plan, refs, last_row)
        end = (block + 1) * plan.block_keys
        whole = end <= seen_by_all if plan.window is None else jnp.bool_(False)

        @pl.when(whole)
        def _() -> None:
            absorb_block(plan, refs, i, buffer, None)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            if plan.writes:
                _lay_new_rows(plan, refs, i, row, block, buffer)
            _absorb_masked(plan, refs, i, row, block, buffer)

        return carry

    lax.fori_loop(*_blocks_of(plan, refs, row), absorb, None)
    for head in range(heads):
        total = jnp.sum(refs.total[head], axis=1, keepdims=True)
        total = jnp.maximum(total, 1e-30)
        refs.out[i, head] = (refs.mixed[head] / total).astype(refs.out.dtype)
    if plan.writes:
        _await_writes(plan, refs, row)


def _tail_start(plan: RowsPlan, prefix: jax.Array) -> jax.Array:
    return prefix + (plan.queries - plan.tail if plan.tail else 1)


def _lay_new_rows(
    plan: RowsPlan,
    refs: RowsMemory,
    i: jax.Array,
    row: jax.Array,
    block: jax.Array,
    buffer: jax.Array,
) -> None:
    prefix, start = refs.prefix_lens[row], block * plan.block_keys

    def lay(j: jax.Array, carry: None) -> None:
        refs.buffers[buffer, prefix + j - start] = refs.new[i, j]
        return carry

    end = jnp.minimum(start + plan.block_keys, refs.limits[row])
    lax.fori_loop(jnp.maximum(start - prefix, 0), end - prefix, lay, None)


def _absorb_masked(
    plan: RowsPlan, refs: RowsMemory, i: jax.Array, row: jax.Array, block: jax.Array, buffer: Any
) -> None:
    """Absorb a partly visible block at the least width with all of its keys."""
    num_keys = refs.limits[row] - block * plan.block_keys
    least = 0
    for keys in plan.masked_widths:
        fits = num_keys > least
        if keys < plan.block_keys:
            fits = fits & (num_keys <= keys)

        @pl.when(fits)
        def _(keys: int = keys) -> None:
            seen = _seen(plan, refs, row, block, keys)
            held = _held(plan, refs, row, block, keys)
            absorb_block(plan, refs, i, buffer, Mask(seen=seen, held=held, keys=keys))

        least = keys


def _seen(
    plan: RowsPlan, refs: RowsMemory, row: jax.Array, block: jax.Array, keys: int
) -> jax.Array:
    """Return the mask bool[packed, keys] of a block's first keys; see api.py for the rules."""
    first_slot, prefix = block * plan.block_keys, refs.prefix_lens[row]
    slot = first_slot + lax.broadcasted_iota(jnp.int32, (1, keys), 1)
    limit, start = refs.limits[row], _tail_start(plan, prefix)
    if plan.tail:
        tail_idx = slot - start
        # Values that depend on the key alone: its bit in each word, and 1 before the tail.
        bit = jnp.where(slot < limit, jnp.int32(1) << (tail_idx & 31), 0)
        found = jnp.where((tail_idx < 0) & (slot < limit), 1, 0)
        for w in range(plan.num_words):
            of_word = jnp.where((tail_idx >= 0) & (tail_idx >> 5 == w), bit, 0)
            found = found | (refs.packed_info[:, w : w + 1] & of_word)
        seen = found != 0
    elif plan.queries == 1:
        bound = jnp.minimum(prefix + 1, limit)
        seen = first_slot + lax.broadcasted_iota(jnp.int32, (plan.packed, keys), 1) < bound
    else:
        packed_row = lax.broadcasted_iota(jnp.int32, (plan.packed, 1), 0).astype(jnp.float32)
        query = ((packed_row + 0.5) * (1 / plan.group)).astype(jnp.int32)
        seen = slot < jnp.minimum(prefix + 1 + query, limit)
    if plan.window is not None:
        position = _positions(plan, refs, row, slot, start)
        own = refs.packed_info[:, plan.num_words : plan.num_words + 1]
        seen = seen & (own - position < plan.window)
    return seen


def _positions(
    plan: RowsPlan, refs: RowsMemory, row: jax.Array, slot: jax.Array, start: jax.Array
) -> jax.Array:
    """Return key positions: the slot, except for the tail, whose first slot is `start`."""
    if not plan.tail:
        return slot

    def place(w: jax.Array, position: jax.Array) -> jax.Array:
        return jnp.where(slot == start + w, refs.tail_positions[row, w], position)

    return lax.fori_loop(0, plan.tail, place, slot)


def _held(
    plan: RowsPlan, refs: RowsMemory, row: jax.Array, block: jax.Array, keys: int
) -> jax.Array:
    """Return a mask bool[keys, D] of the keys that were copied or stored; others may be NaN."""
    key = lax.broadcasted_iota(jnp.int32, (keys, plan.width), 0)
    first_slot = block * plan.block_keys
    held = key < refs.limits[row] - first_slot
    if plan.window is not None:
        first = lax.div(refs.firsts[row], plan.page_size) * plan.page_size
        held = held & (key >= first - first_slot)
    return held


def _load_head(
    plan: RowsPlan, refs: RowsMemory, buffer: jax.Array, head: int, mask: Mask | None
) -> tuple[jax.Array, jax.Array]:
    """Return K and V [keys, D] of one head; V is 0 where not held."""

    def clean(v: jax.Array) -> jax.Array:
        return v if mask is None else jnp.where(mask.held, v, jnp.zeros_like(v))

    two_g = plan.two_g
    keys = plan.block_keys if mask is None else mask.keys
    if not plan.has_strided_heads:
        k = refs.buffers[buffer, :keys, 2 * head, :]
        v = refs.buffers[buffer, :keys, 2 * head + 1, :].astype(jnp.float32)
        return k, clean(v).astype(plan.dtype)
    flat = refs.buffers.at[buffer].reshape(plan.block_keys * two_g, plan.width)
    if plan.dtype.itemsize == 4:
        k = flat[pl.ds(2 * head, keys, stride=two_g), :]
        return k, clean(flat[pl.ds(2 * head + 1, keys, stride=two_g), :])
    words = flat.bitcast(jnp.uint32)
    pair = words[pl.ds(head, keys, stride=two_g // 2), :] if two_g > 2 else words[:keys]
    k, v = split_pair(pair)
    return k.astype(plan.dtype), clean(v).astype(plan.dtype)


def split_pair(pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split 32-bit words of K (low half) and V, both bfloat16, into float32."""
    k = pltpu.bitcast(pair << 16, jnp.float32)
    return k, pltpu.bitcast(pair & jnp.uint32(0xFFFF0000), jnp.float32)


def absorb_block(
    plan: RowsPlan, refs: RowsMemory, i: jax.Array, buffer: jax.Array, mask: Mask | None
) -> None:
    """Add a block's keys to the online softmax of all heads. Heads go through each stage together,
    to overlap the latencies of products and reductions."""
    heads = plan.two_g // 2
    for low in range(0, heads, plan.heads_together):
        group = range(low, min(low + plan.heads_together, heads))
        loaded = [_load_head(plan, refs, buffer, head, mask) for head in group]
        scores = [
            _score(plan, refs.q[i, head], k, mask)
            for head, (k, _) in zip(group, loaded, strict=True)
        ]
        weights, fades = [], []
        for head, pieces in zip(group, scores, strict=True):
            before = refs.top[head]
            most = jnp.max(functools.reduce(jnp.maximum, pieces), axis=1, keepdims=True)
            top = jnp.maximum(before, most)
            fade = jnp.exp2(before - top)
            parts = [jnp.exp2(piece - top) for piece in pieces]
            refs.top[head] = top
            refs.total[head] = refs.total[head] * fade + functools.reduce(jnp.add, parts)
            weights.append(jnp.concatenate(parts, axis=1))
            fades.append(fade if plan.width == LANES else fade[:, :1])
        mixed = [_mix(plan, refs.q.dtype, w, v) for w, (_, v) in zip(weights, loaded, strict=True)]
        for head, fade, part in zip(group, fades, mixed, strict=True):
            refs.mixed[head] = refs.mixed[head] * fade + part


def _score(plan: RowsPlan, q: jax.Array, k: jax.Array, mask: Mask | None) -> list[jax.Array]:
    """Return the scores [packed, keys] times log2(e) in pieces of LANES keys, UNSEEN if hidden."""
    precision = None
    if q.dtype != k.dtype or q.dtype == jnp.float32:
        k, precision = k.astype(jnp.float32), lax.Precision.HIGHEST
    contract_last = (((1,), (1,)), ((), ()))
    scores = lax.dot_general(
        q, k, contract_last, precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores * (plan.scale * LOG2_E)
    if mask is not None:
        scores = jnp.where(mask.seen, scores, UNSEEN)
    return [scores[:, at : at + LANES] for at in range(0, scores.shape[1], LANES)]


def _mix(plan: RowsPlan, q_dtype: Any, weights: jax.Array, v: jax.Array) -> jax.Array:
    precision = None
    if q_dtype != plan.dtype or q_dtype == jnp.float32:
        v, precision = v.astype(jnp.float32), lax.Precision.HIGHEST
    return jnp.dot(
        weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
