"""Pages of window spaces beside the tree, against a naive model: who finds, holds, loses them."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from jspec.errors import InvariantError
from jspec.scheduler.pages.cached_page import CachedPage, WindowPage
from jspec.scheduler.pages.prefix_cache import Ids, PrefixCache
from jspec.scheduler.pages.window_pool import WindowPool
from tests.scheduler.test_prefix_cache import AgainstTheModel

TEXT = (5, 6, 7, 8, 9, 1, 2, 3)


def cached(pool: WindowPool, *, held: list[WindowPage], first: int) -> CachedPage:
    """TEXT in pages of 2, those of the window space from index `first` on, and no row."""
    cache = PrefixCache(page_size=2, lookahead=0, windows=(pool,))
    root = cache.root("x")
    cache.lock(root)
    last = cache.extend(root, TEXT, (11, 12, 13, 14), known=8, writer=1, beside=False)
    assert cache.attach(last, TEXT, [(first, held)], known=8, writer=1) is last
    assert cache.unlock(last) == []
    usable = cache.usable(last)
    return usable or root


def test_the_worked_example() -> None:
    pool = WindowPool(9, index=0, tail=2)
    held = pool.allocate(2)
    node = cached(pool, held=held, first=1)
    assert (node.page, node.depth) == (13, 3)
    assert [page.windows[0] for page in node.path()] == [*held[::-1], None]


def test_a_page_outlives_its_row_only_in_the_tree_and_goes_when_room_is_needed() -> None:
    pool = WindowPool(3, index=0, tail=1)
    held = pool.allocate(3)
    with pytest.raises(InvariantError, match="held by a second row; expected one in the tree"):
        pool.hold(held[0])
    node = cached(pool, held=held[:2], first=2)
    pool.hold(held[1])
    for page in held:
        pool.let_go(page)
    assert (pool.num_free, pool.num_attached, pool.num_leaked([held[1].page])) == (2, 2, 0)
    assert {page.page for page in pool.allocate(2)} == {held[0].page, held[2].page}
    assert (pool.num_free, node.windows) == (0, [held[1]])
    with pytest.raises(InvariantError, match="asked for 1 pages; expected from 0 to the 0 free"):
        pool.allocate(1)
    pool.let_go(held[1])
    with pytest.raises(InvariantError, match="let go by a row that does not hold it"):
        pool.let_go(held[1])


ENDS = st.sampled_from([(0,), (1,), (1, 0)])
# Of a few families, so that many begin alike.
ALIKE = st.builds(lambda a, b, end: (0,) * a + (1,) * b + end, *[st.integers(0, 8)] * 2, ENDS)
TEXTS = st.lists(st.tuples(st.sampled_from("xxxy"), ALIKE), min_size=1, max_size=4)


class WithWindows(AgainstTheModel):
    """Beside each page of the tree up to two spaces; the model is a dict from prefix to page for
    each, the pages that each row holds, and the order in which pages were let go of."""

    @initialize(
        page_size=st.integers(1, 3),
        lookahead=st.integers(0, 2),
        tails=st.lists(st.integers(0, 3), min_size=1, max_size=2),
        num_pages=st.integers(3, 20),
    )
    def start(self, page_size: int, lookahead: int, tails: list[int], num_pages: int) -> None:
        super().start(page_size=page_size, lookahead=lookahead)
        self.pools = tuple(
            WindowPool(num_pages, index=i, tail=tail) for i, tail in enumerate(tails)
        )
        self.cache = PrefixCache(page_size=page_size, lookahead=lookahead, windows=self.pools)
        self.spaces = range(len(tails))
        self.found: list[dict[tuple[str, Ids], WindowPage]] = [{} for _ in tails]
        self.told: list[dict[int, tuple[str, Ids]]] = [{} for _ in tails]  # what a page holds
        self.mine: dict[int, list[tuple[int, list[WindowPage]]]] = {}  # by the row's list of pages
        self.let: list[dict[int, int]] = [{} for _ in tails]
        self.sought: set[tuple[str, Ids]] = set()
        self.clock = 0

    def begin_at(self, last: CachedPage | None) -> CachedPage | None:
        return None if last is None else self.cache.usable(last)

    @rule(
        namespace=st.sampled_from("xy"),
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple),
    )
    def admit(self, namespace: str, ids: Ids) -> None:
        reached = len(self.naive_match(namespace, ids))
        expected = max(d for d in range(reached + 1) if self.is_whole(namespace, ids, d))
        super().admit(namespace, ids)
        last, *_, pages = self.rows[-1]
        assert last.depth == expected
        held: list[tuple[int, list[WindowPage]]] = []
        for i, pool in enumerate(self.pools):
            tail = [node.windows[i] for node in islice(last.path(), pool.tail)][::-1]
            first = last.depth - len(tail)
            for depth, page in enumerate(tail, first + 1):
                assert page is not None
                assert self.told[i][page.page] == (namespace, self.prefix(ids, depth))
                pool.hold(page)
            held.append((first, [page for page in tail if page is not None]))
        self.mine[id(pages)] = held

    def is_whole(self, namespace: str, ids: Ids, depth: int) -> bool:
        return all(
            (namespace, self.prefix(ids, d)) in self.found[i]
            for i in self.spaces
            for d in range(max(depth - self.pools[i].tail, 0) + 1, depth + 1)
        )

    def write_row(self, i: int, known: int, *, beside: bool) -> None:
        *_, pages = self.rows[i]
        end = -(-known // self.size)
        for space, (first, held) in enumerate(self.mine[id(pages)]):
            missing = max(end - first - len(held), 0)
            if missing > self.pools[space].num_free:
                return
        for space in self.spaces:
            self.grow(space, i, end)
        super().write_row(i, known, beside=beside)
        last, namespace, ids, _ = self.rows[i]
        mine = self.mine[id(pages)]
        self.cache.attach(last, ids, mine, known=known, writer=self.step)
        if last.page in self.withdrawn:
            return
        reached = 0
        while (
            reached < max(known - self.lookahead, 0) // self.size
            and (namespace, self.prefix(ids, reached + 1)) in self.model
        ):
            reached += 1
        for space, (first, held) in enumerate(mine):
            for depth, page in enumerate(held, first + 1):
                key, found = (namespace, self.prefix(ids, depth)), self.found[space]
                if depth <= reached and key not in found and page not in found.values():
                    found[key] = page
                    page.writer = self.step

    def grow(self, space: int, i: int, end: int) -> None:
        """The row's pages up to index `end`; who is evicted is who the model says."""
        _, namespace, ids, pages = self.rows[i]
        pool, (first, held) = self.pools[space], self.mine[id(pages)][space]
        missing = max(end - first - len(held), 0)
        unused = {
            page.page: (key in self.sought, self.let[space][page.page])
            for key, page in self.found[space].items()
            if page.page not in self.in_use(space)
        }
        evicted = sorted(unused, key=unused.__getitem__)
        evicted = evicted[: max(missing - (pool.num_free - len(unused)), 0)]
        new = pool.allocate(missing)
        lost = {key for key, page in self.found[space].items() if page.page in evicted}
        assert set(evicted) <= {page.page for page in new}
        for key in lost:
            assert self.found[space].pop(key).node is None
        for page in new:
            assert page.page not in self.in_use(space)
            assert page.page not in {each.page for each in self.found[space].values()}
            held.append(page)
            text = self.prefix(ids, first + len(held))
            self.told[space][page.page] = namespace, text

    def in_use(self, space: int) -> set[int]:
        return {page.page for held in self.mine.values() for page in held[space][1]}

    def let_go(self, space: int, page: WindowPage) -> None:
        self.clock += 1
        self.let[space][page.page] = self.clock
        self.pools[space].let_go(page)

    @rule(texts=TEXTS, chunk=st.integers(1, 6), keeps=st.integers(0, 3), seeks=st.booleans())
    def serve(self, texts: list[tuple[str, Ids]], chunk: int, keeps: int, seeks: bool) -> None:
        """One row after the other: admitted, written chunk by chunk, of each window space the last
        pages kept, and ended."""
        for namespace, ids in texts:
            self.admit(namespace=namespace, ids=ids)
            row = self.rows[-1]
            for known in (*range(chunk, len(ids), chunk), len(ids)):
                self.write_row(len(self.rows) - 1, known, beside=known == len(ids))
                for space in self.spaces:
                    self.give_back(row[3], space, leaves=keeps)
            if seeks:
                self.seek_end(self.rows[-1])
            self.end_row(len(self.rows) - 1)

    def give_back(self, pages: list[int], space: int, *, leaves: int) -> None:
        """All but the last `leaves` pages of a row."""
        first, held = self.mine[id(pages)][space]
        going = held[: max(len(held) - leaves, 0)]
        del held[: len(going)]
        self.mine[id(pages)][space] = first + len(going), held
        for page in going:
            self.let_go(space, page)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        """A row gives back its first pages of one space."""
        *_, pages = data.draw(st.sampled_from(self.rows))
        space = data.draw(st.sampled_from(self.spaces))
        num_held = len(self.mine[id(pages)][space][1])
        self.give_back(pages, space, leaves=data.draw(st.integers(0, num_held)))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        self.seek_end(data.draw(st.sampled_from(self.rows)))

    def seek_end(self, row: tuple[CachedPage, str, Ids, list[int]]) -> None:
        last, namespace, ids, _ = row
        self.cache.seek(last)
        for depth in range(last.depth, max(last.depth - max(p.tail for p in self.pools), 0), -1):
            key = (namespace, self.prefix(ids, depth))
            for space in self.spaces if key in self.model and key not in self.sought else ():
                page = self.found[space].get(key)
                if page is not None and page.page not in self.in_use(space):
                    self.clock += 1
                    self.let[space][page.page] = self.clock
            if key in self.model and last.page not in self.withdrawn:
                self.sought.add(key)

    def end_row(self, i: int) -> None:
        *_, pages = self.rows[i]
        for space, (_, held) in enumerate(self.mine.pop(id(pages))):
            for page in held:
                self.let_go(space, page)
        super().end_row(i)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A few pages: what is left is more of a tree."""
        unused = set(self.model.values()) - self.held()
        self.evict_pages(data.draw(st.integers(0, min(len(unused), 3))))
        self.forget()

    @rule(back=st.integers(-1, 4))
    def withdraw(self, back: int) -> None:
        step = max(self.step - back, 1)
        self.withdraw_from(step)
        for found in self.found:
            for key in [key for key, page in found.items() if page.writer >= step]:
                del found[key]
        self.forget()

    def forget(self) -> None:
        """What lies beside a page that is gone cannot be found."""
        self.sought &= self.model.keys()
        for found in self.found:
            for key in found.keys() - self.model.keys():
                assert found.pop(key).node is None

    @invariant()
    def all_window_pages_are_accounted_for(self) -> None:
        for space in self.spaces if hasattr(self, "pools") else ():
            pool, in_use = self.pools[space], self.in_use(space)
            assert pool.num_attached == len(self.found[space])
            assert pool.num_free == pool.num_pages - len(in_use)
            assert pool.num_leaked(in_use) == 0

    def teardown(self) -> None:
        super().teardown()
        for pool in self.pools if hasattr(self, "pools") else ():
            assert (pool.num_free, pool.num_attached) == (pool.num_pages, 0)


TestWithWindows = WithWindows.TestCase
TestWithWindows.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
