"""Packing a plan into a step's flat i32 array, and unpacking a step's result."""

from __future__ import annotations

import functools

import numpy as np

from jspec.config.limits import ServeLimits
from jspec.engine.programs.program_keys import ProgramKey
from jspec.messages import layout
from jspec.messages.grammar import num_words
from jspec.messages.layout import PackedLayout
from jspec.messages.plan import (
    Admission,
    RoundResult,
    StepKind,
    StepLogprobs,
    StepPlan,
    StepResult,
)
from jspec.messages.request import SAMPLING_FIELDS
from jspec.messages.sampling_fields import SamplingTable, write_neutral, write_request
from jspec.messages.step_options import PLAIN, StepOption, StepOptions

# A tree of one node: its token (unused), and no parent.
ROOT, ABOVE_ROOT = np.zeros(1, np.int32), np.full(1, -1, np.int32)


def layout_of(
    key: ProgramKey, limits: ServeLimits, *, table: SamplingTable = SAMPLING_FIELDS
) -> PackedLayout:
    kind, bucket, features, _ = key
    num_windows = len(limits.windows)
    if kind is StepKind.RECALL:
        return layout.recall_layout(tokens=bucket, rows=limits.prefill_rows)
    if kind is StepKind.DRAFT_PREFILL:
        return layout.draft_prefill_layout(batch=bucket)
    words = num_words(limits.vocab_size) if StepOption.GRAMMAR in features else 0
    if kind is StepKind.SETTLE:
        nodes = limits.spec.num_draft_tokens
        return layout.settle_layout(batch=bucket, nodes=nodes, words=words)
    if kind in (StepKind.DECODE, StepKind.PROPOSE, StepKind.SCORE):  # SCORE reads only the slots
        num_grants = bucket * limits.grants_per_row
        return layout.decode_layout(
            batch=bucket,
            num_grants=num_grants,
            num_windows=num_windows,
            is_sharing=StepOption.SHARED in features,
        )
    return layout.prefill_layout(
        tokens=bucket,
        rows=limits.prefill_rows,
        pages_per_row=limits.pages_per_row,
        num_windows=num_windows,
        num_grants=limits.window_grants_of_prefill(bucket),
        words=words,
        table=table,
    )


def pack(
    plan: StepPlan,
    key: ProgramKey,
    limits: ServeLimits,
    *,
    vocab_size: int,
    tree: np.ndarray | None = None,
    table: SamplingTable = SAMPLING_FIELDS,
) -> np.ndarray:
    """Pack a plan, i32[layout size]. tree: PROPOSE's output i32[3, B, N], for SETTLE's masks."""
    packed = layout_of(key, limits, table=table)
    if tree is not None:
        return packed.pack(_settle_fields(plan, packed, tree))
    if plan.kind is StepKind.DECODE:
        flat = np.zeros(packed.size, np.int32)
        fields = packed.unpack(flat)  # views
        _write_decode(fields, plan)
    else:
        flat = _neutral_prefill(packed, vocab_size, table).copy()
        fields = packed.unpack(flat)
        _write_prefill(fields, plan, vocab_size=vocab_size, table=table)
    _write_window_grants(fields, plan, limits)
    return flat


def pack_draft_prefill(plan: StepPlan, key: ProgramKey, limits: ServeLimits) -> np.ndarray:
    """Pack the DRAFT_PREFILL step before a plan with `pending`, i32[layout size]."""
    packed = layout_of(key, limits)
    fields = {name: np.zeros(shape, np.int32) for name, shape in packed.fields}
    fields["slots"][: len(plan.rows)] = [row.slot for row in plan.rows]
    fields["counts"][: len(plan.rows)] = plan.pending
    return packed.pack(fields)


def pack_recalls(plan: StepPlan, limits: ServeLimits) -> list[np.ndarray]:
    """Pack the recall steps to run before `plan`, each i32[layout size]; mostly none.

    They carry the cached ids of admitted rows that need them: all rows if the drafter keeps ids,
    else those with penalties. Ids that exceed one step are split.
    """
    keeps_ids = limits.spec.algorithm.drafting.keeps_ids
    packed = layout.recall_layout(tokens=limits.recall_size, rows=limits.prefill_rows)
    recalls: list[dict[str, np.ndarray]] = []
    row = offset = 0
    for admission in plan.admissions:
        start, end = 0, admission.cached_len
        if not keeps_ids and StepOption.PENALTIES not in admission.request.sampling.features:
            continue
        while start < end:
            if not recalls or row == limits.prefill_rows or offset == limits.recall_size:
                fields = {name: np.zeros(shape, np.int32) for name, shape in packed.fields}
                recalls.append(fields)
                row = offset = 0
            count = min(end - start, limits.recall_size - offset)
            fields["slots"][row] = admission.row.slot
            fields["starts"][row] = start
            fields["next_ids"][row] = admission.fill_ids[start + count]
            fields["is_first"][row] = start == 0
            fields["prompt_lens"][row] = admission.prompt_len
            fields["token_ids"][offset : offset + count] = admission.fill_ids[start : start + count]
            start, offset, row = start + count, offset + count, row + 1
            fields["cu_q_lens"][row:] = offset
    return [packed.pack(fields) for fields in recalls]


def _write_window_grants(
    fields: dict[str, np.ndarray], plan: StepPlan, limits: ServeLimits
) -> None:
    for i in range(len(limits.windows)):
        _write_grants(fields["window_grants"][i], plan, space=i + 1)


def _write_grants(field: np.ndarray, plan: StepPlan, *, space: int) -> None:
    """Write grants of one page space. field: i32[X, 3]. Raises ValueError if they do not fit."""
    grants = [(g.slot, g.index, g.page) for g in plan.grants if g.space == space]
    if grants:
        field[: len(grants)] = grants


