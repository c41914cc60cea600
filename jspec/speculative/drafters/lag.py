"""Cache slots of a multi-layer EAGLE layer that lags by s: slot i holds token i + s + 1.

For tokens emitted at positions [p, e) and the id after each, it writes slots [p - s, e - s): the
same ids as a layer without lag, with features from s slots earlier, without slots before the start.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.pytree import pytree, static
from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries
from jspec.spec import indexing
from jspec.speculative.drafter import Emitted, StepBatch
from jspec.speculative.tree import pack_bits


@pytree
class LaggedRows:
    """A layer's queries for the emitted tokens, laid out like Emitted."""

    rows: AttentionMetadata
    source: jax.Array  # i32[T], the emitted token whose following id is the query's input
    row_idx: jax.Array  # i32[T]
    within: jax.Array  # i32[T]
    left_out: jax.Array  # i32[R], leading ids omitted in each row
    begin: jax.Array  # i32[R], index in T of each row's first query
    last: jax.Array  # i32[R], index in T of each row's last query


def lag_behind(emitted: Emitted, *, lag: int, num_known: Int[Array, "R"]) -> LaggedRows:
    """Return the queries of a layer that lags by `lag`.

    num_known: tokens between each row's start and p, at most the largest lag

    In:  two rows, tokens at 7 8 9 and at 1, with num_known 2 and 1; lag 2
    Out: slots 5 6 7 with the ids after 7 8 9; none for row 1: its slot -1 is before the start
    """
    lens = emitted.rows.cu_q_lens[1:] - emitted.rows.cu_q_lens[:-1]
    left_out = jnp.maximum(lag - num_known, 0)
    lens = jnp.maximum(lens - left_out, 0)
    cu_q_lens = jnp.concatenate((jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)))
    num_rows, per_row, size = lens.shape[0], emitted.queries_per_row, emitted.token_ids.shape[0]
    begin, emitted_begin = cu_q_lens[:-1], emitted.rows.cu_q_lens[:-1]
    if per_row is not None:
        begin = emitted_begin = jnp.arange(num_rows, dtype=jnp.int32) * per_row
    index = index_queries(cu_q_lens, size, queries_per_row=per_row)
    start = indexing.lagged_start(emitted.rows.prefix_lens, jnp.minimum(lag, num_known))

    def of_row(x: jax.Array) -> jax.Array:
        return jnp.take(x, index.row_idx, mode="clip")

    return LaggedRows(
        rows=dataclasses.replace(
            emitted.rows,
            prefix_lens=start,
            cu_q_lens=cu_q_lens,
            q_positions=indexing.emitted_position(of_row(start), index.within),
        ),
        source=of_row(emitted_begin + left_out) + index.within,
        row_idx=index.row_idx,
        within=index.within,
        left_out=left_out,
        begin=begin,
        last=jnp.maximum(begin + lens - 1, 0),
    )


def delayed(
    values: Float[Array, "T E"],
    first: Float[Array, "R E"],
    *,
    before: LaggedRows,
    own: LaggedRows,
) -> Float[Array, "T E"]:
    """Shift values of one layer to the layout of the next layer, which lags by one more.

    first: the value at the next layer's first slot in each row, from the previous call. It is
    unused in a row that omits one more id: there both layers start at the same slot.

    In:  values at slots 6 7 8 of a layer, first at slot 5   Out: values at slots 5 6 7
    """
    back = jnp.where(own.left_out == 0, 1, 0)
    place = own.within - jnp.take(back, own.row_idx, mode="clip")
    source = jnp.maximum(jnp.take(before.begin, own.row_idx, mode="clip") + place, 0)
    older = jnp.take(first, own.row_idx, axis=0, mode="clip").astype(values.dtype)
    return jnp.where((place < 0)[:, None], older, jnp.take(values, source, axis=0, mode="clip"))


@pytree
class PathRows:
    """The queries of K paths of n tokens in the layer that lags by n, K per depth, by depth.

    Missing depths (`left_out`: the row is shorter than its lag) come last, where no valid query
    sees them.
    """

    rows: AttentionMetadata
    left_out: jax.Array  # i32[B]
    length: int = static()  # n

    def laid_out(self, x: jax.Array) -> jax.Array:
        by_depth = self._rolled(jnp.swapaxes(x, 1, 2), self.left_out)
        return by_depth.reshape(x.shape[0], -1, x.shape[3])

    def by_path(self, x: jax.Array) -> jax.Array:
        by_depth = x.reshape(x.shape[0], self.length, -1, x.shape[2])
        return jnp.swapaxes(self._rolled(by_depth, -self.left_out), 1, 2)

    def _rolled(self, x: jax.Array, by: jax.Array) -> jax.Array:
        index = (jnp.arange(self.length) + by[:, None]) % self.length
        return jnp.take_along_axis(x, index[:, :, None, None], axis=1, mode="clip")


def path_rows(rows: StepBatch, num_known: Int[Array, "B"], *, layer: int, topk: int) -> PathRows:
    """Return the layer * K queries from slot L - layer on, for the layer with that lag.

    In:  L = 7, layer 2, K = 2
    Out: slots 5 6 7 8 at RoPE 5 5 6 6; a tail of 4, each query sees its own path's slots
    """
    batch, width = rows.seq_lens.shape[0], layer * topk
    known = jnp.minimum(jnp.minimum(num_known, rows.seq_lens), layer)
    start = indexing.lagged_start(rows.seq_lens, known)
    row = jnp.arange(width, dtype=jnp.int32)
    positions = indexing.emitted_position(start[:, None], row // topk)
    is_chain = topk == 1
    sees = (row[:, None] % topk == row % topk) & (row[:, None] >= row)
    mask = pack_bits(jnp.broadcast_to(sees, (batch, width, width)))
    return PathRows(
        rows=AttentionMetadata(
            page_table=rows.page_table,
            window_tables=rows.window_tables,
            prefix_lens=start,
            cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * width,
            q_positions=positions.reshape(-1),
            tail_mask=None if is_chain else mask.reshape(batch * width, -1),
            tail_positions=None if is_chain else positions,
        ),
        left_out=layer - known,
        length=layer,
    )
