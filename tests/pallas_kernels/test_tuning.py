"""Schedules deal every unit once; lookups answer with what fits; candidates fit their shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.pallas_kernels.tuning import (
    SHARED_BYTES,
    Layout,
    MatmulTuning,
    Rows,
    Schedule,
    measured,
    schedule_of,
    stream_candidates,
    tile_candidates,
)

# Llama-3.1-8B: qkv, o, gate and up, down, lm_head; EAGLE-3's fc, qkv, lm_head.
SHAPES = (
    (4096, 6144),
    (4096, 4096),
    (4096, 28672),
    (14336, 4096),
    (4096, 128256),
    (12288, 4096),
    (8192, 6144),
    (4096, 32000),
)
SMALL = MatmulTuning(Rows.WEIGHTS, tile_m=8, tile_n=128)


def runs_of(schedule: Schedule) -> list[tuple[int, int, list[int]]]:
    """(tile, slot, units) of every run, in the order in which blocks walk them."""
    runs = []
    for block in range(schedule.num_blocks):
        total, step = schedule.num_units(block), 0
        while step < total:
            length = schedule.run_length(block, step)
            units = [schedule.unit(block, step + i) for i in range(length)]
            runs.append((units[0] // schedule.k_tiles, schedule.slot(block, units[0]), units))
            step += length
        assert step == total
    return runs


@given(
    num_tiles=st.integers(1, 40),
    run=st.integers(1, 12),
    num_splits=st.integers(0, 6),
    num_blocks=st.integers(1, 50),
)
def test_every_unit_is_computed_once_and_every_slot_written_once(
    num_tiles: int, run: int, num_splits: int, num_blocks: int
) -> None:
    k_tiles = run * (num_splits or 1)
    num_blocks = min(num_blocks, num_tiles * (num_splits or k_tiles))
    schedule = Schedule(num_tiles, k_tiles, num_blocks, num_splits)
    runs = runs_of(schedule)

    computed = sorted(unit for _, _, units in runs for unit in units)
    assert computed == list(range(num_tiles * k_tiles))
    for tile, _, units in runs:
        assert units == list(range(units[0], units[0] + len(units)))
        assert {unit // k_tiles for unit in units} == {tile}
    slots = schedule.slots_of_tiles()
    written = sorted((tile, slot) for tile, slot, _ in runs)
    assert written == [(tile, slot) for tile in range(num_tiles) for slot in range(slots[tile])]


def test_even_shares_differ_by_one_unit_at_most() -> None:
    for k, n in SHAPES:
        schedule = schedule_of(stream_candidates(1, k, n)[0], 1, k, n)
        shares = {schedule.num_units(block) for block in range(schedule.num_blocks)}
        assert max(shares) - min(shares) <= 1


def test_the_docstring_example() -> None:
    schedule = Schedule(num_tiles=3, k_tiles=4, num_blocks=5, num_splits=0)
    assert [schedule.num_units(block) for block in range(5)] == [2, 2, 3, 2, 3]
    assert schedule.slots_of_tiles() == [2, 2, 2]
    split = Schedule(num_tiles=3, k_tiles=4, num_blocks=5, num_splits=2)
    assert [split.unit(0, step) for step in range(split.num_units(0))] == [0, 1, 10, 11]


def test_lookup_takes_the_smallest_bucket_that_holds_m() -> None:
    table = {(4, 4096, 4096): SMALL}
    assert measured(3, 4096, 4096, table) is SMALL
    assert measured(4, 4096, 4096, table) is SMALL
    assert measured(5, 4096, 4096, table) is None
    assert measured(2, 4096, 4096, table) is None
    assert measured(3, 4096, 6144, table) is None
    assert measured(2000, 4096, 4096, table) is None


def test_lookup_never_answers_with_a_program_that_does_not_fit() -> None:
    table = {(1024, 4096, 4096): MatmulTuning(Rows.TOKENS, tile_m=128, tile_n=128)}
    assert measured(1024, 4096, 4096, table) is not None
    assert measured(1000, 4096, 4096, table) is None


@pytest.mark.parametrize("m", [1, 4, 8, 16])
def test_stream_candidates_fit(m: int) -> None:
    for k, n in SHAPES:
        candidates = stream_candidates(m, k, n)
        assert len(candidates) >= 4
        assert len(set(candidates)) == len(candidates)
        assert all(tuning.rows is Rows.WEIGHTS for tuning in candidates)
        assert all(tuning.shared_bytes <= SHARED_BYTES for tuning in candidates)


@pytest.mark.parametrize("m", [64, 128, 256, 512, 1024])
def test_tile_candidates_fit(m: int) -> None:
    for k, n in SHAPES:
        candidates = tile_candidates(m, k, n)
        assert len(candidates) >= 4
        assert len(set(candidates)) == len(candidates)
        assert all(tuning.problem(m, k, n) is None for tuning in candidates)


@pytest.mark.parametrize(
    ("tuning", "shape", "words"),
    [
        (SMALL, (8, 4096, 4100), "does not divide N 4100"),
        (SMALL, (8, 4000, 4096), "does not divide K 4000"),
        (SMALL, (9, 4096, 4096), "does not take M 9"),
        (MatmulTuning(Rows.TOKENS, 64, 128), (65, 4096, 4096), "does not take M 65"),
        (MatmulTuning(Rows.WEIGHTS, 8, 128, tile_k=32), (8, 4096, 4096), "no multiple of 64"),
        (MatmulTuning(Rows.WEIGHTS, 8, 64, num_consumers=2), (8, 4096, 4096), "do not part"),
        (MatmulTuning(Rows.TOKENS, 64, 512), (64, 4096, 4096), "512 columns"),
        (MatmulTuning(Rows.TOKENS, 128, 256), (128, 4096, 4096), "128 x 256 sums"),
        (MatmulTuning(Rows.WEIGHTS, 8, 128, num_splits=3), (8, 4096, 4096), "3 splits"),
        (MatmulTuning(Rows.WEIGHTS, 8, 128, num_stages=40), (8, 4096, 4096), "shared memory"),
    ],
)
def test_a_program_says_why_it_does_not_fit(
    tuning: MatmulTuning, shape: tuple[int, int, int], words: str
) -> None:
    assert words in (tuning.problem(*shape) or "")


def test_layouts_are_told_apart() -> None:
    assert MatmulTuning(Rows.WEIGHTS, 8, 128, layout=Layout.TILED) != SMALL
