"""Which rows read a prefix together: the grouping that saves most, and when it is worth it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.shared_prefixes import UNIT, SharedPrefix, SharingLimits
from jspec.messages.plan import StepKind
from jspec.messages.request import Request
from jspec.scheduler.pages.prefix_sharing import (
    PrefixSharing,
    common_length,
    group_rows,
    saved_rows,
)
from tests.scheduler.test_scheduler import Bench, expected_ids, make_request
from tests.support.fake_runner import small_limits
from tests.support.flat_limits import with_limits

TABLES = st.lists(
    st.lists(st.integers(1, 2), max_size=6), min_size=1, max_size=9, unique_by=tuple
).map(sorted)


@given(
    first=st.lists(st.integers(0, 2), max_size=9), second=st.lists(st.integers(0, 2), max_size=9)
)
def test_the_common_length_is_that_of_the_longest_common_beginning(
    first: list[int], second: list[int]
) -> None:
    length = common_length(first, second)
    assert first[:length] == second[:length]
    assert first[: length + 1] != second[: length + 1] or length == min(len(first), len(second))


@given(tables=TABLES, capacity=st.integers(2, 4))
def test_no_choice_of_branches_saves_more(tables: list[list[int]], capacity: int) -> None:
    groups = group_rows(tables, rows_a_pack=capacity)
    ends = [0, *(edge for begin, end, _ in groups for edge in (begin, end))]
    assert ends == sorted(ends)
    for begin, end, pages in groups:
        assert end - begin > 1
        assert len({tuple(table[:pages]) for table in tables[begin:end]}) == 1
        assert pages > 0

    def most(rows: list[list[int]]) -> int:
        """Return the best saving: all rows read their common part together, or each branch its
        own."""
        if len(rows) < 2:
            return 0
        pages = common_length(rows[0], rows[-1])
        parts: dict[tuple[int, ...], list[list[int]]] = {}
        for row in rows:
            parts.setdefault(tuple(row[: pages + 1]), []).append(row)
        apart = sum(most(part) for part in parts.values() if part[0][pages:])
        return max(saved_rows(len(rows), rows_a_pack=capacity) * pages, apart)

    saved = [saved_rows(e - b, rows_a_pack=capacity) * pages for b, e, pages in groups]
    assert sum(saved) == most(tables)


def test_the_groups_of_the_worked_example() -> None:
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 6], [7]]
    assert group_rows(tables, rows_a_pack=2) == [(0, 2, 3)]


def sharing_of(tables: dict[int, list[int]], **changes: Any) -> PrefixSharing:
    """Return the sharing of tables: page ids by slot; pages of 64."""
    limits = with_limits(small_limits(num_slots=8), page_size=64)
    settings = {"rows_a_pack": 2, "pays_from": 1, "least_rows": 1, **changes}
    sharing = PrefixSharing(limits.pool, SharingLimits(**settings))
    rows: Any = [
        SimpleNamespace(page_ids=pages, row=SimpleNamespace(slot=slot))
        for slot, pages in tables.items()
    ]
    sharing.regroup(rows)
    return sharing


ROWS = {3: [1, 2, 3, 9], 5: [4, 5, 6], 1: [1, 2, 3, 8], 2: [1, 2, 3, 7, 6], 4: [4, 5, 10]}


def test_rows_of_a_decode_are_told_their_leader_and_whole_units() -> None:
    shared, saved = sharing_of(ROWS).among(np.array([1, 2, 3, 4, 5]))
    # Three pages of 64 are one unit and a half.
    assert shared == tuple(SharedPrefix(leader, UNIT) for leader in (0, 0, 0, 3, 3))
    assert saved == 2 * UNIT  # three rows in packs of two save one reading, two rows another


def test_a_row_whose_group_is_not_in_the_decode_shares_nothing() -> None:
    shared, saved = sharing_of(ROWS).among(np.array([5, 1, 2]))
    assert shared == (SharedPrefix(0, 0), SharedPrefix(1, UNIT), SharedPrefix(1, UNIT))
    assert saved == UNIT


@pytest.mark.parametrize("slots", [[5, 1], [4], []])
def test_alone_there_is_nothing_to_share(slots: list[int]) -> None:
    assert sharing_of(ROWS).among(np.array(slots, np.int64)) == ((), 0)


def test_what_saves_too_little_is_not_told() -> None:
    slots = np.array([1, 2, 4, 5])
    assert sharing_of(ROWS, pays_from=2 * UNIT).among(slots)[1] == 2 * UNIT
    assert sharing_of(ROWS, pays_from=2 * UNIT + 1).among(slots) == ((), 0)


def test_rows_that_left_are_forgotten() -> None:
    sharing = sharing_of(ROWS)
    sharing.regroup([])
    assert sharing.among(np.array([1, 2, 3])) == ((), 0)


def test_decodes_are_told_while_rows_share_and_a_program_would_listen() -> None:
    """Rows follow one prompt of 132 tokens; one of them has log-probabilities."""
    limits = small_limits(num_pages=256, context_length=256, chunk_size=64, prefix_cache=True)
    sharing = SharingLimits(rows_a_pack=2, pays_from=1, least_rows=1)
    bench = Bench(with_limits(limits, sharing=sharing, logprobs=True))
    prompt = tuple(range(UNIT + 4))

    def asked(name: str, *, length: int, **sampling: Any) -> Request:
        request = make_request(name, max_new_tokens=length, **sampling)
        return replace(request, prompt_ids=(*prompt, ord(name)))

    bench.submit(asked("a", length=4))
    bench.run_all()
    bench.submit(asked("b", length=40), asked("c", length=30))
    bench.submit(asked("d", length=10, return_logprob=True))
    told, alone = [], 0
    while (plan := bench.dispatch()) or bench.in_flight:
        if plan is None:
            bench.collect()
            continue
        if plan.kind is StepKind.DECODE:
            told.append(bool(plan.shared))
            alone += len(plan.rows) == 1
            if plan.shared:
                assert plan.shared == (SharedPrefix(0, UNIT),) * len(plan.rows)
                assert len(plan.rows) == 2
    changes = [told[0], *(b for a, b in pairwise(told) if a != b)]
    assert changes == [False, True, False], "not with d, then b and c, then b alone"
    assert alone > 1
    stats = bench.scheduler.stats
    assert stats.num_shared_keys == UNIT * sum(told)
    for name, length in {"b": 40, "c": 30, "d": 10}.items():
        assert bench.output(name) == expected_ids(asked(name, length=length), length)


def test_whoever_comes_and_goes_rows_are_told_what_is_true() -> None:
    """Requests of three families come, share, wait for pages, end and are aborted; the fake runner
    compares the pages of all rows that share.
    """
    num_told = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        limits = small_limits(
            num_slots=4,
            num_pages=int(rng.integers(80, 120)) // (page_size := int(rng.choice([2, 4]))),
            page_size=page_size,
            overlap_depth=int(rng.integers(0, 4)),
            num_rounds=int(rng.integers(1, 3)),
            max_queued_requests=20,
            prefix_cache=True,
        )
        sharing = SharingLimits(rows_a_pack=2, pays_from=1, least_rows=1, unit=4)
        bench = Bench(with_limits(limits, sharing=sharing))
        requests = [drawn_request(rng, i) for i in range(10)]
        for request in requests:
            bench.submit(request)
            for _ in range(int(rng.integers(0, 12))):
                if bench.dispatch() is None and bench.in_flight:
                    bench.collect()
            if rng.random() < 0.2:
                bench.scheduler.abort(request.request_id)
        bench.run_all()
        num_told += sum(bool(plan.shared) for plan in bench.runner.plans)
        stats = bench.scheduler.stats
        assert (stats.num_leaked_pages, stats.num_free_pages) == (0, stats.num_pages)
        for request in requests:
            if request.request_id not in bench.chunks:  # aborted before it emitted a token
                continue
            output = bench.output(request.request_id)
            assert output == expected_ids(request, len(output))
    assert num_told > 150


def drawn_request(rng: np.random.Generator, i: int) -> Request:
    """Return a prompt of one of three families, with a shared start and its own end."""
    family, own = int(rng.integers(3)), rng.integers(0, 40, int(rng.integers(1, 6)))
    common = tuple(range(family, family + int(rng.choice([8, 16, 24]))))
    request = make_request(f"r{i}", max_new_tokens=int(rng.integers(1, 30)))
    return replace(request, prompt_ids=(*common, *own.tolist()), seed=i)
