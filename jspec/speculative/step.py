"""Speculative decoding, whole: the functions that run on the device.

    prefill_step         KV of a chunk of each prompt; after the last chunk, the first token (root)
    speculative_step     propose -> score -> settle -> advance: from 1 to S + 1 tokens a row
                         (cut_step.py: the same in three programs, for rows with a grammar)
    speculative_rounds   several such steps, one after the other, without the host

    propose   the drafter guesses a tree of N - 1 tokens after the root
    score     one target forward over all N nodes
    settle    the target's own token at every node; the walk from the root along equal tokens is
              what was guessed right, and the token after it is the bonus
    advance   the drafter is told what was emitted, with the target's features; a plain step of an
              engine that drafts leaves out the first and puts off the last (`deferred`)

All are pure: (program, params, state, batch) -> (state', output). A chain is a tree with K = 1,
plain decoding a tree of one node, greedy is temperature 0: there is no other path through here.
Which model is served, and how drafts are made, is not known here: `target.py`, `drafter.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jspec.config.drafting import NO_DRAFTING
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DecodeBatch, DraftTree, PrefillBatch, Scored, SharedPrefixes
from jspec.device.state import EngineState, put_rows, take_rows
from jspec.errors import ConfigError
from jspec.messages.features import PLAIN, Feature, StepFeatures
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.rows import AttentionRows, index_queries
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.penalties import count_emitted
from jspec.speculative.drafter import Drafter, Emitted, NoDrafter, RowsInStep, emitted_by
from jspec.speculative.drafters.deferred import defer
from jspec.speculative.hidden import without_hidden
from jspec.speculative.outputs import decode_output, prefill_output
from jspec.speculative.roots import sample_roots, see_chunks
from jspec.speculative.state_rows import admit, advance_rows, grant_pages, start_rows
from jspec.speculative.target import KVPool, Params, Target
from jspec.speculative.verify import choose_at_nodes, features_of, score, settle

READ_ALL = frozenset({Feature.LOGPROBS, Feature.HIDDEN})  # something is said of every prompt token


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Everything static about a step. features: what is compiled in. spec: its shape, which may be
    smaller than the one that the drafter keeps its state for, or plain."""

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

    @property
    def proposer(self) -> Drafter:
        """The drafter as it proposes in this shape."""
        return NoDrafter() if self.is_deferring else self.drafter.of_shape(self.spec)

    @property
    def is_deferring(self) -> bool:
        """Whether it is a plain step of an engine that drafts: its drafter is told later."""
        return self.spec.is_plain and self.drafter.drafting != NO_DRAFTING

    def __post_init__(self) -> None:
        if not self.is_deferring and self.drafter.drafting != self.spec.algorithm.drafting:
            raise ConfigError(
                f"{type(self.drafter).__name__} drafts for {self.spec.algorithm.value}; expected "
                f"the drafter whose writes the host reserves for"
            )


def speculative_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: DecodeBatch
) -> tuple[EngineState, Int[Array, "B M1"]]:
    """One verification for each row of the batch.

    params: {"target": ..., "draft": ...}. Returns the next state and, packed for one transfer,
    `outputs.decode_output` of each row: i32[B, 1 + M], or more with log-probabilities.
    """
    state, tree = propose_tree(program, params, state, batch)
    state, scored = score_tree(program, params, state, batch.slots, tree, shared=batch.shared)
    return settle_tree(program, params, state, batch.slots, tree, scored)


def propose_tree(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: DecodeBatch
) -> tuple[EngineState, DraftTree]:
    """The state with the rows' new pages, and what the drafter guesses after their roots."""
    state = grant_pages(state, batch.grants, batch.window_grants)
    rows = _rows_in_step(state, batch.slots, batch.shared)
    draft = take_rows(state.draft, batch.slots)
    draft_kv, tree = program.proposer.propose(params["draft"], state.draft_kv, draft, rows)
    return dataclasses.replace(state, draft_kv=draft_kv), tree


def score_tree(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    slots: Int[Array, "B"],
    tree: DraftTree,
    *,
    shared: SharedPrefixes | None = None,
) -> tuple[EngineState, Scored]:
    """The target's forward over all nodes, whose KV lies after L from then on."""
    needs = program.drafter.needs
    if Feature.HIDDEN in program.features:
        needs = dataclasses.replace(needs, hidden=True)
    kv, logits, features = score(
        program.target,
        params["target"],
        state.kv,
        tree,
        _rows_in_step(state, slots, shared),
        needs=needs,
        spec=program.spec,
    )
    return dataclasses.replace(state, kv=kv), Scored(logits=logits, features=features)


