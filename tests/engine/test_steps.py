"""The table of steps: a new kind is one entry and the functions that it names."""

from __future__ import annotations

import dataclasses
import enum
import re
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.engine.programs.compilation import compile_all
from jspec.engine.programs.program_keys import program_keys, programs_at_start
from jspec.engine.programs.program_store import ProgramStore
from jspec.engine.runner import DeviceRunner
from jspec.engine.steps.step_def import (
    Part,
    ProgramKey,
    StepDef,
    Turn,
    Wanted,
    of_rows,
    write_slots,
)
from jspec.engine.steps.table import STEPS
from jspec.messages.plan import RowRef, StepKind, StepPlan, StepRun
from jspec.messages.step_options import PLAIN
from tests.engine.test_program_store import LIMITS, MESH, fresh_state, make_program
from tests.support.flat_limits import with_limits


class More(enum.Enum):
    """Kinds that the package does not know."""

    COPY = "copy B"
    REPORT = "report B"


DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
COPY, REPORT = cast("tuple[StepKind, StepKind]", (More.COPY, More.REPORT))
ROWS = (RowRef(1, 1), RowRef(2, 1))


def copy_length(program: Any, params: Any, state: Any, batch: Any) -> Any:
    """Give the second row the length of the first; output all lengths."""
    del program, params
    first, second = batch["slots"]
    lens = state.rows.seq_lens.at[second].set(state.rows.seq_lens[first])
    rows = dataclasses.replace(state.rows, seq_lens=lens)
    return dataclasses.replace(state, rows=rows), lens


def report(program: Any, params: Any, state: Any, batch: Any, taken: jax.Array) -> Any:
    """Emit one token per row: the length that it took, plus what the host wrote."""
    del program, params
    tokens = taken[batch["slots"]] + batch["seen"]
    return state, jnp.stack((jnp.ones_like(tokens), tokens), axis=1)


def write_seen(fields: Any, part: Part) -> None:
    write_slots(fields, part)
    assert part.read is not None
    fields["seen"][:] = 10 * part.read[1:]


def made_of(kind: StepKind) -> Any:
    return lambda _: [Wanted(ProgramKey(kind, 2, PLAIN), Turn.NEEDED)]


ADDED = {
    COPY: StepDef(
        programs=made_of(COPY),
        layout=lambda key, _: of_rows(key, "slots"),
        write=write_slots,
        batch=dict,
        step=copy_length,
    ),
    REPORT: StepDef(
        programs=made_of(REPORT),
        layout=lambda key, _: of_rows(key, "slots", "seen"),
        write=write_seen,
        batch=dict,
        step=report,
        takes=(COPY,),
        reads=COPY,
        emits=True,
    ),
}


def test_a_new_kind_is_compiled_stored_dispatched_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, step in ADDED.items():
        monkeypatch.setitem(cast("dict[StepKind, StepDef]", STEPS), kind, step)
    new = tuple(key for key in program_keys(LIMITS) if key.kind in ADDED)
    assert [str(key) for key in new] == ["copy B=2", "report B=2"]
    assert set(new) <= set(programs_at_start(LIMITS, "first"))
    program, params = make_program()
    store, reports = ProgramStore.open(tmp_path), list[str]()
    for _ in range(2):
        state = fresh_state(program)
        made = compile_all(
            program,
            LIMITS,
            mesh=MESH,
            params=params,
            state=state,
            keys=new,
            store=store,
            progress=lambda *said: reports.append(f"{said[3]} {said[2]}"),
        )
    assert sorted(reports[:2]) == ["compiled copy B=2", "compiled report B=2"]
    assert sorted(reports[2:]) == ["loaded copy B=2", "loaded report B=2"]
    lens = state.rows.seq_lens.at[1].set(7)
    state = dataclasses.replace(state, rows=dataclasses.replace(state.rows, seq_lens=lens))
    runner = DeviceRunner(
        limits=LIMITS, params=params, state=state, executables=made, mesh=MESH, vocab_size=9
    )
    runs = (StepRun(COPY, LIMITS.draft_shape), StepRun(REPORT, LIMITS.draft_shape))
    plan = StepPlan(step=3, runs=runs, options=PLAIN, rows=ROWS)
    with_copy_after = dataclasses.replace(plan, runs=(*runs, runs[0]))
    results = [runner.collect(runner.dispatch(each)) for each in (plan, with_copy_after)]
    assert np.asarray(runner.state.rows.seq_lens).tolist() == [0, 7, 7]
    for result in results:
        assert (result.step, result.rounds[0].emitted_ids) == (3, ((77,), (77,)))


def test_every_kind_has_a_row() -> None:
    assert set(STEPS) == set(StepKind)
    (table,) = re.findall(r"\| step \| runs \|\n\|---\|---\|\n((?:\|.*\n)+)", DESIGN.read_text())
    names = ", ".join(line.split("|")[1].strip() for line in table.splitlines())
    assert names.split(", ") == [kind.name for kind in STEPS]
    for kind, step in STEPS.items():
        keys = [wanted.key for wanted in step.programs(LIMITS)]
        assert {key.kind for key in keys} <= {kind}
        assert all(key.options.members <= step.options for key in keys)
        assert step.reads is None or step.reads in step.takes


class Recorder(DeviceRunner):
    """A runner that records what each program is started with, and starts none."""

    calls: list[Any]

    def _enqueue(self, key: ProgramKey, *operands: Any, **uses: Any) -> Any:
        self.calls.append((operands[1:], uses))
        return str(key)

    def _read(self, output: Any) -> Any:
        assert output == "propose B=2"
        return np.zeros((1, 3, 2, 1), np.int32)


def test_an_output_is_kept_for_later_programs_and_dropped_by_the_last() -> None:
    limits = with_limits(LIMITS, vocab_size=9)
    keys = dict.fromkeys(programs_at_start(limits, "all"))
    state: Any = object()
    runner = Recorder(
        limits=limits, params={}, state=state, executables=keys, mesh=MESH, vocab_size=9
    )
    for kinds in ((StepKind.PROPOSE, StepKind.SCORE, StepKind.SETTLE), (StepKind.DECODE,)):
        runner.calls = []
        runs = tuple(StepRun(kind, LIMITS.draft_shape) for kind in kinds)
        runner.dispatch(StepPlan(step=1, runs=runs, options=PLAIN, rows=ROWS))
        *first, (operands, uses) = runner.calls
        assert uses["is_read"]
        assert not uses["is_kept"]
        assert set(uses["drops"]) == set(operands)
        assert len(operands) == len(first)
        assert [call[1]["is_read"] for call in first] == [True, False][: len(first)]
        assert all(call[1]["is_kept"] and not call[1]["drops"] for call in first)
