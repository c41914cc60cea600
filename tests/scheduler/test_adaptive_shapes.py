"""The chooser of shapes in virtual time, on the dial's acceptance and an H200's costs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulate_shapes import CHAIN, CostTable, cell, limits_of, run
from jspec.core.config import SpeculativeConfig
from jspec.core.features import PLAIN, StepFeatures
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
