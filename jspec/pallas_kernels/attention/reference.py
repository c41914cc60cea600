"""The reference of paged attention, tested with NaN in everything that must not be read."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries, visible_keys
from jspec.pallas_kernels.kv_write.api import KVScales
from jspec.pallas_kernels.kv_write.reference import (
    page_slots,
    pool_rows,
    records_of,
    write_rows,
)


def new_slots(
    rows: AttentionMetadata, num_queries: int, *, page_size: int, queries_per_row: int | None
) -> tuple[jax.Array, jax.Array]:
    """Return i32[T] (page, offset) of each new token's K and V, shared by all layers."""
    index = index_queries(rows.cu_q_lens, num_queries, queries_per_row=queries_per_row)
    slot = jnp.take(rows.prefix_lens, index.row_idx, mode="clip") + index.within
    return page_slots(rows.page_table, index.row_idx, slot, index.valid, page_size=page_size)


def write_new(
    k_new: jax.Array,
    v_new: jax.Array,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    queries_per_row: int | None,
    scales: KVScales | None = None,
) -> jax.Array:
    """Write new token j of each row at slot prefix_len + j; padding goes to page 0."""
    page, offset = new_slots(
        rows, k_new.shape[0], page_size=kv_pages.shape[1], queries_per_row=queries_per_row
    )
    values = pool_rows(k_new, v_new, width=kv_pages.shape[3], dtype=kv_pages.dtype, scales=scales)
    return write_rows(kv_pages, page, offset, values)


def attend(
    q: jax.Array,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    scale: float,
    queries_per_row: int | None,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Return out[T, H, D] by definition; padding queries return zeros."""
    width, (num_kv, num_records) = kv_pages.shape[-1], records_of(kv_pages)
    index = index_queries(rows.cu_q_lens, q.shape[0], queries_per_row=queries_per_row)
    lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    if queries_per_row is not None:
        lens = jnp.full_like(lens, queries_per_row)
    table = jnp.take(rows.page_table, index.row_idx, axis=0, mode="clip")  # [T, P]
    kv = kv_pages[table].reshape(q.shape[0], -1, num_kv, num_records, width)
    slot = jnp.broadcast_to(jnp.arange(kv.shape[1], dtype=jnp.int32), kv.shape[:2])
    tail_positions = rows.tail_positions
    seen = visible_keys(
        slot,
        within=index.within[:, None],
        prefix_len=jnp.take(rows.prefix_lens, index.row_idx, mode="clip"),
        q_len=jnp.take(lens, index.row_idx, mode="clip"),
        q_position=rows.q_positions[:, None],
        tail_mask=None if rows.tail_mask is None else rows.tail_mask[:, None],
        tail_positions=(
            None
            if tail_positions is None
            else jnp.take(tail_positions, index.row_idx, axis=0, mode="clip")
        ),
        window=window,
    )[:, 0]  # [T, C]
    seen = seen & index.valid[:, None]
    clean = jnp.where(seen[:, :, None, None, None], kv.astype(jnp.float32), 0.0)
    group = q.shape[1] // num_kv
    queries = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, width - q.shape[2])))
    queries = queries.reshape(q.shape[0], -1, group, width)
    scores = jnp.einsum("tghd,tcgd->tghc", queries, clean[:, :, :, 0]) * scale
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.reshape(-1, group)[None, :, :, None] - top)
    mixed = jnp.einsum("tghc,tcgd->tghd", weights, clean[:, :, :, -1]) / jnp.maximum(total, 1e-30)
    mixed = jnp.where(index.valid[:, None, None, None], mixed, 0.0)
    return mixed.reshape(q.shape[0], q.shape[1], width).astype(q.dtype)
