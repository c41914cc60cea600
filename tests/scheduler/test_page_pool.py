"""Laws of the page pool."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jspec.errors import InvariantError
from jspec.scheduler.pages.page_pool import DUMMY_PAGE, PagePool


class PoolLaws(RuleBasedStateMachine):
    """Lent and free pages partition 1..num_pages, whatever is lent and returned."""

    @initialize(num_pages=st.integers(1, 20))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.held: list[int] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        pages = self.pool.allocate(count)
        assert len(pages) == count
        self.held.extend(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        self.pool.release(pages)
        self.held = [page for page in self.held if page not in pages]

    @rule(excess=st.integers(1, 5))
    def too_many(self, excess: int) -> None:
        with pytest.raises(InvariantError, match="free ones"):
            self.pool.allocate(self.pool.num_free + excess)

    @rule(data=st.data())
    def double_free(self, data: st.DataObject) -> None:
        free = sorted(set(range(1, self.pool.num_pages + 1)) - set(self.held))
        if free:
            with pytest.raises(InvariantError, match="released twice"):
                self.pool.release([data.draw(st.sampled_from(free))])

    @invariant()
    def partition(self) -> None:
        if hasattr(self, "pool"):
            assert len(set(self.held)) == len(self.held)
            assert set(self.held) <= set(range(1, self.pool.num_pages + 1))
            assert self.pool.num_free + len(self.held) == self.pool.num_pages
            assert self.pool.num_lent == len(self.held)
            assert self.pool.num_leaked(len(self.held)) == 0


TestPoolLaws = PoolLaws.TestCase


def test_every_page_but_the_dummy_is_lent_once() -> None:
    pool = PagePool(5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_a_page_returned_is_lent_next() -> None:
    pool = PagePool(5)
    pages = pool.allocate(3)
    pool.release([pages[1]])
    assert pool.allocate(1) == (pages[1],)


@pytest.mark.parametrize("page", [DUMMY_PAGE, -1, 6])
def test_a_page_outside_the_pool_cannot_return(page: int) -> None:
    with pytest.raises(InvariantError, match="expected 1 to 5"):
        PagePool(5).release([page])


def test_releasing_one_page_twice_in_one_call_raises() -> None:
    pool = PagePool(5)
    (page,) = pool.allocate(1)
    with pytest.raises(InvariantError, match="released twice"):
        pool.release([page, page])


def test_leak_count_is_what_nobody_accounts_for() -> None:
    pool = PagePool(5)
    pool.allocate(3)
    assert pool.num_leaked(1) == 2


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(InvariantError, match="num_pages is 0"):
        PagePool(0)
