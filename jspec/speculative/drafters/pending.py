"""Pending drafter input of plain steps, given to the drafter in batches.

A plain step of an engine with a drafter stores the token and the target's features at it, at its
position modulo W. Before a row drafts again, or when W tokens are pending, one `advance` processes
all of them, like a prompt chunk. The host tracks how many are pending.

    worked example, W = 4, L = 7 and root t7: two plain steps emit t8 and t9
    stored     t7 with its features at 7 % 4 = 3, t8 at 0; L = 9, root t9
    advance    t7 t8 from position 7 on, before t9: the same as after two drafting steps
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jspec.device.batch import DraftPrefillBatch, Features, Verified
from jspec.device.pytree import pytree
from jspec.device.state import EngineState, put_rows, take_rows
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.spec import indexing
from jspec.speculative.drafter import Drafter, Emitted, Needs, StepBatch
from jspec.speculative.target import Params


@pytree
class Pending:
    """Pending tokens, by slot and by position modulo W."""

    token_ids: jax.Array  # i32[slots, W]
    features: Features  # [slots, W, .], the target's features at these tokens


def empty_pending(
    num_slots: int, num_tokens: int, *, needs: Needs, hidden_size: int, dtype: DTypeLike
) -> Pending | None:
    if not num_tokens:
        return None
    size = hidden_size if needs.hidden else 0
    aux_size = hidden_size * len(needs.aux_layer_ids)
    return Pending(
        token_ids=jnp.zeros((num_slots, num_tokens), jnp.int32),
        features=Features(
            hidden=jnp.zeros((num_slots, num_tokens, size), dtype),
            aux_hidden=jnp.zeros((num_slots, num_tokens, aux_size), dtype),
        ),
    )


def defer(pending: Pending, slots: Int[Array, "B"], verified: Verified, rows: StepBatch) -> Pending:
    """Store the input of a plain round's `advance`: the old root and its features."""
    place = rows.seq_lens % pending.token_ids.shape[1]

    def keep(x: jax.Array, value: jax.Array) -> jax.Array:
        return x.at[slots, place].set(value.astype(x.dtype), mode="promise_in_bounds")

    first = jax.tree.map(lambda x: x[:, 0], verified.features)
    return Pending(
        token_ids=keep(pending.token_ids, rows.root_ids),
        features=jax.tree.map(keep, pending.features, first),
    )


def draft_prefill_step(
    drafter: Drafter, params: dict[str, Params], state: EngineState, batch: DraftPrefillBatch
) -> tuple[EngineState, Int[Array, "1 1"]]:
    """Advance the drafter over the last counts[b] committed tokens of each row; outputs a zero."""
    own = take_rows(state.draft, batch.slots)
    emitted = waiting_tokens(state, batch)
    draft_kv, advanced = drafter.advance(params["draft"], state.draft_kv, own, emitted)

    def where_pending(new: jax.Array, old: jax.Array) -> jax.Array:
        has_pending = (batch.counts > 0).reshape(-1, *([1] * (new.ndim - 1)))
        return jnp.where(has_pending, new.astype(old.dtype), old)

    draft: Any = put_rows(state.draft, batch.slots, jax.tree.map(where_pending, advanced, own))
    after = dataclasses.replace(state, draft_kv=draft_kv, draft=draft)
    return after, jnp.zeros((1, 1), jnp.int32)


def waiting_tokens(state: EngineState, batch: DraftPrefillBatch) -> Emitted:
    """Return the pending tokens, W per row, padding after counts[b]."""
    pending, rows = state.pending, state.rows
    width = pending.token_ids.shape[1]
    num_rows = batch.slots.shape[0]
    start = jnp.maximum(take_rows(rows.seq_lens, batch.slots) - batch.counts, 0)
    place = jnp.arange(width, dtype=jnp.int32)
    positions = indexing.emitted_position(start[:, None], place)

    def in_order(x: jax.Array) -> jax.Array:
        found = x.at[batch.slots[:, None], positions % width].get(mode="promise_in_bounds")
        return found.reshape(num_rows * width, *x.shape[2:])

    ends = jnp.cumsum(batch.counts, dtype=jnp.int32)
    first = jnp.arange(num_rows, dtype=jnp.int32) * width
    return Emitted(
        token_ids=in_order(pending.token_ids),
        features=jax.tree.map(in_order, pending.features),
        next_ids=take_rows(rows.root_ids, batch.slots),
        rows=AttentionMetadata(
            page_table=take_rows(rows.page_table, batch.slots),
            window_tables=take_rows(rows.window_tables, batch.slots),
            prefix_lens=start,
            cu_q_lens=jnp.concatenate((jnp.zeros((1,), jnp.int32), ends)),
            q_positions=positions.reshape(-1),
        ),
        last=first + jnp.maximum(batch.counts - 1, 0),
        is_first=jnp.zeros((num_rows,), bool),
        sampling=take_rows(rows.sampling, batch.slots),
        queries_per_row=width,
    )
