"""The query layout of the Hopper decode kernel, [B * G, tiles * stored, D].

One wgmma product multiplies the group x R queries of a kv head, so these are contiguous. The end is
padded to a multiple of 8 or, with several tiles, of 64; its results are dropped.

In:  B = 1, R = 2, H = 4, G = 2
Out: [q0h0 q0h1 q1h0 q1h1 . . . .], [q0h2 q0h3 q1h2 q1h3 . . . .]
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.pallas_kernels.attention.block_plan import TILE_ROWS

MAX_PLACED = 16  # most queries of a tile that the kernel stores to the output, a copy each


def tiles_of(num_rows: int) -> tuple[int, int]:
    """Return (tiles, entries stored per tile): 4 -> (1, 8), 64 -> (1, 64), 80 -> (2, 64)."""
    tiles = -(-num_rows // TILE_ROWS)
    return tiles, min(-(-num_rows // 8) * 8, TILE_ROWS)


def can_place(queries_per_row: int, group: int) -> bool:
    """Return whether every tile has whole queries, and few, so that the kernel can copy each.

    In:  R = 16, group 4    Out: True, 16 queries of 4 heads
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
