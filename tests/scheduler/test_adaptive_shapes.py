"""The chooser of shapes in virtual time, on the dial's acceptance and an H200's costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.simulate_shapes import CHAIN, CostTable, cell, limits_of, run
from jspec.core.config import Algorithm, SpeculativeConfig
from jspec.core.features import PLAIN, StepFeatures
from jspec.core.plan import RoundResult, RowRef, StepKind, StepPlan, StepResult
from jspec.core.shape_sets import shapes_for
from jspec.scheduler.adaptive_shapes import AdaptiveShapes

LEAST = 0.97  # of the better of plain and the best fixed shape


def measured(rows: int, dials: tuple[float, ...], num_steps: int = 2000) -> dict[str, Any]:
    return cell(rows, dials, num_steps=num_steps, table=CostTable.measured())


@pytest.mark.parametrize(
    ("rows", "dial"), [(1, 0.0), (64, 0.0), (8, 0.2), (64, 0.3), (1, 0.9), (64, 1.0)]
)
def test_never_much_slower_than_the_best_shape_held_fixed(rows: int, dial: float) -> None:
    found = measured(rows, (dial,))
    assert found["of_best"] >= LEAST, found
    assert found["expected_of_emitted"] == pytest.approx(1, abs=0.03)
    assert found["expected_of_measured_seconds"] == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("dials", [(0.0, 1.0), (1.0, 0.0)])
def test_what_changes_is_followed(dials: tuple[float, ...]) -> None:
    """Faster than any shape that does not."""
    found = measured(64, dials)
    assert found["of_best"] > 1.05, found
    assert min(found["steps"]["0/1/1"], found["steps"]["3/1/4"]) > 500


class SlowAtFirst(CostTable):
    """Plain steps take half as long again while the first hundred of all steps last."""

    asked = 0

    def step(self, shape: SpeculativeConfig, rows: int) -> float:
        SlowAtFirst.asked += 1
        slow = 1.5 if shape.is_plain and SlowAtFirst.asked < 100 else 1.0
        return slow * super().step(shape, rows)


def test_a_cost_is_not_believed_for_ever() -> None:
    """A shape that was slow when it was tried is tried again soon."""
    SlowAtFirst.asked, limits = 0, limits_of()
    chooser = AdaptiveShapes(limits, ready=lambda *_: limits.shapes)
    table = CostTable.measured()
    slow = SlowAtFirst(table.plain, table.chain)
    _, used = run(chooser, limits, rows=1, dials=(0.0,), num_steps=1000, table=slow)
    assert used["0/1/1"] > 600, used


def test_only_what_is_ready_is_chosen() -> None:
    limits, asked = limits_of(), []

    def ready(num_rows: int, features: StepFeatures) -> tuple[SpeculativeConfig, ...]:
        asked.append((num_rows, features))
        return (CHAIN,)

    chooser = AdaptiveShapes(limits, ready=ready)
    _, used = run(chooser, limits, rows=8, dials=(0.0,), num_steps=300, table=CostTable.measured())
    assert used == {"3/1/4": 300}
    assert asked == [(8, PLAIN)] * 300
    assert chooser.totals.num_changes == chooser.totals.num_probes == 0


TREE = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=4, num_draft_tokens=16)
EMITTED = {"0/1/1": 1.0, "1/4/5": 1.7, "3/1/4": 2.2, "3/4/16 of 8 a row": 2.8, "3/4/16": 3.0}
# Of one row, whose nodes cost nearly nothing, and of 64, whose nodes are what a step costs.
ONE_ROW = {"0/1/1": 4.1, "1/4/5": 4.4, "3/1/4": 4.8, "3/4/16 of 8 a row": 5.0, "3/4/16": 5.0}
MANY_ROWS = {"0/1/1": 6.8, "1/4/5": 12.0, "3/1/4": 10.6, "3/4/16 of 8 a row": 13.0, "3/4/16": 28.0}


@pytest.mark.parametrize(
    ("rows", "costs", "best"), [(1, ONE_ROW, "3/4/16"), (64, MANY_ROWS, "3/4/16 of 8 a row")]
)
def test_how_many_nodes_the_rows_share_is_chosen_by_what_they_cost(
    rows: int, costs: dict[str, float], best: str
) -> None:
    limits = replace(limits_of(), spec=TREE, other_shapes=shapes_for(TREE)[:-1])
    chooser = AdaptiveShapes(limits, ready=lambda *_: limits.shapes)
    refs, rng = tuple(RowRef(slot, 1) for slot in range(1, rows + 1)), np.random.default_rng(0)
    used: dict[str, int] = {}
    for step in range(2000):
        shape = chooser.choose(num_rows=rows, features=PLAIN)
        used[str(shape)] = used.get(str(shape), 0) + 1
        plan = StepPlan(step=step, kind=StepKind.DECODE, features=PLAIN, rows=refs, shape=shape)
        mean = EMITTED[str(shape)]  # whole tokens, right on average
        emitted = (int(mean) + (rng.random(rows) < mean % 1)).astype(np.int32)
        result = RoundResult(num_emitted=emitted, ids=np.zeros((rows, 1), np.int32))
        chooser.timed(plan, costs[str(shape)] / 1e3)
        chooser.read(plan, StepResult(step=step, rounds=(result,)))
    assert used[best] > 1700, used
