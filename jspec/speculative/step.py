"""Speculative decoding, whole: the functions that run on the device.

    prefill_step         KV of a chunk of each prompt; behind the last chunk, the first token (root)
    speculative_step     propose -> score -> settle -> advance: from 1 to S + 1 tokens a row
    speculative_rounds   several such steps, one behind the other, without the host

    propose   the drafter guesses a tree of N - 1 tokens behind the root
    score     one target forward over all N nodes
    settle    the target's own token at every node; the walk from the root along equal tokens is
              what was guessed right, and the token behind it is the bonus
    advance   the drafter is told what was emitted, with the target's features

All are pure: (program, params, state, batch) -> (state', output). A chain is a tree with K = 1,
plain decoding a tree of one node, greedy is temperature 0: there is no other path through here.
Which model is served, and how drafts are made, is not known here: `target.py`, `drafter.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core.batch import DecodeBatch, PrefillBatch, Verified, pack_output
from jspec.core.config import SpeculativeConfig
from jspec.core.errors import ConfigError
from jspec.core.features import PLAIN, Feature, StepFeatures
from jspec.core.layout import output_columns
from jspec.core.state import EngineState, RowState, SamplingRows, put_rows, take_rows
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.rows import AttentionRows, index_queries
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.choose import choose
from jspec.sampling.penalties import count_emitted, penalize
from jspec.speculative.drafter import Drafter, Emitted, RowsInStep, emitted_by
from jspec.speculative.target import Params, Target
from jspec.speculative.verify import (
    choose_at_nodes,
    features_of,
    no_tree,
    score,
    settle,
    target_logits_at,
)


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Everything static about a step. features: what is compiled in."""

    target: Target
    drafter: Drafter
    spec: SpeculativeConfig
    features: StepFeatures = PLAIN

    @property
    def ops(self) -> Ops:
        return self.target.ops

    @property
    def tables(self) -> dict[str, ParamTable]:
        """The weights that the program's params hold."""
        return {"target": self.target.table, "draft": self.drafter.table}

    def __post_init__(self) -> None:
        if self.drafter.drafting != self.spec.algorithm.drafting:
            raise ConfigError(
                f"{type(self.drafter).__name__} drafts for {self.spec.algorithm.value}; expected "
                f"the drafter whose writes the host reserves for"
            )
        if not self.drafter.drafting.on_device:
            raise ConfigError(
                f"{type(self.drafter).__name__} proposes on the host; expected a drafter that "
                f"proposes inside the step"
            )


def speculative_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: DecodeBatch
) -> tuple[EngineState, Int[Array, "B M1"]]:
    """One verification for each row of the batch.

    params: {"target": ..., "draft": ...}. Returns the next state and, packed for one transfer,
    `core.layout.output_columns` of each row: i32[B, 1 + M].
    """
    spec, target = program.spec, program.target
    state = _grant_pages(state, batch.grants, batch.window_grants)
    slots = batch.slots
    rows = RowsInStep(
        root_ids=take_rows(state.rows.root_ids, slots),
        seq_lens=take_rows(state.rows.seq_lens, slots),
        page_table=take_rows(state.rows.page_table, slots),
        window_tables=take_rows(state.rows.window_tables, slots),
        sampling=take_rows(state.rows.sampling, slots),
    )
    draft = take_rows(state.draft, slots)
    draft_kv, tree = program.drafter.propose(params["draft"], state.draft_kv, draft, rows)
    kv, logits, features = score(
        target,
        params["target"],
        state.kv,
        tree,
        rows,
        needs=program.drafter.needs,
        spec=spec,
    )
    target_ids = choose_at_nodes(
        target,
        logits,
        tree,
        rows,
        spec=spec,
        prompt_lens=take_rows(state.rows.prompt_lens, slots),
        filtered=Feature.FILTERS in program.features,
        output_counts=(
            take_rows(state.rows.output_counts, slots)
            if Feature.PENALTIES in program.features
            else None
        ),
    )
    groups = target.cache_groups
    kv, verified = settle(
        tree, target_ids, features, kv, rows, spec=spec, ops=program.ops, groups=groups
    )
    emitted = emitted_by(verified, rows)
    draft_kv, draft = program.drafter.advance(params["draft"], draft_kv, draft, emitted)
    after = _advance_rows(program, state.rows, slots, verified, rows.seq_lens)
    next_state = EngineState(
        kv=kv, draft_kv=draft_kv, draft=put_rows(state.draft, slots, draft), rows=after
    )
    return next_state, pack_output(
        output_columns(spec.max_emitted),
        {"num_emitted": verified.num_accepted + 1, "emitted_ids": verified.emitted_ids},
    )


