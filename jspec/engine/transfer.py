"""Packing the programs of a plan into flat i32 arrays, and unpacking the result of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.config.limits import ServeLimits
from jspec.engine.steps.step_def import Host, Part, ProgramKey, ProgramShape
from jspec.engine.steps.table import STEPS
from jspec.messages.layout import PackedLayout, output_columns
from jspec.messages.plan import RoundResult, StepLogprobs, StepPlan, StepResult
from jspec.messages.step_options import PLAIN, StepOption, StepOptions


class Packer:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._blank: dict[ProgramKey, tuple[PackedLayout, np.ndarray]] = {}

    def pack(
        self, plans: Sequence[StepPlan], at: int, key: ProgramKey, read: np.ndarray | None = None
    ) -> np.ndarray:
        """Pack run `at` of each data rank's plan for `key`, i32[ranks, layout size]. read: the
        output that its kind reads, [ranks, ...]."""
        packed, blank = self._blank.get(key) or self._add(key)
        flat = blank.copy()
        for rank, plan in enumerate(plans):
            own = None if read is None else read[rank]
            part = Part(plan, plan.runs[at], self._host, own)
            STEPS[key.kind].write(packed.unpack(flat[rank]), part)
        return flat

    def _add(self, key: ProgramKey) -> tuple[PackedLayout, np.ndarray]:
        step = STEPS[key.kind]
        packed = step.layout(key, self._host)
        flat = np.zeros((self._host.limits.pool.num_ranks, packed.size), np.int32)
        if step.blank is not None:
            for own in flat:
                step.blank(packed.unpack(own), self._host)
        self._blank[key] = packed, flat
        return packed, flat


def layout_of(key: ProgramKey, limits: ServeLimits) -> PackedLayout:
    return STEPS[key.kind].layout(key, Host(limits))


def shape_of(key: ProgramKey, limits: ServeLimits) -> ProgramShape:
    step = STEPS[key.kind]
    return ProgramShape(
        kind=key.kind,
        packed=layout_of(key, limits),
        num_rounds=limits.scheduling.num_rounds if step.has_rounds else 1,
        takes=tuple(shape_of(key._replace(kind=kind), limits) for kind in step.takes),
    )


def unpack_result(
    plan: StepPlan,
    output: np.ndarray,
    limits: ServeLimits,
    *,
    options: StepOptions = PLAIN,
) -> StepResult:
    """Unpack the output of a step for the scheduler, without padding rows.

    output: i32[ranks, rounds * bucket, columns], the batch's rows once per round, then with
    prompts' log-probabilities or hidden states each packed token. options: of the program that ran.
    Raises ValueError for another number of columns.
    """
    words = 0 if limits.programs.hidden is None else limits.programs.hidden.words
    max_emitted = 1 if plan.is_prefill else plan.shape.max_emitted
    columns = output_columns(max_emitted, options, hidden_words=words)
    num_rounds = plan.num_rounds(limits.scheduling)
    ranks = output.reshape(len(output), num_rounds, -1, output.shape[-1])
    slots = [row.slot for row in plan.row_refs]
    fields = columns.unpack(_joined(ranks, limits.pool.by_rank(slots, [1] * len(slots))))
    is_asked, of_prompts = StepOption.LOGPROBS in plan.options, None
    hidden, prompt_hidden = [None] * num_rounds, None
    asks_hidden = limits.programs.hidden if StepOption.HIDDEN in plan.options else None
    if asks_hidden is not None:
        hidden = list(asks_hidden.floats(fields["hidden"]))
    if plan.is_prefill and (is_asked or asks_hidden is not None):
        first = limits.programs.prefill_rows
        counts = plan.prefill_tokens_by_rank(limits.pool)
        of_tokens = columns.unpack(_joined(ranks[:, :, first:], counts))
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


def _joined(ranks: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Join the first counts[r] entries of each rank, in the order of the plan's rows: [ranks,
    rounds, entries, columns] to [rounds, sum of counts, columns]."""
    parts = [own[:, :count] for own, count in zip(ranks, counts, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _logprobs(fields: dict[str, np.ndarray], *, round_idx: int) -> StepLogprobs:
    return StepLogprobs(
        logprobs=fields["logprobs"][round_idx].view(np.float32),
        top_logprobs=fields["top_logprobs"][round_idx].view(np.float32),
        top_ids=fields["top_ids"][round_idx],
        watched_logprobs=fields["watched_logprobs"][round_idx].view(np.float32),
    )
