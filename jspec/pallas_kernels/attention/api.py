"""The contract of paged attention, which every implementation of `Ops.attend` fulfils.

    q[T, H, D], k_new, v_new [T, G, D] (None: nothing is written), kv_pages[NP, S, 2G, D]
    rows.page_table[B, P], rows.prefix_lens[B]: tokens of the row before this call's first new one,
    also when k_new is None
    rows.cu_q_lens[B + 1]: row b has cu_q_lens[b+1] - cu_q_lens[b] queries

Queries are packed row after row. With `queries_per_row` R, those of row b start at q[b * R], and
those beyond its length are padding, whose K and V go to the dummy page.

Query j of row b sees these keys:

  - tail_mask None: the first prefix_lens[b] + j + 1;
  - tail_mask u32[T, ceil(W / 32)]: all keys before the tail, and tail slot w if bit w is set. The
    tail is the row's last W slots, up to this call's last new token. With `queries_per_row` such a
    row has R queries or none.
  - window w: only keys with q_position - key_position < w; a tail key's position is
    tail_positions[b, w], any other key's position is its slot.

`sinks` f32[H] adds exp(sink) to each head's softmax denominator. K and V may be narrower than the
pool's D. Result: (out[T, H, D], kv_pages'). Written slots are finite (kv_write); unwritten slots
may hold anything, and kernels replace them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jspec.device.batch import SharedPrefixes
from jspec.device.pytree import pytree
from jspec.pallas_kernels.kv_write.reference import records_of


@pytree
class AttentionMetadata:
    """Attention metadata of one call, the same for all layers of a page space."""

    page_table: jax.Array  # i32[B, P], of the full space; kernels read only this (`of_window`)
    prefix_lens: jax.Array  # i32[B]
    cu_q_lens: jax.Array  # i32[B + 1], starts at 0, ascends
    q_positions: jax.Array  # i32[T], RoPE positions
    tail_mask: jax.Array | None = None  # u32[T, ceil(W / 32)], bits past W are 0
    tail_positions: jax.Array | None = None  # i32[B, W]
    # Tables of the other spaces by window, i32[B, P] each.
    window_tables: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    shared: SharedPrefixes | None = None  # of the full space; a kernel may read them once
    slots: jax.Array | None = None  # i32[B], of caches by slot

    def of_window(self, window: int | None) -> AttentionMetadata:
        """Return the metadata of a window's layers. Without its own space it uses the full one."""
        of_pages = dataclasses.replace(self, window_tables={}, slots=None)
        if window is None:
            return of_pages
        table = self.window_tables.get(window, self.page_table)
        return dataclasses.replace(of_pages, page_table=table, shared=None)

    def of_slots(self) -> AttentionMetadata:
        return dataclasses.replace(self, window_tables={}, shared=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    queries_per_row: int | None  # None: packed prefill chunks
    scale: float
    window: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"scale": self.scale, "window": self.window}


def check_call(
    q: jax.Array, kv_pages: jax.Array, rows: AttentionMetadata, call: AttentionCall
) -> None:
    """Raise ValueError at trace time for shapes that contradict each other."""
    batch = rows.page_table.shape[0]
    num_kv, _ = records_of(kv_pages)
    if q.shape[1] % num_kv:
        raise ValueError(f"{q.shape[1]} query heads over {num_kv} kv heads; expected a multiple")
    if q.shape[2] > kv_pages.shape[-1]:
        raise ValueError(f"q is {q.shape[2]} wide, the pool {kv_pages.shape[-1]}; expected at most")
    if call.queries_per_row is not None and q.shape[0] != batch * call.queries_per_row:
        raise ValueError(f"{q.shape[0]} queries; expected {batch} rows of {call.queries_per_row}")
    if (rows.tail_mask is None) != (rows.tail_positions is None):
        raise ValueError("tail_mask and tail_positions come together or not at all")
    if rows.tail_mask is not None and rows.tail_positions is not None:
        words = -(-rows.tail_positions.shape[1] // 32)
        if rows.tail_mask.shape != (q.shape[0], words):
            raise ValueError(f"tail_mask is {rows.tail_mask.shape}; expected {(q.shape[0], words)}")


@pytree
class QueryIndex:
    row_idx: jax.Array  # i32[T], in [0, B)
    within: jax.Array  # i32[T], >= 0
    valid: jax.Array  # bool[T]


def index_queries(
    cu_q_lens: jax.Array, num_queries: int, *, queries_per_row: int | None
) -> QueryIndex:
    """Locate each of T queries, in either layout.

    In:  cu_q_lens = [0, 3, 4], T = 6, packed
    Out: row_idx = [0 0 0 1 1 1], within = [0 1 2 0 1 2], valid = [T T T T F F]
    """
    batch = cu_q_lens.shape[0] - 1
    t = jnp.arange(num_queries, dtype=jnp.int32)
    if queries_per_row is not None:
        row_idx, within = t // queries_per_row, t % queries_per_row
        lens = cu_q_lens[1:] - cu_q_lens[:-1]
        valid = within < jnp.take(lens, row_idx, mode="clip")
        return QueryIndex(row_idx=row_idx, within=within, valid=valid)
    row_idx = jnp.sum(t[:, None] >= cu_q_lens[None, 1:], axis=1, dtype=jnp.int32)
    row_idx = jnp.minimum(row_idx, batch - 1)
    within = t - jnp.take(cu_q_lens, row_idx, mode="clip")
    return QueryIndex(row_idx=row_idx, within=within, valid=t < cu_q_lens[-1])


def mask_bits(tail_mask: jax.Array, tail_idx: jax.Array) -> jax.Array:
    """Return bit `tail_idx` of each query's words: tail_mask [..., words], tail_idx [..., C]."""
    safe = jnp.clip(tail_idx, 0, tail_mask.shape[-1] * 32 - 1)
    word = jnp.take_along_axis(tail_mask, safe // 32, axis=-1, mode="clip")
    return ((word >> (safe % 32).astype(jnp.uint32)) & 1).astype(bool)


def visible_keys(
    slot: jax.Array,
    *,
    within: jax.Array,
    prefix_len: jax.Array,
    q_len: jax.Array,
    q_position: jax.Array,
    tail_mask: jax.Array | None,
    tail_positions: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """Return bool[..., Q, C]: True if query q sees the key in slot c of its own row.

    slot i32[..., C]; within, q_position i32[..., Q]; prefix_len, q_len i32[...] per row; tail_mask
    u32[..., Q, words]; tail_positions i32[..., W]
    """
    key = slot[..., None, :]
    if tail_mask is None or tail_positions is None:
        seen = key <= (prefix_len[..., None] + within)[..., None]
        position = key
    else:
        width = tail_positions.shape[-1]
        start = (prefix_len + q_len - width)[..., None, None]
        tail_idx = jnp.broadcast_to(key - start, (*within.shape, slot.shape[-1]))
        in_tail = (tail_idx >= 0) & (tail_idx < width)
        seen = (key < start) | (in_tail & mask_bits(tail_mask, tail_idx))
        flat_idx = jnp.clip(slot - start[..., 0], 0, width - 1)
        tail_position = jnp.take_along_axis(tail_positions, flat_idx, axis=-1, mode="clip")
        position = jnp.where(in_tail, tail_position[..., None, :], key)
    seen = seen & (key >= 0)
    if window is not None:
        seen = seen & (q_position[..., None] - position < window)
    return seen
