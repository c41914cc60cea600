"""What a row must know of its cached tokens, although no forward runs over them.

A row that begins after a cached prefix (scheduler/pages) computes nothing for it: its KV is
there. But what derives from the ids themselves is by slot, and was another row's: for penalties,
which ids the prompt has and, after a retraction, how often each was emitted; what a drafter keeps
of ids, as NGRAM's history. It is built from the whole fill, by this step, before the prefill step
that admits the row. Rows that have no use for it skip it (engine/transfer.py), so it costs nothing
where it is not needed.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.device.batch import Features, RecallBatch
from jspec.device.state import EngineState, empty_seen, put_rows, take_rows
from jspec.pallas_kernels.attention.rows import AttentionRows, index_queries
from jspec.sampling.penalties import see_filled
from jspec.speculative.drafter import Emitted
from jspec.speculative.step import StepProgram
from jspec.speculative.target import Params


def recall_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: RecallBatch
) -> tuple[EngineState, Int[Array, "1 1"]]:
    """Tells each row of ids that stand in it and are cached. Emits nothing: the output is a zero.

    What a row has seen begins with its first piece. A drafter that keeps ids is told by `advance`,
    as of a prompt's chunk, but without features.
    """
    rows, num_ids = state.rows, batch.token_ids.shape[0]
    index = index_queries(batch.cu_q_lens, num_ids, queries_per_row=None)
    positions = jnp.take(batch.starts, index.row_idx, mode="clip") + index.within
    begun = jnp.where(batch.is_first > 0, batch.slots, 0)
    seen = see_filled(
        empty_seen(rows.seen, begun),
        jnp.take(batch.slots, index.row_idx, mode="clip"),
        batch.token_ids,
        index.valid,
        is_prompt=positions < jnp.take(batch.prompt_lens, index.row_idx, mode="clip"),
        first_id=program.target.token_ids()[0],
    )
    draft_kv, draft = state.draft_kv, state.draft
    if program.drafter.drafting.keeps_ids:
        none = jnp.zeros((num_ids, 0))
        emitted = Emitted(
            token_ids=batch.token_ids,
            features=Features(hidden=none, aux_hidden=none),
            next_ids=batch.next_ids,
            rows=AttentionRows(
                page_table=take_rows(rows.page_table, batch.slots),
                prefix_lens=batch.starts,
                cu_q_lens=batch.cu_q_lens,
                q_positions=positions,
            ),
            last=jnp.maximum(batch.cu_q_lens[1:] - 1, 0),
            is_first=batch.is_first > 0,
            sampling=take_rows(rows.sampling, batch.slots),
            queries_per_row=None,
        )
        own = take_rows(draft, batch.slots)
        draft_kv, own = program.drafter.advance(params["draft"], draft_kv, own, emitted)
        draft = put_rows(draft, batch.slots, own)
    after = dataclasses.replace(
        state, draft_kv=draft_kv, draft=draft, rows=dataclasses.replace(rows, seen=seen)
    )
    return after, jnp.zeros((1, 1), jnp.int32)
