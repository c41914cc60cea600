"""The device functions of speculative decoding, pure: (program, params, state, batch) -> (state',
output).

    prefill_step         write the KV of a prompt chunk per row; after the last one, sample the root
    speculative_step     propose -> score -> settle -> advance: emits 1 to S + 1 tokens per row
                         (cut_step.py splits it into three programs for rows with a grammar)
    speculative_rounds   several such steps in sequence, without the host
|
    propose   the drafter guesses a tree of N - 1 tokens after the root
    score     one target forward over all N nodes
    settle    choose the target's token at every node; from the root, walk to the child that equals
              that token as long as one exists (accepted drafts); the last choice is the bonus token
    advance   give the drafter the emitted tokens and the target's features at them

A plain step of an engine with a drafter skips propose and leaves advance pending (`pending.defer`).
A chain is a tree with K = 1, plain decoding a tree of one node, greedy is temperature 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DecodeBatch, DraftTree, PrefillBatch, Scored, SharedPrefixes
from jspec.device.state import EngineState, put_rows, take_rows
from jspec.errors import ConfigError
from jspec.layers.expert_use import ExpertCounter, counted
from jspec.messages.step_options import PLAIN, StepOption, StepOptions
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.penalties import count_emitted
from jspec.speculative.drafter import Drafter, Emitted, NoDrafter, StepBatch, emitted_by
from jspec.speculative.drafters.pending import defer
from jspec.speculative.hidden import without_hidden
from jspec.speculative.outputs import decode_output, prefill_output
from jspec.speculative.roots import sample_roots, see_chunks
from jspec.speculative.state_rows import admit, advance_rows, grant_pages, start_rows
from jspec.speculative.target import KVPool, Params, Target
from jspec.speculative.verify import choose_at_nodes, features_of, score, settle

READ_ALL = frozenset({StepOption.LOGPROBS, StepOption.HIDDEN})  # need all hidden states


@dataclass(frozen=True, slots=True)
class StepProgram:
    target: Target
    drafter: Drafter
    # Plain, or at most the shape that the drafter keeps its state for.
    draft_shape: SpeculativeConfig
    options: StepOptions = PLAIN  # options compiled in

    @property
    def ops(self) -> Ops:
        return self.target.ops

    @property
    def tables(self) -> dict[str, ParamTable]:
        return {"target": self.target.table, "draft": self.drafter.table}

    @property
    def proposer(self) -> Drafter:
        return NoDrafter() if self.is_deferring else self.drafter.of_shape(self.draft_shape)

    @property
    def is_deferring(self) -> bool:
        return self.draft_shape.is_plain and self.drafter.algorithm != Algorithm.NONE

    def __post_init__(self) -> None:
        if not self.is_deferring and self.drafter.algorithm != self.draft_shape.algorithm:
            raise ConfigError(
                f"{type(self.drafter).__name__} drafts for {self.draft_shape.algorithm.name}; "
                f"expected the drafter whose writes the host reserves for"
            )


def speculative_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: DecodeBatch
) -> tuple[EngineState, Int[Array, "B M1"]]:
    """Run one verification for each row of the batch. params: {"target": ..., "draft": ...}. Return
    the next state and the packed `outputs.decode_output`."""
    state, tree = propose_tree(program, params, state, batch)
    state, scored = score_tree(program, params, state, batch.slots, tree, shared=batch.shared)
    return settle_tree(program, params, state, batch.slots, tree, scored)


def propose_tree(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: DecodeBatch
) -> tuple[EngineState, DraftTree]:
    state = grant_pages(state, batch.grants, batch.window_grants)
    rows = _rows_in_step(state, batch.slots, batch.shared)
    if program.proposer.needs.caches:
        rows = dataclasses.replace(rows, target_kv=state.kv)
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
    """Run the target over all nodes; it writes their KV to the slots after L."""
    needs = program.drafter.needs
    if StepOption.HIDDEN in program.options:
        needs = dataclasses.replace(needs, hidden=True)
    counter = ExpertCounter.of(state.expert_counts)
    kv, logits, features = score(
        program.target,
        params["target"],
        state.kv,
        tree,
        _rows_in_step(state, slots, shared),
        needs=needs,
        draft_shape=program.draft_shape,
        counter=counter,
    )
    state = dataclasses.replace(state, kv=kv, expert_counts=counted(state.expert_counts, counter))
    return state, Scored(logits=logits, features=features)


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
    """Settle and advance. allowed: bit mask of the tokens that a grammar allows after each node."""
    draft_shape, target = program.draft_shape, program.target
    rows = _rows_in_step(state, slots)
    target_ids = choose_at_nodes(
        target,
        scored.logits,
        tree,
        rows,
        draft_shape=draft_shape,
        prompt_lens=take_rows(state.rows.prompt_lens, slots),
        filtered=StepOption.FILTERS in program.options,
        seen=take_rows(state.rows.seen, slots) if StepOption.PENALTIES in program.options else None,
        allowed=allowed,
    )
    kv, verified = settle(
        tree,
        target_ids,
        scored.features,
        state.kv,
        rows,
        draft_shape=draft_shape,
        ops=program.ops,
        groups=target.cache_groups,
    )
    for_drafter = verified if program.drafter.needs.hidden else without_hidden(verified)
    if program.is_deferring:
        state = dataclasses.replace(state, pending=defer(state.pending, slots, for_drafter, rows))
    else:
        emitted = emitted_by(for_drafter, rows, is_chain=draft_shape.is_chain)
        state = _advance_drafter(program, params, state, slots, emitted)
    after = advance_rows(
        state.rows,
        slots,
        verified,
        seq_lens=rows.seq_lens,
        counted_from=target.token_ids()[0] if StepOption.PENALTIES in program.options else None,
    )
    output = decode_output(
        target,
        scored,
        verified,
        draft_shape=draft_shape,
        options=program.options,
        sampling=rows.sampling,
    )
    return dataclasses.replace(state, kv=kv, rows=after), output


def _advance_drafter(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    slots: Int[Array, "B"],
    emitted: Emitted,
) -> EngineState:
    draft = take_rows(state.draft, slots)
    kept, draft = program.drafter.advance(params["draft"], state.draft_kv, draft, emitted)
    return dataclasses.replace(state, draft_kv=kept, draft=put_rows(state.draft, slots, draft))


def _rows_in_step(
    state: EngineState, slots: Int[Array, "B"], shared: SharedPrefixes | None = None
) -> StepBatch:
    return StepBatch(
        shared=shared,
        slots=slots,
        root_ids=take_rows(state.rows.root_ids, slots),
        seq_lens=take_rows(state.rows.seq_lens, slots),
        page_table=take_rows(state.rows.page_table, slots),
        window_tables=take_rows(state.rows.window_tables, slots),
        sampling=take_rows(state.rows.sampling, slots),
        lora_slots=take_rows(state.rows.lora_slots, slots),
    )


def speculative_rounds(
    program: StepProgram,
    params: dict[str, Params],
    state: EngineState,
    batch: DecodeBatch,
    *,
    num_rounds: int,
) -> tuple[EngineState, Int[Array, "_ M1"]]:
    """Run num_rounds steps, whose pages are granted; returns i32[num_rounds * B, 1 + M]."""
    # Unrolled: XLA for GPUs makes one CUDA graph of all rounds, but one per round of a loop, which
    # is slower on a CPU, too (decision 8).
    outputs = []
    for _ in range(num_rounds):
        state, output = speculative_step(program, params, state, batch)
        outputs.append(output)
        batch = dataclasses.replace(batch, grants=batch.grants[:0], window_grants=None)
    return state, jnp.concatenate(outputs, axis=0)


def prefill_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: PrefillBatch
) -> tuple[EngineState, Int[Array, "R 2"]]:
    """Write the target and draft KV of a chunk per row. Returns the state and
    `outputs.prefill_output`."""
    target = program.target
    state = admit(state, batch)
    ends, rows = _chunk_rows(state, batch)
    last = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    counter = ExpertCounter.of(state.expert_counts)
    kv, hidden, aux, final = _score_chunks(
        program, params, state, batch, rows, last, counter=counter
    )
    state = dataclasses.replace(state, expert_counts=counted(state.expert_counts, counter))
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
        options=program.options,
        allowed=batch.allowed,
    )
    is_final = batch.is_final > 0
    roots = jnp.where(is_final, roots, 0)
    emitted = Emitted(
        token_ids=batch.token_ids,
        features=features_of(hidden, aux, needs=program.drafter.needs),
        next_ids=jnp.where(is_final, roots, batch.next_ids),
        rows=dataclasses.replace(rows, slots=None),  # no drafter has caches by slot
        last=last,
        is_first=batch.admitted > 0,
        sampling=sampling,
        queries_per_row=None,
    )
    state = _advance_drafter(program, params, state, batch.slots, emitted)
    first_id = target.token_ids()[0]
    counts = count_emitted(seen.output_counts, batch.slots, roots, is_final, first_id=first_id)
    seen = dataclasses.replace(seen, output_counts=counts)
    after = start_rows(state.rows, batch.slots, roots=roots, ends=ends, seen=seen)
    output = prefill_output(
        target,
        params["target"],
        batch,
        emitted,
        options=program.options,
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
    rows: AttentionMetadata,
    last: Int[Array, "R"],
    *,
    counter: ExpertCounter | None,
) -> tuple[KVPool, jax.Array, jax.Array, jax.Array]:
    """Return KV, hidden states (only each row's last if no others are read), aux, last hidden."""
    reads_all = program.drafter.needs.hidden or bool(READ_ALL.intersection(program.options))
    hidden, aux, kv = program.target.forward(
        params["target"],
        batch.token_ids,
        state.kv,
        rows,
        queries_per_row=None,
        kept=None if reads_all else last,
        lora_slots=take_rows(state.rows.lora_slots, batch.slots),
        counter=counter,
    )
    final = jnp.take(hidden, last, axis=0, mode="clip") if reads_all else hidden
    return kv, hidden, aux, final


def _chunk_rows(state: EngineState, batch: PrefillBatch) -> tuple[jax.Array, AttentionMetadata]:
    ends = batch.starts + batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    index = index_queries(batch.cu_q_lens, batch.token_ids.shape[0], queries_per_row=None)
    return ends, AttentionMetadata(
        page_table=take_rows(state.rows.page_table, batch.slots),
        window_tables=take_rows(state.rows.window_tables, batch.slots),
        slots=batch.slots,
        prefix_lens=batch.starts,
        cu_q_lens=batch.cu_q_lens,
        q_positions=jnp.take(batch.starts, index.row_idx, mode="clip") + index.within,
    )