def speculative_rounds(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    batch: DecodeBatch,
    *,
    num_rounds: int,
) -> tuple[EngineState, Int[Array, "_ M1"]]:
    """`num_rounds` steps, each from where the last one ended: i32[num_rounds * B, 1 + M], by round.

    The host grants pages for all of them before the first.
    """
    # Unrolled: XLA for an H200 makes one CUDA graph of all rounds, of a loop one graph a round
    # inside a while. On a CPU a loop's rounds ran slower, too. Neither copies a pool (decision 8).
    outputs = []
    for _ in range(num_rounds):
        state, output = speculative_step(program, params, state, batch)
        outputs.append(output)
        batch = dataclasses.replace(batch, grants=batch.grants[:0], window_grants=None)
    return state, jnp.concatenate(outputs, axis=0)


def prefill_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: PrefillBatch
) -> tuple[EngineState, Int[Array, "R 2"]]:
    """KV of one chunk of each row, in target and draft; the root behind a final chunk.

    Returns the next state and `core.layout.output_columns` of each row, i32[R, 2]: one id, the
    root, is emitted behind a final chunk.
    """
    target = program.target
    state = _admit(state, batch)
    ends, rows = _chunk_rows(state, batch)
    hidden, aux, kv = target.forward(
        params["target"], batch.token_ids, state.kv, rows, queries_per_row=None
    )
    sampling = take_rows(state.rows.sampling, batch.slots)
    prompt_lens = take_rows(state.rows.prompt_lens, batch.slots)
    counts = _count_resumed(target, state, batch, rows, prompt_lens=prompt_lens)
    last = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    roots = _sample_roots(
        target,
        target_logits_at(target, params["target"], hidden, last),
        sampling,
        counts=take_rows(counts, batch.slots),
        prompt_lens=prompt_lens,
        ends=ends,
        features=program.features,
    )
    is_final = batch.is_final > 0
    roots = jnp.where(is_final, roots, 0)
    emitted = Emitted(
        token_ids=batch.token_ids,
        features=features_of(hidden, aux, needs=program.drafter.needs),
        next_ids=jnp.where(is_final, roots, batch.next_ids),
        rows=rows,
        last=last,
        is_first=_is_first(program.drafter, batch),
        sampling=sampling,
        queries_per_row=None,
    )
    draft_kv, draft = program.drafter.advance(
        params["draft"], state.draft_kv, take_rows(state.draft, batch.slots), emitted
    )
    first_id = target.token_ids()[0]
    counts = count_emitted(counts, batch.slots, roots, is_final, first_id=first_id)
    after = _start_rows(state.rows, batch.slots, roots=roots, ends=ends, counts=counts)
    next_state = EngineState(
        kv=kv, draft_kv=draft_kv, draft=put_rows(state.draft, batch.slots, draft), rows=after
    )
    return next_state, pack_output(
        output_columns(1), {"num_emitted": batch.is_final, "emitted_ids": roots[:, None]}
    )


def _chunk_rows(state: EngineState, batch: PrefillBatch) -> tuple[jax.Array, AttentionRows]:
    """Where each chunk ends, i32[R], and where its tokens lie."""
    ends = batch.starts + batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    index = index_queries(batch.cu_q_lens, batch.token_ids.shape[0], queries_per_row=None)
    return ends, AttentionRows(
        page_table=take_rows(state.rows.page_table, batch.slots),
        window_tables=take_rows(state.rows.window_tables, batch.slots),
        prefix_lens=batch.starts,
        cu_q_lens=batch.cu_q_lens,
        q_positions=jnp.take(batch.starts, index.row_idx, mode="clip") + index.within,
    )


