"""Speculative decoding, whole: the functions that run on the device.

    prefill_step         KV of a chunk of each prompt; behind the last chunk, the first token (root)
    speculative_step     propose -> score -> settle -> extend: from 1 to S + 1 tokens a row
    speculative_rounds   several such steps, one behind the other, without the host

    propose   the drafter guesses a tree of N - 1 tokens behind the root
    score     one target forward over all N nodes
    settle    the target's own token at every node; the walk from the root along equal tokens is
              what was guessed right, and the token behind it is the bonus
    extend    the draft reads what was emitted, with the target's features: the next level 1

All are pure: (program, params, state, batch) -> (state', output). A chain is a tree with K = 1,
plain decoding a tree of one node, greedy is temperature 0: there is no other path through here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core import shapes
from jspec.core.batch import DecodeBatch, PrefillBatch, Verified
from jspec.core.config import SpeculativeConfig
from jspec.core.state import EngineState, RowState, SamplingRows, take_rows
from jspec.models.llama import Params
from jspec.models.paged import AttentionSettings, KVPool, PagedLlama
from jspec.pallas_kernels.paged_attention import Backend
from jspec.pallas_kernels.rows import AttentionRows, index_queries
from jspec.sampling.choose import choose
from jspec.sampling.penalties import count_emitted, penalize
from jspec.speculative.draft import Drafter, RowsInStep
from jspec.speculative.verify import choose_at_nodes, no_tree, score, settle, target_logits_at


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Everything static about a step. `full` compiles filters and penalties in."""

    target: PagedLlama
    drafter: Drafter
    spec: SpeculativeConfig
    full: bool
    backend: Backend = "xla"


def speculative_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: DecodeBatch
) -> tuple[EngineState, Int[Array, "B M1"]]:
    """One verification for each row of the batch.

    params: {"target": ..., "draft": ...}. Returns the next state and, packed for one transfer,
    num_emitted | emitted ids, i32[B, 1 + M].
    """
    spec, target = program.spec, program.target
    state = _grant_pages(state, batch.grants)
    slots = batch.slots
    rows = RowsInStep(
        root_ids=take_rows(state.rows.root_ids, slots),
        seq_lens=take_rows(state.rows.seq_lens, slots),
        page_table=take_rows(state.rows.page_table, slots),
        sampling=take_rows(state.rows.sampling, slots),
    )
    draft_kv, tree = program.drafter.propose(
        params["draft"], state.draft_kv, take_rows(state.draft, slots), rows
    )
    kv, logits, hidden = score(
        target, params["target"], state.kv, tree, rows, spec=spec, backend=program.backend
    )
    target_ids = choose_at_nodes(
        target,
        logits,
        tree,
        rows,
        spec=spec,
        prompt_lens=take_rows(state.rows.prompt_lens, slots),
        output_counts=take_rows(state.rows.output_counts, slots) if program.full else None,
        backend=program.backend,
    )
    kv, verified = settle(tree, target_ids, hidden, kv, rows, spec=spec, backend=program.backend)
    draft_kv, draft = _extend_emitted(program, params, draft_kv, verified, rows)
    after = _advance_rows(program, state.rows, slots, verified, rows.seq_lens)
    next_state = EngineState(
        kv=kv, draft_kv=draft_kv, draft=_put_rows(state.draft, slots, draft), rows=after
    )
    num_emitted = verified.num_accepted + 1
    return next_state, jnp.concatenate((num_emitted[:, None], verified.emitted_ids), axis=1)


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
        batch = dataclasses.replace(batch, grants=batch.grants[:0])
    return state, jnp.concatenate(outputs, axis=0)


def _extend_emitted(
    program: StepProgram,
    params: dict[str, Params],
    draft_kv: KVPool,
    verified: Verified,
    rows: RowsInStep,
) -> tuple[KVPool, Any]:
    """The draft over (emitted token i, feature of path node i), i < num_emitted, at slots L + i.

    M rows always; those behind num_emitted are padding and write to page 0.
    """
    batch, most = verified.emitted_ids.shape
    row = jnp.arange(most, dtype=jnp.int32)
    num_emitted = verified.num_accepted + 1
    first = jnp.arange(batch, dtype=jnp.int32) * most
    positions = shapes.extend_position(rows.seq_lens[:, None], row)
    attention_rows = AttentionRows(
        page_table=rows.page_table,
        prefix_lens=rows.seq_lens,
        cu_q_lens=_cumulative(num_emitted),
        q_positions=positions.reshape(-1),
    )
    next_root = rows.seq_lens + num_emitted
    return program.drafter.extend(
        params["draft"],
        draft_kv,
        token_ids=verified.emitted_ids.reshape(-1),
        features=verified.hidden.reshape(batch * most, -1),
        rows=attention_rows,
        queries_per_row=most,
        last=first + verified.num_accepted,
        next_position=shapes.chosen_position(next_root, 0),
        sampling=rows.sampling,
    )