def _write_decode(fields: dict[str, np.ndarray], plan: StepPlan) -> None:
    fields["slots"][: len(plan.rows)] = [row.slot for row in plan.rows]
    _write_grants(fields["grants"], plan, space=0)
    if "leaders" in fields and plan.shared:
        shared = np.array(plan.shared, np.int32)
        fields["leaders"][: len(shared)], fields["shared_keys"][: len(shared)] = shared.T


@functools.lru_cache(maxsize=64)  # more than the sizes and features of an engine
def _neutral_prefill(packed: PackedLayout, vocab_size: int, table: SamplingTable) -> np.ndarray:
    flat = np.zeros(packed.size, np.int32)
    fields = packed.unpack(flat)
    write_neutral(fields, table, vocab_size=vocab_size)
    if "allowed" in fields:
        fields["allowed"][:] = -1
    flat.flags.writeable = False  # callers copy it
    return flat


def _write_prefill(
    fields: dict[str, np.ndarray], plan: StepPlan, *, vocab_size: int, table: SamplingTable
) -> None:
    admissions = {admission.row: admission for admission in plan.admissions}
    offset = 0
    for r, chunk in enumerate(plan.chunks):
        fields["slots"][r] = chunk.row.slot
        fields["starts"][r] = chunk.start
        fields["is_final"][r] = chunk.is_final
        fields["next_ids"][r] = 0 if chunk.next_id is None else chunk.next_id
        end = offset + len(chunk.token_ids)
        fields["token_ids"][offset:end] = chunk.token_ids
        offset = end
        fields["cu_q_lens"][r + 1] = end
        admission = admissions.get(chunk.row)
        if admission is not None:
            _write_admission(fields, r, admission)
            write_request(fields, r, admission.request, table, vocab_size=vocab_size)
    fields["cu_q_lens"][len(plan.chunks) + 1 :] = offset
    if "allowed" in fields:
        for r, constraint in enumerate(plan.constraints):
            if constraint is not None and plan.chunks[r].is_final:
                constraint.fill(ROOT, ABOVE_ROOT, fields["allowed"][r : r + 1].view(np.uint32))


def _settle_fields(plan: StepPlan, packed: PackedLayout, tree: np.ndarray) -> dict[str, np.ndarray]:
    fields = {name: np.empty(shape, np.int32) for name, shape in packed.fields}
    fields["slots"][:] = 0
    fields["slots"][: len(plan.rows)] = [row.slot for row in plan.rows]
    fields["allowed"][:] = -1
    tokens, parents, _ = tree
    for r, constraint in enumerate(plan.constraints):
        if constraint is not None:
            constraint.fill(tokens[r], parents[r], fields["allowed"][r].view(np.uint32))
    return fields


def _write_admission(fields: dict[str, np.ndarray], r: int, admission: Admission) -> None:
    fields["admitted"][r] = admission.row.slot
    fields["prompt_lens"][r] = admission.prompt_len
    fields["page_table"][r, : len(admission.page_ids)] = admission.page_ids


def unpack_result(
    plan: StepPlan,
    output: np.ndarray,
    limits: ServeLimits,
    *,
    features: StepOptions = PLAIN,
) -> StepResult:
    """Unpack a step's output for the scheduler, without padding rows.

    output: i32[rounds * bucket, columns], the batch's rows once per round; in a prefill with
    log-probabilities or hidden states, one entry per packed token follows.
    features: of the program that ran.
    Raises ValueError if the number of columns does not match.
    """
    is_decode = plan.kind is StepKind.DECODE
    spec = plan.spec(limits)
    words = 0 if limits.hidden is None else limits.hidden.words
    columns = layout.output_columns(
        spec.max_emitted if is_decode else 1,
        features,
        hidden_words=words,
    )
    num_rounds = plan.num_rounds(limits)
    rows = output.reshape(num_rounds, -1, output.shape[1])
    fields = columns.unpack(rows[:, : len(plan.row_refs)])
    is_asked, of_prompts = StepOption.LOGPROBS in plan.features, None
    hidden, prompt_hidden = [None] * num_rounds, None
    asks_hidden = limits.hidden if StepOption.HIDDEN in plan.features else None
    if asks_hidden is not None:
        hidden = list(asks_hidden.floats(fields["hidden"]))
    if not is_decode and (is_asked or asks_hidden is not None):
        first, num_tokens = limits.prefill_rows, sum(len(c.token_ids) for c in plan.chunks)
        of_tokens = columns.unpack(rows[:, first : first + num_tokens])
        of_prompts = _logprobs(of_tokens, round_idx=0) if is_asked else None
        if asks_hidden is not None:
            prompt_hidden = asks_hidden.floats(of_tokens["hidden"][0, :, 0])
    of_rounds = zip(fields["num_emitted"], fields["emitted_ids"], strict=True)
    return StepResult(
        step=plan.step,
        rounds=tuple(
            RoundResult(
                num_emitted=counts,
                ids=ids,
                logprobs=_logprobs(fields, round_idx=i) if is_asked else None,
                prompt_logprobs=of_prompts,
                hidden=hidden[i],
                prompt_hidden=prompt_hidden,
            )
            for i, (counts, ids) in enumerate(of_rounds)
        ),
    )


def _logprobs(fields: dict[str, np.ndarray], *, round_idx: int) -> StepLogprobs:
    return StepLogprobs(
        logprobs=fields["logprobs"][round_idx].view(np.float32),
        top_logprobs=fields["top_logprobs"][round_idx].view(np.float32),
        top_ids=fields["top_ids"][round_idx],
        watched_logprobs=fields["watched_logprobs"][round_idx].view(np.float32),
    )
