"""Turning a plan into the one flat i32 array that a step receives, and a result back into ids."""

from __future__ import annotations

import numpy as np

from jspec.core import layout, shapes
from jspec.core.config import ServeLimits
from jspec.core.layout import PackedLayout
from jspec.core.plan import Admission, StepKind, StepPlan, StepResult
from jspec.core.request import MAX_MASKED_STOP_IDS

ProgramKey = tuple[StepKind, int, bool]  # kind, bucket (B or T), full


def program_key(plan: StepPlan, limits: ServeLimits) -> ProgramKey:
    """Which compiled program runs this plan. Prefill compiles in its full variant only."""
    if plan.kind is StepKind.DECODE:
        return (plan.kind, shapes.bucket(len(plan.rows), limits.decode_buckets), plan.full)
    tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
    return (plan.kind, shapes.bucket(tokens, limits.prefill_buckets), True)


def layout_of(key: ProgramKey, limits: ServeLimits) -> PackedLayout:
    """The packed layout of a program's batch."""
    kind, bucket, _ = key
    if kind is StepKind.DECODE:
        return layout.decode_layout(batch=bucket, num_grants=bucket * limits.grants_per_row)
    return layout.prefill_layout(
        tokens=bucket,
        rows=limits.prefill_rows,
        pages_per_row=limits.pages_per_row,
        num_stop_ids=MAX_MASKED_STOP_IDS,
    )


def pack(plan: StepPlan, key: ProgramKey, limits: ServeLimits, *, vocab_size: int) -> np.ndarray:
    """i32[layout size]."""
    packed = layout_of(key, limits)
    if plan.kind is StepKind.DECODE:
        fields = {name: np.zeros(shape, np.int32) for name, shape in packed.fields}
        fields["slots"][: len(plan.rows)] = [row.slot for row in plan.rows]
        if plan.grants:
            fields["grants"][: len(plan.grants)] = [
                (grant.slot, grant.index, grant.page) for grant in plan.grants
            ]
        return packed.pack(fields)
    return packed.pack(_prefill_fields(plan, packed, vocab_size=vocab_size))


def _prefill_fields(
    plan: StepPlan, packed: PackedLayout, *, vocab_size: int
) -> dict[str, np.ndarray]:
    fields = {name: np.zeros(shape, np.int32) for name, shape in packed.fields}
    fields["stop_ids"][:] = vocab_size
    fields["sampling_floats"][:, 1] = np.float32(1.0).view(np.int32)
    fields["sampling_ints"][:, 0] = vocab_size
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
            _write_admission(fields, r, admission, vocab_size=vocab_size)
    fields["cu_q_lens"][len(plan.chunks) + 1 :] = offset
    return fields


def _write_admission(
    fields: dict[str, np.ndarray], r: int, admission: Admission, *, vocab_size: int
) -> None:
    """Row r of the batch brings a whole new row of the state along."""
    sampling, request = admission.request.sampling, admission.request
    fields["admitted"][r] = admission.row.slot
    fields["prompt_lens"][r] = admission.prompt_len
    fields["page_table"][r, : len(admission.page_ids)] = admission.page_ids
    seed = np.array([request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32)
    fields["seed"][r] = seed.view(np.int32)
    floats = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )
    fields["sampling_floats"][r] = np.array(floats, np.float32).view(np.int32)
    top_k = vocab_size if sampling.top_k < 0 else min(sampling.top_k, vocab_size)
    fields["sampling_ints"][r] = (top_k, sampling.min_new_tokens)
    if sampling.min_new_tokens:
        stops = request.stop_ids[:MAX_MASKED_STOP_IDS]
        fields["stop_ids"][r, : len(stops)] = stops


def unpack_result(plan: StepPlan, output: np.ndarray, limits: ServeLimits) -> StepResult:
    """Ids by round and row. Prefill: is_final | root; decode: num_emitted | ids.

    output: the batch's rows once for each round, padding rows included.
    """
    num_rounds = limits.num_rounds if plan.kind is StepKind.DECODE else 1
    rounds = output.reshape(num_rounds, -1, output.shape[1])[:, : len(plan.row_refs)].tolist()
    return StepResult(
        step=plan.step,
        rounds=tuple(tuple(tuple(row[1 : 1 + row[0]]) for row in rows) for rows in rounds),
    )
