"""Paged attention in plain XLA, streaming over blocks of pages (online softmax).

Rows of equal length: an iteration takes one block of keys of every row (A = B groups). Packed
prefill: one block of one row and all T queries (one group), masked to that row's queries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.device.pytree import pytree
from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries, visible_keys
from jspec.pallas_kernels.kv_write.reference import records_of

BLOCK_TOKENS = 128


@pytree
class _Partial:
    """The online softmax over the blocks so far: [A, G, Q * group(, D)], float32."""

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


def attend(
    q: jax.Array,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    scale: float,
    queries_per_row: int | None,
    window: int | None,
    sinks: jax.Array | None,
    allowed: jax.Array | None = None,
) -> jax.Array:
    """Return out[T, H, D]; padding queries return unspecified finite values. allowed: bool[T, C],
    the slots of its row that a query may see, for rows of equal length."""
    page_size, width = kv_pages.shape[1], kv_pages.shape[-1]
    batch, pages_per_row = rows.page_table.shape
    num_heads, (num_kv, num_records) = q.shape[1], records_of(kv_pages)
    block_pages = min(max(BLOCK_TOKENS // page_size, 1), pages_per_row)
    num_blocks = -(-pages_per_row // block_pages)
    table = jnp.pad(rows.page_table, ((0, 0), (0, num_blocks * block_pages - pages_per_row)))
    q_lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    written = rows.prefix_lens + q_lens  # padding queries wrote to the dummy page
    groups = batch if queries_per_row is not None else 1
    queries = _pack(q, groups=groups, num_kv=num_kv, width=width) * scale

    if allowed is not None:
        rest = num_blocks * block_pages * page_size - allowed.shape[1]
        allowed = jnp.pad(allowed, ((0, 0), (0, rest))).reshape(batch, -1, allowed.shape[1] + rest)

    blocks = -(-written // (block_pages * page_size))  # blocks of keys of each row
    ends = jnp.cumsum(blocks)  # packed: row r has iterations ends[r] - blocks[r] .. ends[r]

    def body(carry: tuple[jax.Array, _Partial]) -> tuple[jax.Array, _Partial]:
        step, partial = carry
        row: jax.Array | None = None
        if queries_per_row is None:
            row = jnp.sum(step >= ends, dtype=jnp.int32)
            block = step - jnp.take(ends - blocks, row, mode="clip")
            limit = jnp.take(written, row, mode="clip")[None]
            first = (row, block * block_pages)
            ids = jax.lax.dynamic_slice(table, first, (1, block_pages))
        else:
            block, limit = step, written
            ids = jax.lax.dynamic_slice_in_dim(table, block * block_pages, block_pages, axis=1)
        slot = block * (block_pages * page_size) + jnp.arange(block_pages * page_size)
        # Merge slots and heads into one axis but keep D: on a TPU a fully flat view has another
        # tiling, and this loop would copy the pool in every iteration.
        flat = kv_pages.reshape(kv_pages.shape[0], -1, width)
        kv = flat.at[ids].get(mode="promise_in_bounds")
        kv = kv.reshape(ids.shape[0], -1, num_kv, num_records, width).astype(jnp.float32)
        # 0 times NaN is NaN, so zero the unwritten slots before any product. Written slots are
        # finite (kv_write).
        is_written = (slot < limit[:, None])[:, :, None, None, None]
        kv = jnp.where(is_written, kv, 0.0)
        kv = kv.reshape(groups, -1, num_kv, num_records, width)
        seen = _visible(slot, rows, q.shape[0], queries_per_row, window, row)
        if allowed is not None:
            seen &= jax.lax.dynamic_slice_in_dim(allowed, slot[0], slot.shape[0], axis=2)
        return step + 1, _absorb(partial, queries, kv, seen)

    last = ends[-1] if queries_per_row is None else jnp.max(blocks)
    start = _Partial(
        top=jnp.full(queries.shape[:-1], -1e30, jnp.float32),
        total=jnp.zeros(queries.shape[:-1], jnp.float32),
        mixed=jnp.zeros(queries.shape, jnp.float32),
    )
    first = jnp.zeros((), last.dtype)
    _, done = jax.lax.while_loop(lambda c: c[0] < last, body, (first, start))
    out = _finish(done, sinks, num_kv=num_kv, group=num_heads // num_kv)
    return _unpack(out, q.shape[0], num_heads).astype(q.dtype)


def _pack(q: jax.Array, *, groups: int, num_kv: int, width: int) -> jax.Array:
    q = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, width - q.shape[2])))
    q = q.reshape(groups, q.shape[0] // groups, num_kv, -1, width)
    return q.transpose(0, 2, 1, 3, 4).reshape(groups, num_kv, -1, width)


def _unpack(out: jax.Array, num_queries: int, num_heads: int) -> jax.Array:
    groups, num_kv, _, width = out.shape
    out = out.reshape(groups, num_kv, num_queries // groups, num_heads // num_kv, width)
    return out.transpose(0, 2, 1, 3, 4).reshape(num_queries, num_heads, width)


def _visible(
    slot: jax.Array,
    rows: AttentionMetadata,
    num_queries: int,
    queries_per_row: int | None,
    window: int | None,
    row: jax.Array | None,
) -> jax.Array:
    """Return bool[A, Q, C] for a block of slots [C] of every row, or of packed row `row`."""
    index = index_queries(rows.cu_q_lens, num_queries, queries_per_row=queries_per_row)
    batch = rows.prefix_lens.shape[0]
    if queries_per_row is not None:
        shape = (batch, queries_per_row)
        mask = rows.tail_mask
        return visible_keys(
            jnp.broadcast_to(slot, (batch, slot.shape[0])),
            within=index.within.reshape(shape),
            prefix_len=rows.prefix_lens,
            q_len=jnp.full_like(rows.prefix_lens, queries_per_row),
            q_position=rows.q_positions.reshape(shape),
            tail_mask=None if mask is None else mask.reshape(*shape, -1),
            tail_positions=rows.tail_positions,
            window=window,
        )
    if rows.tail_mask is not None or row is None:
        raise ValueError("a tail mask needs rows of equal length; expected queries_per_row")
    prefix = jnp.take(rows.prefix_lens, index.row_idx, mode="clip")
    seen = slot[None, :] <= (prefix + index.within)[:, None]
    if window is not None:
        seen = seen & (rows.q_positions[:, None] - slot < window)
    own = jnp.equal(index.row_idx, row)
    return (seen & own[:, None])[None]


def _absorb(
    partial: _Partial,
    queries: jax.Array,
    kv: jax.Array,
    seen: jax.Array,
) -> _Partial:
    """Add one block to the online softmax: kv [A, C, G, 2 (K, V) or 1, D], seen [A, Q, C]."""
    group = queries.shape[2] // seen.shape[1]
    scores = jnp.einsum("agqd,acgd->agqc", queries, kv[:, :, :, 0])
    seen = jnp.repeat(seen, group, axis=1)[:, None]  # [A, 1, Q * group, C]
    top = jnp.maximum(partial.top, jnp.max(jnp.where(seen, scores, -1e30), axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    fade = jnp.exp(partial.top - top)
    mixed = jnp.einsum("agqc,acgd->agqd", weights, kv[:, :, :, -1])
    return _Partial(
        top=top,
        total=partial.total * fade + jnp.sum(weights, axis=-1),
        mixed=partial.mixed * fade[..., None] + mixed,
    )


def _finish(done: _Partial, sinks: jax.Array | None, *, num_kv: int, group: int) -> jax.Array:
    total = done.total
    if sinks is not None:
        num_queries = total.shape[2] // group
        sink = jnp.tile(sinks.reshape(num_kv, group), (1, num_queries))
        total = total + jnp.exp(sink[None] - done.top)
    return done.mixed / jnp.maximum(total, 1e-30)[..., None]
