"""RESTORE before a prefill, SAVE after it: copies of recurrent states from and to snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from jspec.config.limits import ServeLimits
from jspec.device.batch import SnapshotBatch
from jspec.engine.steps.step_def import (
    Fields,
    Part,
    ProgramKey,
    StepDef,
    Turn,
    Wanted,
    of_rows,
)
from jspec.messages.plan import SnapshotCopy, StepKind
from jspec.messages.step_options import PLAIN
from jspec.speculative.snapshots import restore_step, save_step


def copies(limits: ServeLimits, *, kind: StepKind) -> Iterator[Wanted]:
    """Yield a copy of one row, since a row's state is large, and one of all rows of a prefill."""
    if limits.pool.snapshots is not None:
        yield Wanted(ProgramKey(kind, limits.programs.prefill_rows, PLAIN), Turn.NEEDED)
        yield Wanted(ProgramKey(kind, 1, PLAIN), Turn.START)


def _write(fields: Fields, wanted: Sequence[SnapshotCopy]) -> None:
    fields["slots"][: len(wanted)] = [copy.slot for copy in wanted]
    fields["entries"][: len(wanted)] = [copy.snapshot for copy in wanted]


def write_restores(fields: Fields, part: Part) -> None:
    _write(fields, part.plan.restores)


def write_saves(fields: Fields, part: Part) -> None:
    _write(fields, part.plan.saves)


RESTORE = StepDef(
    programs=partial(copies, kind=StepKind.RESTORE),
    layout=lambda key, _: of_rows(key, "slots", "entries"),
    size=lambda plan, _: len(plan.restores),
    smaller="prefill_max_requests",
    write=write_restores,
    batch=lambda fields: SnapshotBatch(**fields),
    step=restore_step,
)
SAVE = StepDef(
    programs=partial(copies, kind=StepKind.SAVE),
    layout=lambda key, _: of_rows(key, "slots", "entries"),
    size=lambda plan, _: len(plan.saves),
    smaller="prefill_max_requests",
    write=write_saves,
    batch=lambda fields: SnapshotBatch(**fields),
    step=save_step,
)
