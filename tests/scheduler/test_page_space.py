"""One page space and the prefix tree: finding, using and evicting pages."""

from __future__ import annotations

import pytest

from jspec.errors import InvariantError
from jspec.scheduler.pages.page_space import DUMMY_PAGE, PageSpace
from jspec.scheduler.pages.prefix_cache import Ids, PrefixCache
from tests.support.fake_runner import small_limits

TEXT = (5, 6, 7, 8, 9)


def space_of(num_pages: int, *, keep: int | None = None) -> PageSpace:
    limits = small_limits(page_size=2, num_pages=99, chunk_size=8, prefill_rows=1)
    return PageSpace(limits, num_pages, index=0, keep=keep)


def cached(space: PageSpace, *texts: Ids, lookahead: int = 0) -> tuple[PrefixCache, list[int]]:
    """Write texts by rows that end; return their pages."""
    cache = PrefixCache((space,), page_size=2, lookahead=lookahead)
    pages: list[int] = []
    for ids in texts:
        row = space.admit((), last=len(ids), end=0)
        space.grow(row, -(-len(ids) // 2))
        pages += row.pages
        last = cache.extend(cache.root("x"), ids, known=len(ids))
        space.publish(row, last, since=0, writer=1)
        space.release(row)
    return cache, pages


def found(space: PageSpace, cache: PrefixCache, ids: Ids, namespace: str = "x") -> list[int]:
    path = cache.match(namespace, ids)
    return [node.records[space.index] for node in path[: cache.last_start(path)]]


def test_the_worked_example_of_keys() -> None:
    space = space_of(9)
    cache, (first, second, _) = cached(space, TEXT, lookahead=1)
    assert (space.num_cached, space.num_free) == (2, 9)
    assert found(space, cache, (*TEXT, 4)) == [first, second]
    assert found(space, cache, (5, 6, 7, 8, 3)) == [first]
    assert found(space, cache, (5, 6, 3, 8, 9)) == []
    assert found(space, cache, TEXT, namespace="y") == []


@pytest.mark.parametrize(("lookahead", "count"), [(0, 1), (1, 1), (2, 1), (3, 0)])
def test_one_token_is_left_over_and_what_follows_must_be_known(lookahead: int, count: int) -> None:
    space = space_of(9)
    cache, pages = cached(space, (5, 6, 7, 8, 9, 1, 2), lookahead=lookahead)
    assert found(space, cache, (5, 6, 7, 8)) == pages[:count]


def test_the_worked_example_of_windows() -> None:
    space = space_of(9, keep=4)
    cache = PrefixCache((space,), page_size=2, lookahead=0)
    row = space.admit((), last=8, end=0)
    space.grow(row, 4)
    space.trim(row, 5)  # sees 2..: page 0 is released
    ids = (5, 6, 7, 8, 9, 1, 2, 3)
    last = cache.extend(cache.root("x"), ids, known=8)
    space.publish(row, last.parent or last, since=0, writer=1)
    assert [node.records[0] for node in cache.match("x", (*ids, 4))] == [0, *row.pages[:2], 0]
    assert found(space, cache, (*ids, 4))[1:] == row.pages[:2]


def test_the_least_recently_used_goes_first_and_no_page_before_those_after_it() -> None:
    space = space_of(4)
    cache, (_, two, one, three, four) = cached(space, (1, 1, 2, 2), (1, 1, 3, 3), (4, 4))
    again = space.admit(cache.match("x", (1, 1, 2, 2, 0)), last=9, end=0)
    assert again.pages == [one, two]
    space.release(again)
    assert [space.allocate(1) for _ in range(4)] == [[three], [four], [two], [one]]
    with pytest.raises(InvariantError, match="asked for 1 pages; expected from 0 to the 0 free"):
        space.allocate(1)


def test_a_page_in_use_is_not_evicted_and_a_withdrawn_one_goes_with_its_last_user() -> None:
    space = space_of(3)
    cache, pages = cached(space, TEXT)
    row = space.admit(cache.match("x", TEXT), last=9, end=0)
    assert space.num_free == 1
    cache.withdraw(2)
    assert found(space, cache, TEXT) == pages[:2]
    cache.withdraw(1)
    assert (found(space, cache, TEXT), space.num_cached, space.num_free) == ([], 0, 1)
    space.release(row)
    assert space.num_free == 3


def test_a_page_takes_the_place_of_an_unused_one_with_the_same_tokens() -> None:
    space = space_of(9)
    cache, pages = cached(space, TEXT, TEXT)
    assert found(space, cache, TEXT) == pages[3:5]
    assert (space.num_cached, space.num_free) == (2, 9)


def test_pages_are_allocated_once_and_the_last_one_released_first() -> None:
    space = space_of(5)
    pages = space.allocate(5)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert (space.num_free, space.num_leaked(())) == (0, 5)
    space.drop(pages[1])
    for page in (pages[1], DUMMY_PAGE, -1, 6):
        with pytest.raises(InvariantError, match=f"page {page} released; expected a page in use"):
            space.drop(page)
    with pytest.raises(InvariantError, match="acquired; expected one in use or cached"):
        space.acquire(pages[1])
    assert space.allocate(1) == [pages[1]]


def test_an_empty_space_is_refused() -> None:
    with pytest.raises(InvariantError, match="num_pages is 0"):
        space_of(0)