def prefill_step(
    program: StepProgram, params: dict[str, Params], state: EngineState, batch: PrefillBatch
) -> tuple[EngineState, Int[Array, "R 2"]]:
    """KV of one chunk of each row, in target and draft; the root behind a final chunk.

    Returns the next state and i32[R, 2]: is_final | root.
    """
    target = program.target
    state = _admit(state, batch)
    ends = batch.starts + batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    index = index_queries(batch.cu_q_lens, batch.token_ids.shape[0], queries_per_row=None)
    positions = jnp.take(batch.starts, index.row_idx, mode="clip") + index.within
    rows = AttentionRows(
        page_table=take_rows(state.rows.page_table, batch.slots),
        prefix_lens=batch.starts,
        cu_q_lens=batch.cu_q_lens,
        q_positions=positions,
    )
    settings = AttentionSettings(program.backend, queries_per_row=None)
    hidden, aux, kv = target.forward(params["target"], batch.token_ids, state.kv, rows, settings)
    sampling = take_rows(state.rows.sampling, batch.slots)
    prompt_lens = take_rows(state.rows.prompt_lens, batch.slots)
    token_slots = jnp.take(batch.slots, index.row_idx, mode="clip")
    is_output = index.valid & (positions >= jnp.take(prompt_lens, index.row_idx, mode="clip"))
    first_id = target.token_ids()[0]
    counts = count_emitted(
        state.rows.output_counts, token_slots, batch.token_ids, is_output, first_id=first_id
    )
    last = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    roots = _sample_roots(
        target,
        target_logits_at(target, params["target"], hidden, last),
        sampling,
        counts=take_rows(counts, batch.slots),
        prompt_lens=prompt_lens,
        ends=ends,
    )
    is_final = batch.is_final > 0
    roots = jnp.where(is_final, roots, 0)
    draft_kv, draft = program.drafter.extend(
        params["draft"],
        state.draft_kv,
        token_ids=_shifted(batch, last, jnp.where(is_final, roots, batch.next_ids)),
        features=aux,
        rows=rows,
        queries_per_row=None,
        last=last,
        next_position=shapes.chosen_position(ends, 0),
        sampling=sampling,
    )
    live = batch.slots > 0
    after = dataclasses.replace(
        state.rows,
        root_ids=_put_rows(state.rows.root_ids, batch.slots, jnp.where(live, roots, 0)),
        seq_lens=_put_rows(state.rows.seq_lens, batch.slots, jnp.where(live, ends, 0)),
        output_counts=count_emitted(counts, batch.slots, roots, is_final, first_id=first_id),
    )
    next_state = EngineState(
        kv=kv, draft_kv=draft_kv, draft=_put_rows(state.draft, batch.slots, draft), rows=after
    )
    return next_state, jnp.stack((batch.is_final, roots), axis=1)


def _sample_roots(
    target: PagedLlama,
    logits: jax.Array,
    sampling: SamplingRows,
    *,
    counts: jax.Array,
    prompt_lens: jax.Array,
    ends: jax.Array,
) -> jax.Array:
    """The token behind each chunk, i32[R]: position `ends`, with that position's noise."""
    token_ids = target.token_ids()
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
        filtered=True,
        shard=target.shard,
    )
    return chosen[:, 0]


def _shifted(batch: PrefillBatch, last: jax.Array, behind: jax.Array) -> jax.Array:
    """Draft row i holds token i + 1: ids one to the left, `behind[r]` at each chunk's end.

    In:  two chunks [3 4 5][8 9], behind [6, 7]
    Out: [4 5 6][9 7]
    """
    shifted = jnp.roll(batch.token_ids, -1)
    lens = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    past_end = batch.token_ids.shape[0]
    return shifted.at[jnp.where(lens > 0, last, past_end)].set(behind, mode="drop")


def _grant_pages(state: EngineState, grants: jax.Array) -> EngineState:
    """page_table[slot, index] = page for each grant; padding grants write 0 to the dummy row."""
    slot, index, page = grants[:, 0], grants[:, 1], grants[:, 2]
    table = state.rows.page_table.at[slot, index].set(page, mode="promise_in_bounds")
    return _with_rows(state, page_table=table)


def _admit(state: EngineState, batch: PrefillBatch) -> EngineState:
    """Writes whole new rows; a chunk that brings none writes to the dummy slot."""
    to = batch.admitted
    floats = jax.lax.bitcast_convert_type(batch.sampling_floats, jnp.float32)
    new = SamplingRows(
        seed=jax.lax.bitcast_convert_type(batch.seed, jnp.uint32),
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        frequency_penalty=floats[:, 3],
        presence_penalty=floats[:, 4],
        top_k=batch.sampling_ints[:, 0],
        min_new_tokens=batch.sampling_ints[:, 1],
        stop_ids=batch.stop_ids,
    )
    rows = state.rows
    return _with_rows(
        state,
        prompt_lens=_put_rows(rows.prompt_lens, to, batch.prompt_lens),
        page_table=_put_rows(rows.page_table, to, batch.page_table),
        sampling=_put_rows(rows.sampling, to, new),
        output_counts=rows.output_counts.at[to].set(0, mode="promise_in_bounds"),
    )


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
    if program.full:
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
        root_ids=_put_rows(rows.root_ids, slots, jnp.where(live, verified.bonus_ids, 0)),
        seq_lens=_put_rows(rows.seq_lens, slots, jnp.where(live, grown, 0)),
        output_counts=counts,
    )


def _put_rows(tree: Any, slots: jax.Array, values: Any) -> Any:
    """Row slots[b] = values[b] in every per-slot array."""
    return jax.tree.map(
        lambda x, v: x.at[slots].set(v.astype(x.dtype), mode="promise_in_bounds"), tree, values
    )


def _with_rows(state: EngineState, **changes: Any) -> EngineState:
    return dataclasses.replace(state, rows=dataclasses.replace(state.rows, **changes))


def _cumulative(lens: jax.Array) -> jax.Array:
    """[0, l0, l0 + l1, ...]"""
    return jnp.concatenate((jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)))