def settle_tree(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    slots: Int[Array, "B"],
    tree: DraftTree,
    scored: Scored,
    *,
    allowed: UInt32[Array, "B N W"] | None = None,
) -> tuple[EngineState, Int[Array, "B M1"]]:
    """settle and advance. allowed: what a grammar allows after each node; None: all."""
    spec, target = program.spec, program.target
    rows = _rows_in_step(state, slots)
    target_ids = choose_at_nodes(
        target,
        scored.logits,
        tree,
        rows,
        spec=spec,
        prompt_lens=take_rows(state.rows.prompt_lens, slots),
        filtered=Feature.FILTERS in program.features,
        seen=take_rows(state.rows.seen, slots) if Feature.PENALTIES in program.features else None,
        allowed=allowed,
    )
    kv, verified = settle(
        tree,
        target_ids,
        scored.features,
        state.kv,
        rows,
        spec=spec,
        ops=program.ops,
        groups=target.cache_groups,
    )
    told = verified if program.drafter.needs.hidden else without_hidden(verified)
    if program.is_deferring:
        state = dataclasses.replace(state, deferred=defer(state.deferred, slots, told, rows))
    else:
        emitted = emitted_by(told, rows, is_chain=spec.topk == 1)
        state = _tell_drafter(program, params, state, slots, emitted)
    after = advance_rows(
        state.rows,
        slots,
        verified,
        seq_lens=rows.seq_lens,
        counted_from=target.token_ids()[0] if Feature.PENALTIES in program.features else None,
    )
    output = decode_output(
        target,
        scored,
        verified,
        spec=spec,
        features=program.features,
        sampling=rows.sampling,
    )
    return dataclasses.replace(state, kv=kv, rows=after), output


def _tell_drafter(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    slots: Int[Array, "B"],
    emitted: Emitted,
) -> EngineState:
    """advance: the drafter's KV and rows after what was emitted."""
    draft = take_rows(state.draft, slots)
    kept, draft = program.drafter.advance(params["draft"], state.draft_kv, draft, emitted)
    return dataclasses.replace(state, draft_kv=kept, draft=put_rows(state.draft, slots, draft))


def _rows_in_step(
    state: EngineState, slots: Int[Array, "B"], shared: SharedPrefixes | None = None
) -> RowsInStep:
    return RowsInStep(
        shared=shared,
        root_ids=take_rows(state.rows.root_ids, slots),
        seq_lens=take_rows(state.rows.seq_lens, slots),
        page_table=take_rows(state.rows.page_table, slots),
        window_tables=take_rows(state.rows.window_tables, slots),
        sampling=take_rows(state.rows.sampling, slots),
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
    """KV of one chunk of each row, in target and draft; the root after a final chunk.

    Returns the next state and `outputs.prefill_output`: one id, the root, is emitted after a final
    chunk.
    """
    target = program.target
    state = admit(state, batch)
    ends, rows = _chunk_rows(state, batch)
    last = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    kv, hidden, aux, final = _score_chunks(program, params, state, batch, rows, last)
    sampling = take_rows(state.rows.sampling, batch.slots)
    prompt_lens = take_rows(state.rows.prompt_lens, batch.slots)
    seen = see_chunks(target, state, batch, rows, prompt_lens=prompt_lens)
    logits = target.logits(params["target"], final)[:, None]
    roots = sample_roots(
        target,
        logits,
        sampling,
        seen=take_rows(seen, batch.slots),
        prompt_lens=prompt_lens,
        ends=ends,
        features=program.features,
        allowed=batch.allowed,
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
    state = _tell_drafter(program, params, state, batch.slots, emitted)
    first_id = target.token_ids()[0]
    counts = count_emitted(seen.output_counts, batch.slots, roots, is_final, first_id=first_id)
    seen = dataclasses.replace(seen, output_counts=counts)
    after = start_rows(state.rows, batch.slots, roots=roots, ends=ends, seen=seen)
    output = prefill_output(
        target,
        params["target"],
        batch,
        emitted,
        features=program.features,
        roots=roots,
        logits=logits,
        hidden=hidden,
        prompt_lens=prompt_lens,
    )
    return dataclasses.replace(state, kv=kv, rows=after), output


def _score_chunks(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    batch: PrefillBatch,
    rows: AttentionRows,
    last: Int[Array, "R"],
) -> tuple[KVPool, jax.Array, jax.Array, jax.Array]:
    """The target's forward over the chunks: KV, hidden and auxiliary states, and the hidden states
    of each row's last token, which are all there are where nobody reads the others."""
    reads_all = program.drafter.needs.hidden or bool(READ_ALL.intersection(program.features))
    hidden, aux, kv = program.target.forward(
        params["target"],
        batch.token_ids,
        state.kv,
        rows,
        queries_per_row=None,
        kept=None if reads_all else last,
    )
    final = jnp.take(hidden, last, axis=0, mode="clip") if reads_all else hidden
    return kv, hidden, aux, final


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


def _is_first(drafter: Drafter, batch: PrefillBatch) -> jax.Array:
    """Rows of whose tenancy the drafter was told nothing yet: recall_step tells one that keeps ids
    of a cached prefix."""
    is_new = batch.admitted > 0
    return is_new & (batch.starts == 0) if drafter.drafting.keeps_ids else is_new
