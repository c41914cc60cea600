"""Sparse attention over latents (DSA, DeepSeek-V3.2), in XLA: select tokens, then attend to them.

    score of a token = sum over index heads h of w_h * relu(q_h . k), in float32

with the query's q and w and the token's cached index key k. A query attends to the `top_k` tokens
with the highest scores among those that it sees (attention/api.py); the token at the lower slot
wins ties. Queries run in blocks, which bounds the memory.

Packed chunks gather the records that each query selected. Rows of equal length, whose few queries
share one read of the row, mask what is not selected, which is several times faster.

If no row of a call has more than `top_k` tokens, the attention is the dense one, bit for bit. For a
query with few tokens beside longer rows it is so up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.device.pytree import pytree
from jspec.pallas_kernels.attention import xla
from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries, visible_keys
from jspec.pallas_kernels.kv_write.reference import page_slots

BLOCK_QUERIES, BLOCK_KEYS = 16, 512


@pytree
class Index:
    """The output of an indexer for the new tokens, with RoPE applied."""

    queries: jax.Array  # [T, H, D]
    weights: jax.Array  # f32[T, H]
    keys: jax.Array  # [T, D]


@pytree
class _Block:
    """Consecutive queries, of several rows; `given` is whatever goes with them."""

    row: jax.Array  # i32[Q]
    within: jax.Array  # i32[Q]
    valid: jax.Array  # bool[Q]
    tail_mask: jax.Array | None  # u32[Q, words]
    given: tuple[jax.Array, ...]


def all_selected(rows: AttentionMetadata, *, top_k: int) -> Bool[Array, ""]:
    """Return whether no row of the call has more than `top_k` tokens."""
    return jnp.max(_written(rows)) <= top_k


def select(
    index: Index,
    keys: Float[Array, "NP S Dp"],
    rows: AttentionMetadata,
    *,
    queries_per_row: int | None,
    top_k: int,
) -> Int[Array, "T K"] | None:
    """Return the slots that each query attends to, by descending score, then -1. keys: the pool,
    with this call's tokens. If all are selected (or keys is None), -1 alone, not to be read."""
    num_queries, page_size = index.queries.shape[0], keys.shape[1]
    num_slots = rows.page_table.shape[1] * page_size
    if top_k >= num_slots:
        return None
    pad = (0, keys.shape[-1] - index.queries.shape[-1])
    queries = jnp.pad(index.queries.astype(jnp.float32), ((0, 0), (0, 0), pad))

    def select_in(block: _Block) -> Int[Array, "Q K"]:
        scores = _scores(block, keys, rows, queries_per_row=queries_per_row)
        scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 ranks below 0.0
        seen = _seen(block, rows, num_slots, queries_per_row=queries_per_row)
        _, slots = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), top_k)
        is_seen = jnp.take_along_axis(seen, slots, axis=1, mode="clip")
        return jnp.where(is_seen, slots, -1)

    def select_some() -> Int[Array, "T K"]:
        return _in_blocks(select_in, (queries, index.weights), rows, queries_per_row)

    nothing = jnp.full((num_queries, top_k), -1, jnp.int32)
    return jax.lax.cond(all_selected(rows, top_k=top_k), lambda: nothing, select_some)


def attend(
    q: Float[Array, "T H Dq"],
    selected: Int[Array, "T K"],
    pages: Float[Array, "NP S D"],
    rows: AttentionMetadata,
    *,
    scale: float,
    queries_per_row: int | None,
) -> Float[Array, "T H D"]:
    """Attend to the selected slots of a latent pool that has this call's tokens."""
    if queries_per_row is None:
        return _attend_gathered(q, selected, pages, rows, scale=scale)
    num_slots = rows.page_table.shape[1] * pages.shape[1]
    query = jnp.arange(q.shape[0])[:, None]
    slots = jnp.where(selected < 0, num_slots, selected)
    allowed = jnp.zeros((q.shape[0], num_slots + 1), bool)
    allowed = allowed.at[query, slots].set(True, mode="promise_in_bounds")[:, :num_slots]
    how: Any = {"queries_per_row": queries_per_row, "scale": scale, "window": None, "sinks": None}
    return xla.attend(q, pages, rows, **how, allowed=allowed)


def _attend_gathered(
    q: Float[Array, "T H Dq"],
    selected: Int[Array, "T K"],
    pages: Float[Array, "NP S D"],
    rows: AttentionMetadata,
    *,
    scale: float,
) -> Float[Array, "T H D"]:
    pad = (0, pages.shape[-1] - q.shape[-1])
    queries = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), pad)) * scale

    def attend_in(block: _Block) -> Float[Array, "Q H D"]:
        own, slots = block.given
        is_selected = slots >= 0
        row = jnp.broadcast_to(block.row[:, None], slots.shape)
        page, offset = page_slots(
            rows.page_table, row, slots, is_selected, page_size=pages.shape[1]
        )
        records = pages.at[page, offset].get(mode="promise_in_bounds").astype(jnp.float32)
        records = jnp.where(is_selected[..., None], records, 0.0)
        scores = jnp.einsum("qhd,qkd->qhk", own, records)
        scores = jnp.where(is_selected[:, None], scores, -1e30)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(is_selected[:, None], weights, 0.0)
        total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
        return jnp.einsum("qhk,qkd->qhd", weights, records) / total

    out = _in_blocks(attend_in, (queries, selected), rows, None)
    return out.astype(q.dtype)


