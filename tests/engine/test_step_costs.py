"""Decode programs are timed on dummy rows when they become ready, without any other effect."""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from jspec.engine.plan_runner import Dispatched, ReadyPrograms
from jspec.engine.runner import DeviceRunner
from jspec.engine.steps.step_def import ProgramKey
from jspec.messages.plan import StepKind, StepPlan
from jspec.messages.step_options import PLAIN, SAMPLING
from tests.speculative.engines import Compiled, ViewRunner, serve_view
from tests.speculative.law_engines import (
    OF_SHAPES,
    engine,
    plain_texts,
    requests_of,
    scripted,
    with_script,
)
from tests.speculative.test_engine_laws import beyond_dummies, kept_state
from tests.support.random_shapes import RandomShapes

SETTING = OF_SHAPES  # which has smaller shapes as well


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return engine(SETTING)


def measure_all(runner: DeviceRunner, compiled: Compiled) -> None:
    for key, executable in compiled.executables.items():
        runner.add(key, executable)


def test_every_shape_has_a_cost_once_its_program_was_added(compiled: Compiled) -> None:
    runner = compiled.runner()
    (rows,) = compiled.limits.programs.decode_buckets
    assert runner.step_costs(rows, PLAIN) == {}  # these came with the constructor
    measure_all(runner, compiled)
    for options in (PLAIN, SAMPLING):
        costs = runner.step_costs(rows, options)
        assert tuple(costs) == compiled.limits.shapes
        assert all(0 < seconds < 10 for seconds in costs.values())
    told = ReadyPrograms.of_measured(runner.programs.measured)
    assert told.step_costs(compiled.limits, rows, PLAIN) == runner.step_costs(rows, PLAIN)
    runner.close()
    assert runner.step_costs(rows, PLAIN) == {}


def test_timing_changes_nothing_that_rows_keep(compiled: Compiled) -> None:
    runner = compiled.runner()
    with kept_state(runner) as before:
        measure_all(runner, compiled)
    for old, new in zip(before, beyond_dummies(runner.state), strict=True):
        np.testing.assert_array_equal(new, old)


class Growing(ViewRunner):
    """A runner for which another decode program becomes ready while each step is in flight."""

    num_added = 0

    def grow_from(self, executables: dict[Any, Any]) -> None:
        decodes = [item for item in executables.items() if item[0].kind is StepKind.DECODE]
        self._new = cycle(decodes)

    def dispatch(self, plan: StepPlan) -> Dispatched:
        handle = super().dispatch(plan)
        self.runner.add(*next(self._new))
        self.num_added += 1
        return handle


def test_programs_that_are_timed_while_rows_run_change_no_text(compiled: Compiled) -> None:
    requests = requests_of(3, num_tokens=24, seed=7, temperature=1.0, top_p=0.9)
    expected = plain_texts(tuple(requests))
    served = with_script(compiled, scripted(requests, expected))
    view = Growing(served.runner(), served.limits)
    view.grow_from(served.executables)
    shapes = RandomShapes(served.limits, seed=1)
    found = asyncio.run(serve_view(view, requests, shapes=shapes))
    assert list(found.ids) == expected
    assert view.num_added > 8


def test_a_program_that_fails_while_it_is_timed_is_ready_without_a_cost(
    compiled: Compiled, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of scratch")

    runner = compiled.runner()
    (rows,) = compiled.limits.programs.decode_buckets
    key = ProgramKey(StepKind.DECODE, rows, PLAIN)
    runner.add(key, fails)
    assert key in runner.ready_programs
    assert runner.step_costs(rows, PLAIN) == {}
    assert "could not be timed: RuntimeError('out of scratch')" in caplog.text
