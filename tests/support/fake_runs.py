"""The check that a plan lists the programs that its rows need, once and in order."""

from __future__ import annotations

from jspec.config.limits import ServeLimits
from jspec.messages.plan import RowRef, StepKind, StepPlan, StepRun
from jspec.messages.step_options import StepOption
from tests.support.fake_rows import require

CUT = [StepKind.PROPOSE, StepKind.SCORE, StepKind.SETTLE]


def check_runs(limits: ServeLimits, plan: StepPlan) -> None:
    kinds = [run.kind for run in plan.runs]
    if plan.is_prefill:
        kind = StepKind.CACHED_DRAFT_PREFILL
        cached = [run for run in plan.runs if run.kind is kind]
        expected = [kind] * len(cached)
        expected += [StepKind.RESTORE] if plan.restores else []
        expected += [StepKind.PREFILL]
        expected += [StepKind.SAVE] if plan.saves else []
        shapes = {run.shape for run in plan.runs}
        require(shapes == {limits.draft_shape}, f"a prefill of shapes {shapes}")
        check_cached(limits, plan, cached)
    else:
        expected = [StepKind.DRAFT_PREFILL] if plan.pending else []
        expected += CUT if plan.constraints else [StepKind.DECODE]
        shapes = {run.shape for run in plan.runs if run.kind is not StepKind.DRAFT_PREFILL}
        require(len(shapes) == 1, f"runs of shapes {shapes}")
    require(kinds == expected, f"runs are {kinds}; expected {expected}")


def check_cached(limits: ServeLimits, plan: StepPlan, cached: list[StepRun]) -> None:
    """The runs carry the cached ids of each admitted row that needs them, in order."""
    keeps_ids = limits.draft_shape.algorithm.keeps_ids
    found: dict[RowRef, list[int]] = {}
    fills = {admission.row: admission.fill_ids for admission in plan.admissions}
    for run in cached:
        rows = [chunk.row for chunk in run.chunks]
        num_ids = sum(len(chunk.token_ids) for chunk in run.chunks)
        fits = (
            0 < num_ids <= limits.cached_draft_prefill_size
            and len(rows) <= limits.programs.prefill_rows
        )
        require(fits and len(set(rows)) == len(rows), f"runs give cached {run.chunks}")
        for chunk in run.chunks:
            ids = found.setdefault(chunk.row, [])
            require(chunk.start == len(ids), f"cached ids from {chunk.start} after {len(ids)}")
            ids += chunk.token_ids
            after = fills[chunk.row][len(ids)]
            require(chunk.next_id == after, f"next_id {chunk.next_id} of cached ids, not {after}")
    expected = {
        admission.row: list(admission.fill_ids[: admission.cached_len])
        for admission in plan.admissions
        if admission.cached_len
        and (keeps_ids or StepOption.PENALTIES in admission.request.sampling.options)
    }
    require(found == expected, f"runs give cached {found}; expected {expected}")
