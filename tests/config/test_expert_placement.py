"""Placement of experts: laws of the balanced map, and the files that give a map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.engine_args import EngineArgs
from jspec.config.expert_placement import (
    balanced,
    balancedness,
    device_loads,
    expert_map,
    in_order,
)
from jspec.errors import ConfigError

COUNTS = [[0, 0, 0, 0], [6, 1, 1, 2]]


@st.composite
def uses(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draw (counts, spares, devices) that divide."""
    num_devices = draw(st.integers(1, 6))
    num_physical = num_devices * draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, num_physical))
    counts = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    return draw(counts), num_physical - num_experts, num_devices


@given(uses())
def test_a_balanced_map_has_every_expert_and_loads_within_the_largest_copy(
    use: tuple[list[int], int, int],
) -> None:
    counts, num_spares, num_devices = use
    placed = balanced(counts, num_spares=num_spares, num_devices=num_devices)
    assert len(placed) == len(counts) + num_spares
    assert {*placed} == {*range(len(counts))}
    of_copy = {x: counts[x] / placed.count(x) for x in placed}
    loads = device_loads(counts, placed, num_devices)
    assert sum(loads) == pytest.approx(sum(counts))
    assert max(loads) - min(loads) <= max(of_copy.values()) + 1e-6
    for x in of_copy:  # a spare went to the largest copy of its time
        if placed.count(x) > 1:
            assert counts[x] / (placed.count(x) - 1) >= max(of_copy.values()) - 1e-6


@given(uses())
def test_balancedness_is_the_mean_load_over_the_largest(use: tuple[list[int], int, int]) -> None:
    counts, num_spares, num_devices = use
    placed = in_order(len(counts), num_spares)
    found = balancedness([counts, counts], (placed, ()), num_devices=num_devices)
    if not any(counts):
        assert found == {}
        return
    loads = device_loads(counts, placed, num_devices)
    assert found == {0: pytest.approx(sum(counts) / num_devices / max(loads))}
    assert 1 / num_devices <= found[0] + 1e-9 <= 1 + 2e-9


def test_a_hot_expert_is_replicated_over_the_devices() -> None:
    placed = balanced(COUNTS[1], num_spares=2, num_devices=2)
    assert placed == (0, 0, 1, 0, 3, 2)
    before, after = (
        balancedness(COUNTS[1:], (each,), num_devices=2)[0] for each in (in_order(4, 0), placed)
    )
    assert (before, after) == (5 / 7, 1.0)


def args(path: Path | None, **more: Any) -> EngineArgs:
    location = {} if path is None else {"init_expert_location": str(path)}
    return EngineArgs(**({"tp_size": 2, "ep_size": 2, **location} | more))


def write(path: Path, values: Any) -> Path:
    file = path / "experts.json"
    file.write_text(json.dumps(values))
    return file


def test_a_file_has_a_map_or_counts(tmp_path: Path) -> None:
    trivial = expert_map(args(None, ep_num_redundant_experts=2), (0, 4))
    assert trivial == ((), (0, 1, 2, 3, 0, 1))
    counted = write(tmp_path, {"logical_count": COUNTS})
    assert expert_map(args(counted, ep_num_redundant_experts=2), (0, 4)) == ((), (0, 0, 1, 0, 3, 2))
    given_map = write(tmp_path, {"physical_to_logical_map": [None, [3, 1, 0, 2]]})
    assert expert_map(args(given_map), (0, 4)) == ((), (3, 1, 0, 2))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "expected an object with either physical_to_logical_map or logical_count"),
        (
            {"logical_count": COUNTS, "physical_to_logical_map": []},
            "expected an object with either",
        ),
        ({"logical_count": COUNTS[:1]}, "logical_count has 1 rows; expected 2, one a layer"),
        ({"logical_count": 7}, "logical_count has 7; expected 2, one a layer"),
        ({"logical_count": [[], [1, 2, 3]]}, r"logical_count\[1\] is .*; expected 4 counts"),
        ({"logical_count": [[], [1, 2, 3, -1]]}, r"logical_count\[1\] is .*; expected 4 counts"),
        ({"logical_count": [[], [1, 2, 3, "a"]]}, r"logical_count\[1\] is .*; expected 4 counts"),
        ({"physical_to_logical_map": [[], [0, 1, 2, 4]]}, "expected 4 of the experts 0 to 3"),
        ({"physical_to_logical_map": [[], [0, 1, 2]]}, "expected 4 of the experts 0 to 3"),
        ({"physical_to_logical_map": [[], [0, 1, 2, 2]]}, "lacks expert 3; expected each"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(values: Any, says: str, tmp_path: Path) -> None:
    file = write(tmp_path, values)
    with pytest.raises(ConfigError, match=says) as refused:
        expert_map(args(file), (0, 4))
    assert "\n" not in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: .*; expected trivial or a file"):
        expert_map(args(tmp_path / "none.json"), (4,))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        expert_map(args(tmp_path / "bad.json"), (4,))


@pytest.mark.parametrize(
    "given_args", [{"ep_num_redundant_experts": 2}, {"init_expert_location": "x.json"}]
)
def test_placement_needs_groups_of_devices(given_args: dict[str, Any]) -> None:
    (name,) = given_args
    with pytest.raises(ConfigError, match=f"{name} is .*, but ep_size is 1; expected"):
        EngineArgs(tp_size=2, **given_args)
    EngineArgs(tp_size=2, ep_size=2, **given_args)
