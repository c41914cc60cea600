from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.config.shape_sets import Candidates, read_candidates, shapes_for
from jspec.errors import ConfigError


def spec(num_steps: int, topk: int, nodes: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        algorithm=Algorithm.EAGLE3, num_steps=num_steps, topk=topk, num_draft_tokens=nodes
    )


@pytest.mark.parametrize(
    ("largest", "found"),
    [
        ((1, 1, 2), "0/1/1 1/1/2"),
        ((3, 1, 4), "0/1/1 1/1/2 3/1/4"),
        ((6, 1, 7), "0/1/1 1/1/2 3/1/4 6/1/7"),
        ((3, 4, 16), "0/1/1 1/4/5 3/1/4 3/4/16 of 8 a row 3/4/16"),
        ((2, 2, 7), "0/1/1 1/2/3 2/1/3 2/2/7"),
        ((2, 2, 3), "0/1/1 1/2/3 2/2/3"),
    ],
)
def test_the_set_by_the_rule(largest: tuple[int, int, int], found: str) -> None:
    assert " ".join(map(str, shapes_for(spec(*largest)))) == found


@given(steps=st.integers(1, 8), topk=st.integers(1, 6), data=st.data())
def test_every_shape_fits_within_the_largest_which_is_among_them(
    steps: int, topk: int, data: st.DataObject
) -> None:
    most = 1 + topk + (steps - 1) * topk * topk
    nodes = steps + 1 if topk == 1 else data.draw(st.integers(2, most))
    largest = spec(steps, topk, nodes)
    levels = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
    totals = st.lists(st.floats(1, 9), min_size=1, max_size=2).map(tuple)
    named = Candidates(data.draw(st.none() | levels), data.draw(st.none() | totals))
    found = shapes_for(largest, named)
    assert found[-1] == largest
    assert largest.total_nodes_per_row is None
    assert len(set(found)) == len(found) <= 7
    assert all(shape.fits_within(largest) for shape in found)
    assert all(shape.num_scratch_rows <= largest.num_scratch_rows for shape in found)


def test_levels_may_be_named(tmp_path: Path) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text('{"candidate_steps": [1, 3, 7]}')
    found = shapes_for(spec(3, 1, 4), read_candidates(file))
    assert " ".join(map(str, found)) == "1/1/2 3/1/4"
    found = shapes_for(spec(3, 4, 16), read_candidates(file))
    assert " ".join(map(str, found)) == "1/4/5 3/4/16"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"total_nodes_per_row": [6, 2.5, 16]}', "0/1/1 1/1/2 3/1/4 of 2.5 a row 3/1/4"),
        ('{"candidate_steps": [0], "total_nodes_per_row": [2]}', "0/1/1 3/1/4 of 2 a row 3/1/4"),
    ],
)
def test_nodes_for_all_rows_may_be_named(text: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text(text)
    shapes = shapes_for(spec(3, 1, 4), read_candidates(file))
    assert " ".join(map(str, shapes)) == found


def test_nodes_that_are_nearly_the_same_have_names_of_their_own() -> None:
    """Programs are found by name."""
    shapes = shapes_for(spec(3, 4, 16), Candidates(nodes=(16 / 3, 5.33333, 8)))
    assert len({str(shape) for shape in shapes}) == len(shapes)


def test_all_nodes_of_a_row_are_no_number_of_its_own() -> None:
    largest = replace(spec(3, 4, 16), total_nodes_per_row=16)
    assert [str(shape) for shape in shapes_for(largest)][-2:] == ["3/4/16 of 8 a row", "3/4/16"]


def test_who_has_a_number_of_nodes_keeps_it() -> None:
    largest = replace(spec(3, 4, 16), total_nodes_per_row=6)
    found = " ".join(map(str, shapes_for(largest, Candidates(nodes=(4, 8)))))
    assert found == "0/1/1 1/4/5 3/1/4 3/4/16 of 6 a row"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        '{"candidate_steps": []}',
        '{"candidate_steps": [-1]}',
        '{"steps": [1]}',
        '{"total_nodes_per_row": 8}',
        '{"total_nodes_per_row": [0.5]}',
        '{"total_nodes_per_row": [Infinity]}',
        '{"total_nodes_per_row": [true]}',
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="speculative_adaptive_config"):
        read_candidates(file)
