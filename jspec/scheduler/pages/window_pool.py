"""The pages of one window space: held by rows, and found by texts that begin alike.

A row holds a page for as long as its queries see it, and several rows may hold the same one. A page
that is attached to the tree of the prefix cache stays when its last row lets go of it, and is
evicted when somebody needs room; another one is free at once. If its place in the tree goes first,
it is found no more, and free with its last row.

    evicted first   pages at which no text ended and none began to differ from the others: most of a
                    long text, of which only a few places are ever begun after
    then            the others
    among these     the one that was let go of first

It hands out pages. It knows no row, no token and no device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from jspec.errors import InvariantError
from jspec.scheduler.pages.cached_page import CachedPage, WindowPage
from jspec.scheduler.pages.page_pool import PagePool


class WindowPool:
    """The pages of window space `index`; `tail` of them before a boundary are what a row needs that
    begins there (fewer at the very beginning)."""

    def __init__(self, num_pages: int, *, index: int, tail: int) -> None:
        self._pool = PagePool(num_pages)
        self._index = index
        self._attached: dict[int, WindowPage] = {}
        # Those in no use, by whether somebody sought their place, the first to go first.
        self._unused: tuple[OrderedDict[int, WindowPage], ...] = (OrderedDict(), OrderedDict())
        self.tail = tail
        self.version = 0  # of what can be found

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be lent: free ones, and those that can be evicted."""
        return self._pool.num_free + self._num_unused

    @property
    def num_attached(self) -> int:
        """Pages that can be found, held by rows or not."""
        return len(self._attached)

    def num_leaked(self, held: Iterable[int]) -> int:
        """Lent pages that neither rows, which hold those of these numbers, nor the tree have."""
        return self._pool.num_leaked(len(set(held)) + self._num_unused)

    @property
    def _num_unused(self) -> int:
        return sum(map(len, self._unused))

    def allocate(self, num_pages: int) -> list[WindowPage]:
        """Lends pages, each to one row, evicting what it must.

        Raises InvariantError for more than num_free.
        """
        for _ in range(min(num_pages - self._pool.num_free, self._num_unused)):
            self._evict()
        return [WindowPage(page) for page in self._pool.allocate(num_pages)]

    def hold(self, page: WindowPage) -> None:
        """One more row holds it. Raises InvariantError for a page that nobody could have found."""
        if page.node is None:
            raise InvariantError(f"page {page.page} held by a second row; expected one in the tree")
        self._unused[page.node.is_sought].pop(page.page, None)
        page.num_users += 1

    def let_go(self, page: WindowPage) -> None:
        """A row lets go of it. Raises InvariantError if no row holds it."""
        if page.num_users < 1:
            raise InvariantError(f"page {page.page} let go by a row that does not hold it")
        page.num_users -= 1
        if page.num_users:
            return
        if page.node is None:
            self._pool.release((page.page,))
        else:
            self._unused[page.node.is_sought][page.page] = page

    # The tree.

    def has_tail(self, node: CachedPage) -> bool:
        """Whether the pages that a row needs which begins after this node are there."""
        return all(each.windows[self._index] for each in islice(node.path(), self.tail))

    def attach(self, page: WindowPage, node: CachedPage, *, writer: int) -> None:
        """A row's page is found beside `node` from step `writer` on, unless one is there already,
        or the page is found elsewhere."""
        if page.node is None and node.windows[self._index] is None:
            page.node, page.writer = node, writer
            node.windows[self._index] = self._attached[page.page] = page
            self.version += 1

    def detach(self, page: WindowPage) -> None:
        """It is found no more, and is free if no row holds it."""
        node = page.node
        assert node is not None
        self._unused[node.is_sought].pop(page.page, None)
        del self._attached[page.page]
        node.windows[self._index] = page.node = None
        self.version += 1
        if not page.num_users:
            self._pool.release((page.page,))

    def seek(self, node: CachedPage) -> None:
        """Somebody's text ended or began to differ here, which is said once."""
        page = node.windows[self._index]
        if page is not None and not page.num_users:
            self._unused[1][page.page] = self._unused[0].pop(page.page)

    def withdraw(self, writer: int) -> None:
        """No page of that step or of a later one is found any more."""
        for page in [page for page in self._attached.values() if page.writer >= writer]:
            self.detach(page)

    def _evict(self) -> None:
        passed, sought = self._unused
        _, page = (passed or sought).popitem(last=False)
        self.detach(page)
