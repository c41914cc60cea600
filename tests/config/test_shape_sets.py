from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.config.shape_sets import read_candidates, shapes_for
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
        ((3, 4, 16), "0/1/1 1/4/5 3/1/4 3/4/16"),
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
    found = shapes_for(largest, data.draw(st.none() | levels))
    assert found[-1] == largest
    assert len(set(found)) == len(found) <= 7
    assert all(shape.fits_within(largest) for shape in found)
    assert all(shape.num_scratch_slots <= largest.num_scratch_slots for shape in found)


def test_levels_may_be_named(tmp_path: Path) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text('{"candidate_steps": [1, 3, 7]}')
    found = shapes_for(spec(3, 1, 4), read_candidates(file))
    assert " ".join(map(str, found)) == "1/1/2 3/1/4"
    found = shapes_for(spec(3, 4, 16), read_candidates(file))
    assert " ".join(map(str, found)) == "1/4/5 3/4/16"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        '{"candidate_steps": []}',
        '{"candidate_steps": [-1]}',
        '{"candidate_steps": [true]}',
        '{"steps": [1]}',
        '{"candidate_steps": [1], "steps": [1]}',
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="speculative_adaptive_config"):
        read_candidates(file)
    file.write_bytes(b'{"\xe9')
    with pytest.raises(ConfigError, match=r"adaptive.json is not UTF-8: byte 0xe9 at offset 2"):
        read_candidates(file)
