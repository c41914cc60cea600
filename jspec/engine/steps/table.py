"""The table of steps, with a row per kind, for compilation, dispatch and storing."""

from __future__ import annotations

from collections.abc import Mapping

from jspec.engine.steps.decode import DECODE, DRAFT_PREFILL, PROPOSE, SCORE, SETTLE
from jspec.engine.steps.prefill import CACHED_DRAFT_PREFILL, PREFILL
from jspec.engine.steps.snapshot import RESTORE, SAVE
from jspec.engine.steps.step_def import StepDef
from jspec.messages.plan import StepKind

STEPS: Mapping[StepKind, StepDef] = {  # in the order in which a plan runs them
    StepKind.CACHED_DRAFT_PREFILL: CACHED_DRAFT_PREFILL,
    StepKind.RESTORE: RESTORE,
    StepKind.PREFILL: PREFILL,
    StepKind.SAVE: SAVE,
    StepKind.DRAFT_PREFILL: DRAFT_PREFILL,
    StepKind.DECODE: DECODE,
    StepKind.PROPOSE: PROPOSE,
    StepKind.SCORE: SCORE,
    StepKind.SETTLE: SETTLE,
}
