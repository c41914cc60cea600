"""The schedule of packed prefill in blocks of queries and keys, for all layers with one window.
Plain XLA. Each row's keys have a mask only where some query does not see a whole block."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jspec.device.pytree import pytree
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_plan import TILE_ROWS
from jspec.pallas_kernels.prefill.api import POOL_FIRST, POOL_LAST, ROW, plan_packed

MAX_HEADS = 8  # per tile, so that eight queries, the rows of a swizzled tile, are contiguous

# Columns of PrefillPlan.walks, in blocks of keys. Between BEGIN and END some query sees some key,
# between WHOLE_BEGIN and WHOLE_END every query sees every key. OFFSET + block counts the program's
# steps. KEYS: written slots of the row.
BEGIN, WHOLE_BEGIN, WHOLE_END, END, OFFSET, KEYS = range(6)
NUM_COLUMNS = 6


@pytree
class PrefillPlan:
    bounds: jax.Array  # i32[blocks, 4]: block of queries, first row, row after the last, steps
    walks: jax.Array  # i32[blocks, B, 6], the columns above; both: blocks with many steps first
    lines: jax.Array  # i32[tiles, 3, 64]: first slot, slot after the last, row of each query


def packed_heads(group: int) -> int:
    """Return heads per tile, so that all 64 rows are used: group 4 -> 4, group 7 -> 1."""
    return math.gcd(group, MAX_HEADS)


def plan_prefill(
    rows: AttentionMetadata,
    num_queries: int,
    *,
    group: int,
    page_size: int,
    window: int | None,
    block_tokens: int,
    consumers: int,
) -> PrefillPlan:
    """Plan T queries.

    In:  rows of 56 and 8 queries, prefixes 256 and 0, group 4, so blocks of 32 queries; 128 keys
    Out: bounds (1, 0, 2, 4) (0, 0, 1, 3). The second block goes first: blocks 0, 1, 2 of row 0,
         then block 0 of row 1. None is whole, since each row's keys are hidden from the other
         row's queries. The first takes row 0 only: blocks 0 and 1 whole, block 2 with a mask.
    """
    heads, tokens = packed_heads(group), block_tokens
    tile = TILE_ROWS // heads
    queries = tile * consumers
    batch, pages = rows.page_table.shape
    padded = -(-num_queries // queries) * queries
    plan = plan_packed(
        rows, padded, block_queries=queries, page_size=page_size, writes=False, window=window
    )
    some_first, some_last, every_first, every_last = plan.spans[:, :, :batch]
    sees = some_last > some_first
    begin = jnp.where(sees, some_first // tokens, 0)
    end = jnp.where(sees, -(-some_last // tokens), 0)
    whole_begin = jnp.clip(-(-every_first // tokens), begin, end)
    whole_end = jnp.clip(every_last // tokens, whole_begin, end)
    steps = end - begin
    offset = jnp.cumsum(steps, axis=1) - steps - begin
    lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    keys = jnp.minimum(rows.prefix_lens + lens, pages * page_size)
    keys = jnp.broadcast_to(keys, steps.shape)
    number = jnp.arange(batch, dtype=jnp.int32)
    lines = jnp.stack([plan.ranges[i] for i in (POOL_FIRST, POOL_LAST, ROW)])
    lines = jnp.tile(lines.reshape(3, -1, tile), (1, 1, heads))
    order = jnp.argsort(-jnp.sum(steps, axis=1), stable=True)
    first_row = jnp.min(jnp.where(sees, number, batch), axis=1)
    last_row = jnp.max(jnp.where(sees, number + 1, 0), axis=1)
    bounds = [jnp.arange(len(order)), first_row, last_row, jnp.sum(steps, axis=1)]
    walks = [begin, whole_begin, whole_end, end, offset, keys]
    return PrefillPlan(
        bounds=jnp.take(jnp.stack(bounds, axis=1), order, axis=0, mode="clip").astype(jnp.int32),
        walks=jnp.take(jnp.stack(walks, axis=2), order, axis=0, mode="clip").astype(jnp.int32),
        lines=lines.swapaxes(0, 1).astype(jnp.int32),
    )
