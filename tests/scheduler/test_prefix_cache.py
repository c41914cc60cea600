"""The prefix cache against a naive model: what is found, what is handed back, and when."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jspec.errors import InvariantError
from jspec.scheduler.pages.cached_page import CachedPage
from jspec.scheduler.pages.prefix_cache import Ids, PrefixCache

TEXT = (5, 6, 7, 8, 9)


def cached(
    ids: Ids, pages: tuple[int, ...], *, page_size: int = 2, lookahead: int = 1
) -> PrefixCache:
    """A cache that holds one text, which no row holds."""
    cache = PrefixCache(page_size=page_size, lookahead=lookahead)
    root = cache.root("x")
    cache.lock(root)
    last = cache.extend(root, ids, pages, known=len(ids), writer=1, beside=False)
    assert cache.unlock(last) == []
    return cache


def found(cache: PrefixCache, ids: Ids, namespace: str = "x") -> tuple[int, ...]:
    last = cache.match(namespace, ids)
    return () if last is None else last.pages


def test_the_worked_example() -> None:
    cache = cached(TEXT, (11, 12, 13))
    assert (cache.num_pages, cache.num_evictable) == (2, 2)
    assert 13 not in cache
    assert found(cache, (*TEXT, 4)) == (11, 12)
    assert found(cache, (5, 6, 7, 8, 3)) == (11,)
    assert found(cache, (5, 6, 3, 8, 9)) == ()
    assert found(cache, TEXT, namespace="y") == ()


@pytest.mark.parametrize(("lookahead", "pages"), [(0, (11,)), (1, (11,)), (2, (11,)), (3, ())])
def test_one_token_is_left_over_and_what_follows_must_be_known(
    lookahead: int, pages: tuple[int, ...]
) -> None:
    cache = cached((5, 6, 7, 8, 9, 1, 2), (11, 12, 13), lookahead=lookahead)
    assert found(cache, (5, 6, 7, 8)) == pages


def test_a_page_takes_the_place_of_one_with_the_same_tokens() -> None:
    cache = cached(TEXT, (11, 12, 13))
    last = cache.match("x", (*TEXT, 4))
    assert last is not None
    cache.lock(last)
    with pytest.raises(InvariantError, match="page 12 added twice"):
        cache.replace(last, 12, writer=3)
    assert cache.replace(last, 21, writer=3) == 12
    assert 12 not in cache
    assert found(cache, (*TEXT, 4)) == (11, 21)
    assert cache.unlock(last) == []
    assert cache.withdraw(3) == [21]
    assert found(cache, (*TEXT, 4)) == (11,)


def test_the_least_recently_used_goes_first_and_no_page_with_others_after_it() -> None:
    cache = PrefixCache(page_size=1, lookahead=0)
    for pages in ((1, 2), (1, 3), (4,)):
        last = cache.root("x")
        cache.lock(last)
        last = cache.extend(last, pages, pages, known=len(pages), writer=1, beside=True)
        cache.unlock(last)
    used = cache.match("x", (1, 2, 0))
    assert used is not None
    cache.lock(used)
    cache.unlock(used)
    assert [cache.evict(1) for _ in range(4)] == [[3], [4], [2], [1]]
    with pytest.raises(InvariantError, match="expected at most the 0"):
        cache.evict(1)


def test_a_page_in_use_is_not_evicted_and_a_withdrawn_one_goes_with_its_last_user() -> None:
    cache = cached(TEXT, (11, 12, 13))
    last = cache.match("x", (*TEXT, 4))
    assert last is not None
    cache.lock(last)
    assert cache.num_evictable == 0
    assert cache.withdraw(2) == []
    assert found(cache, (*TEXT, 4)) == (11, 12)
    assert cache.withdraw(1) == []
    assert found(cache, (*TEXT, 4)) == ()
    assert cache.num_pages == 2
    assert sorted(cache.unlock(last)) == [11, 12]
    assert (cache.num_pages, cache.num_evictable) == (0, 0)
    with pytest.raises(InvariantError, match="does not hold"):
        cache.unlock(last)


class AgainstTheModel(RuleBasedStateMachine):
    """Rows of tokens 0 and 1 come, write, grow and go; the model is a dict from prefix to page.

    A prefix is (namespace, the tokens up to and including the page's own and the lookahead).
    """

    @initialize(page_size=st.integers(1, 3), lookahead=st.integers(0, 2))
    def start(self, page_size: int, lookahead: int) -> None:
        self.size, self.lookahead = page_size, lookahead
        self.cache = PrefixCache(page_size=page_size, lookahead=lookahead)
        self.model: dict[tuple[str, Ids], int] = {}  # what can be found
        self.withdrawn: set[int] = set()
        self.writers: dict[int, int] = {}
        self.rows: list[tuple[CachedPage, str, Ids, list[int]]] = []  # last held, its row's pages
        self.next_page, self.step, self.given = 1, 1, set[int]()

    def prefix(self, ids: Ids, depth: int) -> Ids:
        return ids[: depth * self.size + self.lookahead]

    def naive_match(self, namespace: str, ids: Ids) -> list[int]:
        pages: list[int] = []
        while True:
            depth = len(pages) + 1
            end = depth * self.size
            key = (namespace, self.prefix(ids, depth))
            if end >= len(ids) or end + self.lookahead > len(ids) or key not in self.model:
                return pages
            pages.append(self.model[key])

    def begin_at(self, last: CachedPage | None) -> CachedPage | None:
        """Where a row begins whose text has `last` in the tree."""
        return last

    def held(self) -> set[int]:
        return {page for last, *_ in self.rows for page in last.pages}

    @rule(
        namespace=st.sampled_from("xy"),
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple),
    )
    def admit(self, namespace: str, ids: Ids) -> None:
        last = self.cache.match(namespace, ids)
        assert ([] if last is None else list(last.pages)) == self.naive_match(namespace, ids)
        last = self.begin_at(last) or self.cache.root(namespace)
        self.cache.lock(last)
        missing = -(-len(ids) // self.size) - last.depth
        own = list(range(self.next_page, self.next_page + missing))
        self.next_page += missing
        self.rows.append((last, namespace, ids, [*last.pages, *own]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), beside=st.booleans())
    def write(self, data: st.DataObject, beside: bool) -> None:
        i = data.draw(st.integers(0, len(self.rows) - 1))
        self.write_row(i, data.draw(st.integers(0, len(self.rows[i][2]))), beside=beside)

    def write_row(self, i: int, known: int, *, beside: bool) -> None:
        last, namespace, ids, pages = self.rows[i]
        self.step += 1
        after = self.cache.extend(last, ids, pages, known=known, writer=self.step, beside=beside)
        self.rows[i] = (after, namespace, ids, pages)
        if last.page in self.withdrawn:
            assert after is last
            return
        for depth in range(last.depth + 1, max(known - self.lookahead, 0) // self.size + 1):
            key = (namespace, self.prefix(ids, depth))
            own = pages[depth - 1]
            if key not in self.model:
                self.model[key] = own
                self.given.add(own)
                self.writers[own] = self.step
            elif self.model[key] != own and not beside:
                break
            assert after.pages[depth - 1] == self.model[key]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.end_row(data.draw(st.integers(0, len(self.rows) - 1)))

    def end_row(self, i: int) -> None:
        last, *_ = self.rows.pop(i)
        gone = set(self.cache.unlock(last))
        assert gone == (self.withdrawn & set(last.pages)) - self.held()
        self.withdrawn -= gone
        self.given -= gone

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        unused = set(self.model.values()) - self.held()
        self.evict_pages(data.draw(st.integers(0, len(unused))))

    def evict_pages(self, count: int) -> None:
        unused = set(self.model.values()) - self.held()
        assert self.cache.num_evictable == len(unused)
        gone = self.cache.evict(count)
        assert len(set(gone)) == count
        assert set(gone) <= unused
        self.model = {key: page for key, page in self.model.items() if page not in gone}
        self.given -= set(gone)
        for name, prefix in self.model:  # whoever is left can be reached
            depth = (len(prefix) - self.lookahead) // self.size
            for before in range(1, depth):
                assert (name, self.prefix(prefix, before)) in self.model

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.withdraw_from(data.draw(st.integers(max(self.step - 2, 1), self.step + 1)))

    def withdraw_from(self, step: int) -> None:
        failed = {key for key, page in self.model.items() if self.writers[page] >= step}
        for name, prefix in list(self.model):  # and what lies after
            if any(name == n and prefix[: len(p)] == p for n, p in failed):
                failed.add((name, prefix))
        pages = {self.model.pop(key) for key in failed}
        gone = set(self.cache.withdraw(step))
        assert gone == pages - self.held()
        self.withdrawn |= pages - gone
        self.given -= gone

    @invariant()
    def all_pages_are_accounted_for(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.num_pages == len(self.given)
            assert set(self.model.values()) | self.withdrawn == self.given
            assert all(page in self.cache for page in self.given)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.rows:
            self.end_row(0)
        self.cache.evict(self.cache.num_evictable)
        assert (self.cache.num_pages, self.cache.num_evictable) == (0, 0)
        assert self.cache.match("x", (0,) * 12) is None


TestAgainstTheModel = AgainstTheModel.TestCase
TestAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
