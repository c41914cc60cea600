"""How queries lie in tiles, and which tiles are whole queries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jspec.pallas_kernels.attention.block_plan import TILE_ROWS
from jspec.pallas_kernels.attention.query_tiles import MAX_PLACED, can_place, tiles_of


@given(st.integers(1, 64), st.integers(1, 64))
def test_tiles_whose_queries_can_be_placed_hold_them_whole_and_few(
    queries: int, group: int
) -> None:
    first = [q * group // TILE_ROWS for q in range(queries)]
    last = [(q * group + group - 1) // TILE_ROWS for q in range(queries)]
    assert last[-1] + 1 == tiles_of(queries * group)[0]
    most = max(first.count(tile) for tile in first)
    assert can_place(queries, group) == (first == last and most <= MAX_PLACED)
