"""What a step writes into the rows of the state: pages, whole new rows, the next root and L.

Row 0 is the dummy: padding of a batch writes there, and zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.device.batch import PrefillBatch, Verified
from jspec.device.state import EngineState, RowState, Seen, empty_seen, put_rows
from jspec.sampling.penalties import count_emitted


def grant_pages(
    state: EngineState, grants: jax.Array, window_grants: jax.Array | None
) -> EngineState:
    """page_table[slot, index] = page for each grant; padding grants write 0 to the dummy row."""
    table = _granted(state.rows.page_table, grants)
    return _grant_windows(_with_rows(state, page_table=table), window_grants)


def _grant_windows(state: EngineState, window_grants: jax.Array | None) -> EngineState:
    """The same in the tables of the window spaces, whose order is that of their windows."""
    if window_grants is None:
        return state
    tables = state.rows.window_tables
    granted = {w: _granted(tables[w], window_grants[i]) for i, w in enumerate(sorted(tables))}
    return _with_rows(state, window_tables=granted)


def _granted(table: jax.Array, grants: jax.Array) -> jax.Array:
    slot, index, page = grants[:, 0], grants[:, 1], grants[:, 2]
    return table.at[slot, index].set(page, mode="promise_in_bounds")


def admit(state: EngineState, batch: PrefillBatch) -> EngineState:
    """Writes whole new rows; a chunk that brings none writes to the dummy slot.

    In a window space a row begins with no pages; those of each chunk come with it. The counts of a
    row with a cached prefix are `recall_step`'s.
    """
    to = batch.admitted
    uncounted = jnp.where(batch.starts == 0, to, 0)
    rows = state.rows
    none = {window: jnp.zeros_like(batch.page_table) for window in rows.window_tables}
    state = _with_rows(
        state,
        prompt_lens=put_rows(rows.prompt_lens, to, batch.prompt_lens),
        page_table=put_rows(rows.page_table, to, batch.page_table),
        window_tables=put_rows(rows.window_tables, to, none),
        sampling=put_rows(rows.sampling, to, batch.sampling),
        seen=empty_seen(rows.seen, uncounted),
    )
    return _grant_windows(state, batch.window_grants)


def advance_rows(
    rows: RowState,
    slots: jax.Array,
    verified: Verified,
    *,
    seq_lens: jax.Array,
    counted_from: jax.Array | None,
) -> RowState:
    """The bonus token is the next root; L grows by what was emitted.

    counted_from: the first id of this device's vocabulary shard; None counts nothing.
    """
    live = slots > 0
    seen = rows.seen
    if counted_from is not None:
        most = verified.emitted_ids.shape[1]
        valid = jnp.arange(most) <= verified.num_accepted[:, None]
        counts = count_emitted(
            seen.output_counts,
            jnp.broadcast_to(slots[:, None], verified.emitted_ids.shape),
            verified.emitted_ids,
            valid & live[:, None],
            first_id=counted_from,
        )
        seen = dataclasses.replace(seen, output_counts=counts)
    grown = seq_lens + verified.num_accepted + 1
    return dataclasses.replace(
        rows,
        root_ids=put_rows(rows.root_ids, slots, jnp.where(live, verified.bonus_ids, 0)),
        seq_lens=put_rows(rows.seq_lens, slots, jnp.where(live, grown, 0)),
        seen=seen,
    )


def start_rows(
    rows: RowState, slots: jax.Array, *, roots: jax.Array, ends: jax.Array, seen: Seen
) -> RowState:
    """After a chunk: L is its end, the root what was sampled there (0 if more chunks come)."""
    live = slots > 0
    return dataclasses.replace(
        rows,
        root_ids=put_rows(rows.root_ids, slots, jnp.where(live, roots, 0)),
        seq_lens=put_rows(rows.seq_lens, slots, jnp.where(live, ends, 0)),
        seen=seen,
    )


def _with_rows(state: EngineState, **changes: Any) -> EngineState:
    return dataclasses.replace(state, rows=dataclasses.replace(state.rows, **changes))
