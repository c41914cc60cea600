"""Columns against the rules of single rows: which rows decode, and which pages they lack."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.limits import ServeLimits
from jspec.scheduler.pages import budget
from jspec.scheduler.row_table import MAX_STOP_IDS, RowTable
from tests.support.fake_runner import small_limits

LIMITS = small_limits(num_slots=4, context_length=64)
SLOTS = np.arange(1, 5)


def seated(limits: ServeLimits = LIMITS, *, fill: int = 5, last: int = 40) -> RowTable:
    table = RowTable.empty(limits)
    for slot in SLOTS:
        table.seat(int(slot), fill=fill, left=20, last=last)
    return table


@given(
    fill=st.integers(1, 60),
    emitted=st.integers(0, 30),
    ahead=st.integers(0, 24),
    new_tokens=st.integers(1, 50),
    num_rounds=st.integers(1, 3),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_pages_missing_are_those_of_the_budget(
    fill: int, emitted: int, ahead: int, new_tokens: int, num_rounds: int, page_size: int
) -> None:
    limits = small_limits(num_rounds=num_rounds, page_size=page_size, num_pages=400)
    last = budget.last_committed(fill, new_tokens)
    table = seated(limits, fill=fill, last=last)
    table.emitted[2], table.ahead[2] = emitted, ahead
    committed = fill + max(emitted - 1, 0)
    needed = budget.pages_for_decode(limits, committed, unread_tokens=ahead, last=last)
    for held in (0, needed - 1, needed, needed + 1):
        table.pages[2] = held
        assert table.pages_missing(SLOTS, limits)[1] == max(needed - held, 0)


@pytest.mark.parametrize(
    ("is_dispatched", "emitted", "rounds", "left", "expected"),
    [
        (False, 0, 0, 9, False),  # the final chunk is not dispatched
        (True, 0, 0, 9, True),  # it is, and unread: the device knows the root
        (True, 0, 0, 1, False),  # the unread chunk emits the only token
        (True, 0, 1, 2, False),  # the chunk and one round emit two at least
        (True, 0, 1, 3, True),
        (True, 3, 1, 2, True),
        (True, 3, 2, 2, False),
    ],
)
def test_a_row_decodes_while_a_token_surely_remains(
    is_dispatched: bool, emitted: int, rounds: int, left: int, expected: bool
) -> None:
    table = seated()
    table.decodes[2], table.emitted[2], table.rounds[2] = is_dispatched, emitted, rounds
    table.left[2] = left
    assert table.may_decode(SLOTS).tolist() == [False, expected, False, False]


def test_only_rows_that_surely_go_on_go_on() -> None:
    table = seated()
    table.seat(2, fill=5, left=3, last=40)  # takes 3 and ends
    table.seat(3, fill=5, left=20, last=40, stop_ids=(9, 8))
    table.seat(4, fill=5, left=20, last=40, is_cut=True)  # its text may end it
    ids, counts = np.array([[1, 9, 3, 0]] * 4), np.array([3, 3, 3, 3])
    assert table.goes_on(SLOTS, counts, ids).tolist() == [True, False, False, False]
    assert table.goes_on(SLOTS, counts - 1, ids + 10).tolist() == [True, True, True, False]


@pytest.mark.parametrize("count", [MAX_STOP_IDS, MAX_STOP_IDS + 1])
def test_a_row_with_many_stop_ids_is_cut_by_itself(count: int) -> None:
    table = seated()
    table.seat(1, fill=5, left=20, last=40, stop_ids=tuple(range(100, 100 + count)))
    goes_on = table.goes_on(SLOTS, np.full(4, 1), np.full((4, 4), 7))
    assert bool(goes_on[0]) == (count <= MAX_STOP_IDS)
    assert goes_on[1:].all()


def test_ids_are_appended_up_to_their_counts() -> None:
    table = seated()
    ids = np.arange(16).reshape(4, 4)
    table.extend(SLOTS, np.array([4, 1, 2, 3]), ids)
    table.extend(SLOTS[1:], np.array([2, 2, 1]), ids[1:] + 100)
    table.append(1, (7, 7))
    outputs = [table.output(slot) for slot in (1, 2, 3, 4)]
    assert outputs == [[0, 1, 2, 3, 7, 7], [4, 104, 105], [8, 9, 108, 109], [12, 13, 14, 112]]
    assert table.left[1:].tolist() == [14, 17, 16, 16]
    assert table.committed(SLOTS).tolist() == [10, 7, 8, 8]
