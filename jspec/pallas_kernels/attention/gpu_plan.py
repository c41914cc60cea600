"""The plan and the query layout of the Hopper decode kernel. Plain XLA.

A plan has bounds and mask bits in blocks of keys, for all layers with one window. Only a row's last
blocks need a mask; earlier blocks are fully visible except for a window's lower bound.

Queries have the layout [B * G, tiles * stored, D]: the group x R queries of a kv head, which one
wgmma product multiplies, padded to a multiple of 8 or, with several tiles, of 64.

In:  B = 1, R = 2, H = 4, G = 2
Out: [q0h0 q0h1 q1h0 q1h1 . . . .], [q0h2 q0h3 q1h2 q1h3 . . . .]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jspec.device.pytree import pytree
from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries, visible_keys

TILE_ROWS = 64  # M of one wgmma product: queries x heads of a group
MAX_SPLITS = 16  # the default limit: more would make the merge too expensive
MAX_PLACED = 16  # most queries of a tile that the kernel stores to the output, a copy each
NUM_SMS = 132  # multiprocessors of an H100 SXM or H200


@pytree
class BlockPlan:
    # i32[B, 5]: first block, first masked block, block after the last, keys, valid queries
    bounds: jax.Array
    words: jax.Array  # i32[B, tiles, edges, block / 32, 64], bit c: the query sees key 32 w + c
    lowest: jax.Array  # i32[B, tiles, 64]: no key in a slot before it is seen (window)
    valid: jax.Array  # bool[B, R]


def choose_splits(*, programs: int, max_blocks: int) -> int:
    """Return the number of shares of a row's keys that gives about two programs per SM."""
    return max(1, min(2 * NUM_SMS // max(programs, 1), max_blocks, MAX_SPLITS))


def num_edge_blocks(*, tail: int | None, queries_per_row: int, block_tokens: int) -> int:
    """Return the most blocks of a row that need the mask: 2 for a tail of 16, which may cross."""
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


def tiles_of(num_rows: int) -> tuple[int, int]:
    """Return (tiles, entries stored per tile): 4 -> (1, 8), 64 -> (1, 64), 80 -> (2, 64)."""
    tiles = -(-num_rows // TILE_ROWS)
    return tiles, min(-(-num_rows // 8) * 8, TILE_ROWS)


def can_place(queries_per_row: int, group: int) -> bool:
    """Return whether every tile has whole queries, and few, so that the kernel can copy each.

    In:  R = 25, group 3    Out: False, query 21 spans two tiles
    In:  R = 20, group 1    Out: False, 20 queries in the one tile
    """
    is_whole = queries_per_row * group <= TILE_ROWS or TILE_ROWS % group == 0
    return is_whole and min(queries_per_row, TILE_ROWS // group) <= MAX_PLACED


def pack_queries(
    q: Float[Array, "T H Dq"], batch: int, num_kv: int, queries_per_row: int, *, width: int
) -> Float[Array, "BG rows D"]:
    """Return q in the kernel's layout, with heads zero-padded to `width`."""
    q = q.reshape(batch, queries_per_row, num_kv, -1, q.shape[2]).swapaxes(1, 2)
    q = q.reshape(batch * num_kv, -1, q.shape[-1])
    tiles, stored = tiles_of(q.shape[1])
    return jnp.pad(q, ((0, 0), (0, tiles * stored - q.shape[1]), (0, width - q.shape[2])))
