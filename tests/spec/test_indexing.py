"""Positions, slots and reservations: the arithmetic that host and device share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.drafting import Algorithm
from jspec.spec import indexing


def test_worked_example_of_the_module() -> None:
    depths = np.array([0, 1, 1, 2])
    assert indexing.scratch_slot(7, np.arange(4)).tolist() == [7, 8, 9, 10]
    assert indexing.target_position(7, depths).tolist() == [7, 8, 8, 9]
    assert indexing.chosen_position(7, depths).tolist() == [8, 9, 9, 10]
    assert indexing.draft_position(7, depths[1:]).tolist() == [7, 7, 8]


@given(st.integers(0, 10**6), st.integers(0, 20))
def test_one_token_has_one_position(seq_len: int, depth: int) -> None:
    """The choice at a node is the token of its child, one deeper; the draft is one position
    before it."""
    assert indexing.chosen_position(seq_len, depth) == indexing.target_position(seq_len, depth + 1)
    assert indexing.draft_position(seq_len, depth) + 1 == indexing.target_position(seq_len, depth)
    # EAGLE's row i is (emitted token i, feature i): the draft position at depth i + 1.
    assert indexing.emitted_position(seq_len, depth) == indexing.draft_position(seq_len, depth + 1)


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ((0, 1, 1), 1),
        ((3, 1, 4), 4),
        ((4, 4, 16), 16),
        ((4, 8, 6), 24),
        ((5, 2, 4), 8),
        ((1, 8, 2), 2),
    ],
)
def test_scratch_holds_the_tree_the_beams_and_what_was_emitted(
    spec: tuple[int, int, int], rows: int
) -> None:
    """The extents are EAGLE's; a drafter that writes nothing leaves the tree's own slots."""
    num_steps, topk, nodes = spec
    extents = (
        Algorithm.EAGLE.propose_slots(num_steps, topk),
        Algorithm.EAGLE.advance_slots(num_steps, topk),
    )
    assert extents == (topk * max(num_steps - 1, 0), num_steps + 1)
    scratch = indexing.num_scratch_slots(nodes, propose_rows=extents[0], advance_rows=extents[1])
    assert scratch == rows
    assert indexing.num_scratch_slots(nodes, propose_rows=0, advance_rows=0) == nodes


@given(st.integers(0, 5000), st.integers(0, 2), st.integers(0, 6), st.integers(1, 8))
def test_reservation_holds_every_write_of_every_step_in_flight(
    committed: int, unread: int, num_steps: int, topk: int
) -> None:
    """Whatever the unread steps emit, the next one's highest slot is inside."""
    num_draft_tokens = num_steps + 1
    reserved = indexing.reserved_tokens(
        committed,
        unread_rounds=unread,
        num_steps=num_steps,
        scratch_slots=indexing.num_scratch_slots(
            num_draft_tokens,
            propose_rows=Algorithm.EAGLE.propose_slots(num_steps, topk),
            advance_rows=Algorithm.EAGLE.advance_slots(num_steps, topk),
        ),
    )
    longest = committed + unread * indexing.max_emitted(num_steps)
    written = [indexing.scratch_slot(longest, num_draft_tokens - 1)]
    written += [
        indexing.scratch_slot(longest, d * topk + k)
        for d in range(num_steps - 1)
        for k in range(topk)
    ]
    written += [indexing.emitted_position(longest, num_steps)]
    assert max(written) + 1 == reserved


@given(st.integers(0, 10**6), st.sampled_from([1, 4, 16, 64]))
def test_pages_hold_the_tokens_and_no_page_is_spare(num_tokens: int, page_size: int) -> None:
    pages = indexing.num_pages(num_tokens, page_size)
    assert (pages - 1) * page_size < num_tokens <= pages * page_size or pages == num_tokens == 0


def test_bucket_is_the_smallest_that_holds() -> None:
    buckets = (1, 2, 4, 6)
    assert [indexing.bucket(n, buckets) for n in range(7)] == [1, 1, 2, 4, 4, 6, 6]
    with pytest.raises(ValueError, match=r"no bucket holds 7: the buckets are \(1, 2, 4, 6\)"):
        indexing.bucket(7, buckets)


@pytest.mark.parametrize(
    ("first", "last", "sizes"),
    [(1, 8, (1, 2, 4, 8)), (1, 6, (1, 2, 4, 6)), (16, 16, (16,)), (32, 16, (16,))],
)
def test_powers_of_two_end_at_the_last(first: int, last: int, sizes: tuple[int, ...]) -> None:
    assert indexing.powers_of_two(first, last) == sizes
