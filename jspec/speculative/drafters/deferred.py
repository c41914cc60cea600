"""Plain steps of an engine that drafts: the drafter is told later, of several tokens at once.

A plain step proposes nothing and has nothing to tell that could not wait: it keeps the token and
the target's features at it, by slot, and leaves the drafter's caches and state as they are. Before
a row drafts again, or when W tokens wait, the drafter is told of all of them by one `advance`, as
of a prompt's chunk. So a plain step costs what it would without a drafter, but for a W-th part of
an advance, and a row can draft again at any time.

A token lies at its position modulo W; how many of them wait is the host's to know, since a plain
round emits exactly one.

    worked example, W = 4, L = 7 and root t7: two plain steps emit t8 and t9
    kept       t7 with its features at 7 % 4 = 3, t8 at 0; L = 9, root t9
    told       t7 t8 from position 7 on, t9 after them: what the drafter would know by now
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jspec.device.batch import CatchUpBatch, Features, Verified
from jspec.device.pytree import pytree
from jspec.device.state import EngineState, put_rows, take_rows
from jspec.pallas_kernels.attention.rows import AttentionRows
from jspec.spec import indexing
from jspec.speculative.drafter import Drafter, Emitted, Needs, RowsInStep
from jspec.speculative.target import Params


@pytree
class Deferred:
    """What waits, by slot and by position modulo W."""

    token_ids: jax.Array  # i32[slots, W]
    features: Features  # [slots, W, .], the target's at these tokens


def empty_deferred(
    num_slots: int, num_tokens: int, *, needs: Needs, hidden_size: int, dtype: DTypeLike
) -> Deferred | None:
    """Nothing waits yet. None where nothing ever will: num_tokens, W, is 0."""
    if not num_tokens:
        return None
    size = hidden_size if needs.hidden else 0
    aux_size = hidden_size * len(needs.aux_layer_ids)
    return Deferred(
        token_ids=jnp.zeros((num_slots, num_tokens), jnp.int32),
        features=Features(
            hidden=jnp.zeros((num_slots, num_tokens, size), dtype),
            aux_hidden=jnp.zeros((num_slots, num_tokens, aux_size), dtype),
        ),
    )


def defer(
    deferred: Deferred, slots: Int[Array, "B"], verified: Verified, rows: RowsInStep
) -> Deferred:
    """Keeps what `advance` would be told of a plain round: the old root and its features."""
    place = rows.seq_lens % deferred.token_ids.shape[1]

    def keep(x: jax.Array, value: jax.Array) -> jax.Array:
        return x.at[slots, place].set(value.astype(x.dtype), mode="promise_in_bounds")

    first = jax.tree.map(lambda x: x[:, 0], verified.features)
    return Deferred(
        token_ids=keep(deferred.token_ids, rows.root_ids),
        features=jax.tree.map(keep, deferred.features, first),
    )


def catch_up_step(
    drafter: Drafter, params: dict[str, Params], state: EngineState, batch: CatchUpBatch
) -> tuple[EngineState, Int[Array, "1 1"]]:
    """Tells the drafter of the last counts[b] committed tokens of each row; none: nothing changes.

    Emits nothing: the output is a zero.
    """
    own = take_rows(state.draft, batch.slots)
    emitted = waiting_tokens(state, batch)
    draft_kv, told = drafter.advance(params["draft"], state.draft_kv, own, emitted)

    def where_told(new: jax.Array, old: jax.Array) -> jax.Array:
        is_told = (batch.counts > 0).reshape(-1, *([1] * (new.ndim - 1)))
        return jnp.where(is_told, new.astype(old.dtype), old)

    draft: Any = put_rows(state.draft, batch.slots, jax.tree.map(where_told, told, own))
    after = dataclasses.replace(state, draft_kv=draft_kv, draft=draft)
    return after, jnp.zeros((1, 1), jnp.int32)


def waiting_tokens(state: EngineState, batch: CatchUpBatch) -> Emitted:
    """The tokens that wait, W a row; those after counts[b] are padding."""
    deferred, rows = state.deferred, state.rows
    width = deferred.token_ids.shape[1]
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
        token_ids=in_order(deferred.token_ids),
        features=jax.tree.map(in_order, deferred.features),
        next_ids=take_rows(rows.root_ids, batch.slots),
        rows=AttentionRows(
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
