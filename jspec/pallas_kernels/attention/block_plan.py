"""The plan of an attention call in blocks of keys: bounds and mask bits. Plain XLA.

Only a row's last blocks need a mask, given as bits from `visible_keys`; earlier blocks are fully
visible except for a window's lower bound. All layers with one window share a plan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jspec.device.pytree import pytree
from jspec.pallas_kernels.attention.rows import AttentionMetadata, index_queries, visible_keys

TILE_ROWS = 64  # M of one wgmma product: queries x heads of a group
MAX_SPLITS = 16  # the default limit: more would make the merge too expensive
NUM_SMS = 132  # multiprocessors of an H100 SXM or H200


@pytree
class BlockPlan:
    # i32[B, 5]: first block, first masked block, block after the last, keys, valid queries
    """The bounds and mask of a call in blocks of keys."""

    bounds: jax.Array
    words: jax.Array  # i32[B, tiles, edges, block / 32, 64], bit c: the query sees key 32 w + c
    lowest: jax.Array  # i32[B, tiles, 64]: no key in a slot before it is seen (window)
    valid: jax.Array  # bool[B, R]


def choose_splits(*, programs: int, max_blocks: int) -> int:
    """Shares of a row's keys such that about two programs per multiprocessor exist.

    In:  64 programs (B = 8, G = 8), 512 blocks     Out: 4, so 256 programs on 132 processors
    In:  256 programs (B = 32, G = 8), 512 blocks   Out: 1
    """
    return max(1, min(2 * NUM_SMS // max(programs, 1), max_blocks, MAX_SPLITS))


def num_edge_blocks(*, tail: int | None, queries_per_row: int, block_tokens: int) -> int:
    """Return the most blocks of a row that need the mask; at least the last one does.

    In:  tail 16, block 64    Out: 2, since 16 slots may cross a block boundary
    In:  tail None, R = 1     Out: 1
    """
    span = max(queries_per_row - 1 if tail is None else tail, 1)
    return 1 + (span + block_tokens - 2) // block_tokens


def plan_blocks(
    rows: AttentionMetadata,
    *,
    queries_per_row: int,
    group: int,
    window: int | None,
    block_tokens: int,
) -> BlockPlan:
    """Compute the plan of a call."""
    batch, block = rows.page_table.shape[0], block_tokens
    shape = (batch, queries_per_row)
    lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    index = index_queries(rows.cu_q_lens, batch * queries_per_row, queries_per_row=queries_per_row)
    valid = index.valid.reshape(shape)
    position = rows.q_positions.reshape(shape)
    tail = None if rows.tail_positions is None else rows.tail_positions.shape[1]
    # Every query sees the slots before `masked`; `keys` slots exist.
    keys = jnp.where(lens > 0, rows.prefix_lens + lens, 0)
    masked = rows.prefix_lens + (1 if tail is None else queries_per_row - tail)
    masked = jnp.maximum(jnp.minimum(masked, keys - 1), 0)
    lowest = jnp.zeros(shape, jnp.int32)
    if window is not None:
        lowest = jnp.where(valid, jnp.maximum(position - window + 1, 0), 0)
    least = jnp.min(jnp.where(valid, lowest, 2**31 - 1), axis=1)
    first = jnp.minimum(least, masked) // block
    edge = masked // block
    bounds = jnp.stack([first, edge, -(-keys // block), keys, lens], axis=1).astype(jnp.int32)
    edges = num_edge_blocks(tail=tail, queries_per_row=queries_per_row, block_tokens=block)
    slot = edge[:, None] * block + jnp.arange(edges * block, dtype=jnp.int32)
    mask = rows.tail_mask
    seen = visible_keys(
        slot,
        within=index.within.reshape(shape),
        prefix_len=rows.prefix_lens,
        q_len=jnp.full_like(rows.prefix_lens, queries_per_row),
        q_position=position,
        tail_mask=None if mask is None else mask.reshape(*shape, -1),
        tail_positions=rows.tail_positions,
        window=window,
    )
    seen = seen & (slot < keys[:, None])[:, None] & valid[:, :, None]  # [B, R, C]
    bits = seen.reshape(*shape, edges, block // 32, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32)
    return BlockPlan(
        bounds=bounds,
        words=jnp.moveaxis(_tile(words, group), 2, -1),
        lowest=_tile(lowest, group),
        valid=valid,
    )


def _tile(x: jax.Array, group: int) -> jax.Array:
    """Reshape [B, R, ...] to [B, tiles, 64, ...]: an entry per query and head of the group, then 0.

    In:  R = 2, group = 3    Out: entries q0 q0 q0 q1 q1 q1 0 0 ...
    """
    x = jnp.repeat(x, group, axis=1)
    tiles = -(-x.shape[1] // TILE_ROWS)
    padding = [(0, 0), (0, tiles * TILE_ROWS - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding).reshape(x.shape[0], tiles, TILE_ROWS, *x.shape[2:])