def _written(rows: AttentionMetadata) -> Int[Array, "B"]:
    return rows.prefix_lens + rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]


def _in_blocks(
    run: Callable[[_Block], jax.Array],
    given: tuple[jax.Array, ...],
    rows: AttentionMetadata,
    queries_per_row: int | None,
) -> jax.Array:
    """Run blocks of queries one after another; with `queries_per_row` a block has whole rows."""
    num_queries = given[0].shape[0]
    of_row = queries_per_row or 1
    size = max(BLOCK_QUERIES // of_row, 1) * of_row
    size = min(size, num_queries)
    count = -(-num_queries // size)
    index = index_queries(rows.cu_q_lens, num_queries, queries_per_row=queries_per_row)
    whole = _Block(
        row=index.row_idx,
        within=index.within,
        valid=index.valid,
        tail_mask=rows.tail_mask,
        given=given,
    )

    def cut(x: jax.Array) -> jax.Array:
        rest = count * size - num_queries
        return jnp.pad(x, ((0, rest), *((0, 0),) * (x.ndim - 1))).reshape(count, size, *x.shape[1:])

    found: jax.Array = jax.lax.map(run, jax.tree.map(cut, whole))
    return found.reshape(-1, *found.shape[2:])[:num_queries]


def _seen(
    block: _Block, rows: AttentionMetadata, num_slots: int, *, queries_per_row: int | None
) -> Bool[Array, "Q C"]:
    def of_row(x: jax.Array) -> jax.Array:
        return jnp.take(x, block.row, axis=0, mode="clip")

    num_queries = block.row.shape[0]
    q_lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    if queries_per_row is not None:
        q_lens = jnp.full_like(q_lens, queries_per_row)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    seen = visible_keys(
        jnp.broadcast_to(slots, (num_queries, num_slots)),
        within=block.within[:, None],
        prefix_len=of_row(rows.prefix_lens),
        q_len=of_row(q_lens),
        q_position=jnp.zeros((num_queries, 1), jnp.int32),  # which only a window reads
        tail_mask=None if block.tail_mask is None else block.tail_mask[:, None],
        tail_positions=None if rows.tail_positions is None else of_row(rows.tail_positions),
        window=None,
    )
    return seen[:, 0] & block.valid[:, None]


def _scores(
    block: _Block,
    keys: Float[Array, "NP S D"],
    rows: AttentionMetadata,
    *,
    queries_per_row: int | None,
) -> Float[Array, "Q C"]:
    """Return the scores of all slots of each query's row; of unwritten ones anything."""
    (queries, weights), written = block.given, _written(rows)
    if queries_per_row is not None:
        row = block.row[::queries_per_row]
        table, ends = (jnp.take(x, row, axis=0, mode="clip") for x in (rows.page_table, written))
        own = (x.reshape(-1, queries_per_row, *x.shape[1:]) for x in (queries, weights))
        return _scores_of_rows(*own, keys=keys, table=table, ends=ends).reshape(len(queries), -1)

    def one_row(row: jax.Array, scores: jax.Array) -> jax.Array:
        table, ends = (jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (rows.page_table, written))
        own = queries[None], weights[None]
        found = _scores_of_rows(*own, keys=keys, table=table, ends=ends)[0]
        return jnp.where((block.row == row)[:, None], found, scores)

    first = jnp.min(jnp.where(block.valid, block.row, written.shape[0]))
    last = jnp.max(jnp.where(block.valid, block.row, -1))
    start = jnp.zeros((queries.shape[0], rows.page_table.shape[1] * keys.shape[1]), jnp.float32)
    return jax.lax.fori_loop(first, last + 1, one_row, start)


def _scores_of_rows(
    queries: Float[Array, "A Q H D"],
    weights: Float[Array, "A Q H"],
    *,
    keys: Float[Array, "NP S D"],
    table: Int[Array, "A P"],
    ends: Int[Array, "A"],
) -> Float[Array, "A Q C"]:
    """Score the queries of each row against its slots, one block of keys of every row at a time."""
    num_rows, pages_per_row = table.shape
    page_size = keys.shape[1]
    block_pages = min(max(BLOCK_KEYS // page_size, 1), pages_per_row)
    size, count = block_pages * page_size, -(-pages_per_row // block_pages)
    table = jnp.pad(table, ((0, 0), (0, count * block_pages - pages_per_row)))

    def one_block(i: jax.Array, scores: jax.Array) -> jax.Array:
        ids = jax.lax.dynamic_slice_in_dim(table, i * block_pages, block_pages, axis=1)
        own = keys.at[ids].get(mode="promise_in_bounds").reshape(num_rows, size, -1)
        heights = jnp.einsum("aqhd,acd->aqhc", queries, own.astype(jnp.float32))
        found = jnp.einsum("aqhc,aqh->aqc", jax.nn.relu(heights), weights)
        return jax.lax.dynamic_update_slice_in_dim(scores, found, i * size, axis=2)

    start = jnp.zeros((*queries.shape[:2], count * size), jnp.float32)
    scores = jax.lax.fori_loop(0, -(-jnp.max(ends) // size), one_block, start)
    return scores[..., : pages_per_row * page_size]
