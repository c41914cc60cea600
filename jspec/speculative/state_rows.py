"""Updates of the state by slot. Padding of a batch writes zeros to slot 0, the dummy."""

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
    """Set page_table[slot, index] = page for each grant (slot, index, page)."""
    table = _granted(state.rows.page_table, grants)
    return _grant_windows(_with_rows(state, page_table=table), window_grants)


def _grant_windows(state: EngineState, window_grants: jax.Array | None) -> EngineState:
    if window_grants is None:
        return state
    tables = state.rows.window_tables
    granted = {w: _granted(tables[w], window_grants[i]) for i, w in enumerate(sorted(tables))}
    return _with_rows(state, window_tables=granted)


def _granted(table: jax.Array, grants: jax.Array) -> jax.Array:
    slot, index, page = grants[:, 0], grants[:, 1], grants[:, 2]
    return table.at[slot, index].set(page, mode="promise_in_bounds")


def admit(state: EngineState, batch: PrefillBatch) -> EngineState:
    """Write the state of new rows; a chunk that admits no row writes to the dummy slot. The counts
    of a row with a cached prefix are already set (`cached_draft_prefill_step`)."""
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
        lora_slots=put_rows(rows.lora_slots, to, batch.lora_slots),
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
    """Make the bonus token the root, and add num_emitted to L. counted_from: first id of the
    shard."""
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
    """Set L to the chunk's end and the root to the token sampled there (0 if more chunks come)."""
    live = slots > 0
    return dataclasses.replace(
        rows,
        root_ids=put_rows(rows.root_ids, slots, jnp.where(live, roots, 0)),
        seq_lens=put_rows(rows.seq_lens, slots, jnp.where(live, ends, 0)),
        seen=seen,
    )


def _with_rows(state: EngineState, **changes: Any) -> EngineState:
    return dataclasses.replace(state, rows=dataclasses.replace(state.rows, **changes))