def _count_resumed(
    target: Target,
    state: EngineState,
    batch: PrefillBatch,
    rows: AttentionRows,
    *,
    prompt_lens: jax.Array,
) -> jax.Array:
    """output_counts with the tokens behind the prompt: a row that was retracted reads its own."""
    index = index_queries(batch.cu_q_lens, batch.token_ids.shape[0], queries_per_row=None)
    slots = jnp.take(batch.slots, index.row_idx, mode="clip")
    prompt = jnp.take(prompt_lens, index.row_idx, mode="clip")
    return count_emitted(
        state.rows.output_counts,
        slots,
        batch.token_ids,
        index.valid & (rows.q_positions >= prompt),
        first_id=target.token_ids()[0],
    )


def _is_first(drafter: Drafter, batch: PrefillBatch) -> jax.Array:
    """Rows of whose tenancy the drafter was told nothing yet: recall_step tells one that keeps ids
    of a cached prefix."""
    is_new = batch.admitted > 0
    return is_new & (batch.starts == 0) if drafter.drafting.keeps_ids else is_new


def _sample_roots(
    target: Target,
    logits: jax.Array,
    sampling: SamplingRows,
    *,
    counts: jax.Array,
    prompt_lens: jax.Array,
    ends: jax.Array,
    features: StepFeatures,
) -> jax.Array:
    """The token behind each chunk, i32[R]: position `ends`, with that position's noise."""
    token_ids = target.token_ids()
    if Feature.PENALTIES in features:
        logits = penalize(
            logits,
            sampling,
            token_ids=token_ids,
            output_counts=counts,
            tokens_on_path=no_tree(sampling),
            num_output=(ends - prompt_lens)[:, None],
        )
    chosen = choose(
        logits,
        sampling,
        positions=ends[:, None],
        token_ids=token_ids,
        filtered=Feature.FILTERS in features,
        shard=target.shard,
        ops=Ops(),
    )
    return chosen[:, 0]


def _grant_pages(
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


def _admit(state: EngineState, batch: PrefillBatch) -> EngineState:
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
        output_counts=rows.output_counts.at[uncounted].set(0, mode="promise_in_bounds"),
    )
    return _grant_windows(state, batch.window_grants)


def _advance_rows(
    program: StepProgram,
    rows: RowState,
    slots: jax.Array,
    verified: Verified,
    seq_lens: jax.Array,
) -> RowState:
    """The bonus token is the next root; L grows by what was emitted."""
    live = slots > 0
    counts = rows.output_counts
    if Feature.PENALTIES in program.features:
        most = verified.emitted_ids.shape[1]
        valid = jnp.arange(most) <= verified.num_accepted[:, None]
        counts = count_emitted(
            counts,
            jnp.broadcast_to(slots[:, None], verified.emitted_ids.shape),
            verified.emitted_ids,
            valid & live[:, None],
            first_id=program.target.token_ids()[0],
        )
    grown = seq_lens + verified.num_accepted + 1
    return dataclasses.replace(
        rows,
        root_ids=put_rows(rows.root_ids, slots, jnp.where(live, verified.bonus_ids, 0)),
        seq_lens=put_rows(rows.seq_lens, slots, jnp.where(live, grown, 0)),
        output_counts=counts,
    )


def _start_rows(
    rows: RowState, slots: jax.Array, *, roots: jax.Array, ends: jax.Array, counts: jax.Array
) -> RowState:
    """Behind a chunk: L is its end, the root what was sampled there (0 if more chunks come)."""
    live = slots > 0
    return dataclasses.replace(
        rows,
        root_ids=put_rows(rows.root_ids, slots, jnp.where(live, roots, 0)),
        seq_lens=put_rows(rows.seq_lens, slots, jnp.where(live, ends, 0)),
        output_counts=counts,
    )


def _with_rows(state: EngineState, **changes: Any) -> EngineState:
    return dataclasses.replace(state, rows=dataclasses.replace(state.rows, **changes))
