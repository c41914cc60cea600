"""The keys that each packed query sees, as ranges, and those that each block of queries streams:
slots of its row in the pool, and new tokens of this call, packed like the queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.device.pytree import pytree
from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries

FAR = (1 << 31) - 1

# Lines of PackedPlan.ranges; further ones, up to LINES, are zeros.
NEW_FIRST, NEW_LAST, POOL_FIRST, POOL_LAST, ROW = range(5)
LINES = 8


@pytree
class PackedPlan:
    """The keys of each query and of each block of queries. Streams 0..B-1 are the rows' pages (keys
    are slots); B is the new tokens (packed indices)."""

    ranges: jax.Array  # i32[LINES, T]; query t sees packed tokens [NEW_FIRST, NEW_LAST) and
    # slots [POOL_FIRST, POOL_LAST) of row ROW; padding queries see nothing
    spans: jax.Array  # i32[4, blocks, B + 1]: first and last key that some query sees, then first
    # and last key that every query sees; an empty span has last <= first


def plan_packed(
    rows: AttentionMetadata,
    num_queries: int,
    *,
    block_queries: int,
    page_size: int,
    writes: bool,
    window: int | None,
) -> PackedPlan:
    """Plan T queries, a multiple of `block_queries`, for all layers.

    In:  cu_q_lens = [0, 2, 4], prefix_lens = [5, 0], T = 4, block_queries = 4, no window
    Out: new tokens [0, 1) [0, 2) [2, 3) [2, 4); slots [0, 5) [0, 5) of row 0, none of row 1.
         Spans: (0, 5) (0, 0) | (0, 4) some, (0, 0) (0, 0) | (2, 1) every.
    """
    batch, pages_per_row = rows.page_table.shape
    index = index_queries(rows.cu_q_lens, num_queries, queries_per_row=None)
    t = jnp.arange(num_queries, dtype=jnp.int32)
    prefix = jnp.take(rows.prefix_lens, index.row_idx, mode="clip")
    slot = prefix + index.within
    shift = slot - t  # from a packed index to a slot
    table_end = pages_per_row * page_size  # no key is past the page table
    pool_first = jnp.zeros_like(t)
    if window is not None:
        positions = jnp.pad(rows.q_positions, (0, num_queries - rows.q_positions.shape[0]))
        pool_first = jnp.maximum(positions - window + 1, 0)
    pool_last = jnp.minimum(prefix if writes else slot + 1, table_end)
    new_first = jnp.maximum(t - index.within, pool_first - shift)
    new_last = jnp.minimum(t + 1, table_end - shift) if writes else jnp.zeros_like(t)
    pool_last = jnp.where(index.valid, pool_last, 0)
    new_last = jnp.where(index.valid, new_last, 0)
    row = jnp.where(index.valid, index.row_idx, batch)  # padding queries belong to no row
    lines = [new_first, new_last, pool_first, pool_last, row]
    ranges = jnp.pad(jnp.stack(lines), ((0, LINES - len(lines)), (0, 0)))

    stream = jnp.arange(batch + 1, dtype=jnp.int32)
    is_new = stream == batch
    own = is_new | (index.row_idx[:, None] == stream)  # [T, B + 1]
    first = jnp.where(is_new, new_first[:, None], pool_first[:, None])
    last = jnp.where(own, jnp.where(is_new, new_last[:, None], pool_last[:, None]), 0)
    sees = last > first
    padding = ~index.valid[:, None]
    some_first = jnp.where(sees, first, FAR)
    some_last = jnp.where(sees, last, 0)
    every_first = jnp.where(padding, 0, first)  # results of padding queries are not used
    every_last = jnp.where(padding, FAR, last)
    folds = (jnp.min, jnp.max, jnp.max, jnp.min)
    parts = (some_first, some_last, every_first, every_last)
    blocks = (-1, block_queries, batch + 1)
    spans = [fold(x.reshape(blocks), axis=1) for fold, x in zip(folds, parts, strict=True)]
    spans[0] = jnp.minimum(spans[0], spans[1])
    return PackedPlan(ranges=ranges, spans=jnp.stack(spans))


def join_spans(spans: jax.Array, count: int) -> jax.Array:
    """Return i32[2, blocks / count, B + 1]: of `count` blocks each, the first and last key that
    some query sees."""
    first, last = (x.reshape(-1, count, x.shape[-1]) for x in spans[:2])
    end = jnp.max(last, axis=1)
    begin = jnp.min(jnp.where(last > first, first, FAR), axis=1)
    return jnp.stack([jnp.minimum(begin, end), end])
