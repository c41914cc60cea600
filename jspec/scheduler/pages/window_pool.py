"""The pages of one window space: used by rows, and cached for texts with a common prefix.

A row uses a page for as long as its queries see it; several rows may use the same one. A page
attached to the prefix tree stays when its last row releases it, until it is evicted; an unattached
one is free at once. A page whose node is removed first is free when its last row releases it.

    evicted first   pages at which no text ended or diverged: most of a long text, of which only a
                    few places are ever continued
    then            the others
    among these     the one released first

It knows no row, no token and no device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from jspec.errors import InvariantError
from jspec.scheduler.pages.cached_page import CachedPage, WindowPage
from jspec.scheduler.pages.page_pool import PagePool


class WindowPool:
    """The pages of window space `index`.

    tail: pages before a boundary that a row needs to start there (fewer near the beginning).
    """

    def __init__(self, num_pages: int, *, index: int, tail: int) -> None:
        self._pool = PagePool(num_pages)
        self._index = index
        self._attached: dict[int, WindowPage] = {}
        # Unused attached pages, by node.is_sought, in eviction order.
        self._unused: tuple[OrderedDict[int, WindowPage], ...] = (OrderedDict(), OrderedDict())
        self.tail = tail
        self.version = 0  # changes with each page attached or detached

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be lent: free ones, and those that can be evicted."""
        return self._pool.num_free + self._num_unused

    @property
    def num_attached(self) -> int:
        return len(self._attached)

    def num_leaked(self, held: Iterable[int]) -> int:
        """Return the number of lent pages that are neither in `held` nor in the tree."""
        return self._pool.num_leaked(len(set(held)) + self._num_unused)

    @property
    def _num_unused(self) -> int:
        return sum(map(len, self._unused))

    def allocate(self, num_pages: int) -> list[WindowPage]:
        """Lend pages, evicting if necessary. Raises InvariantError for more than num_free."""
        for _ in range(min(num_pages - self._pool.num_free, self._num_unused)):
            self._evict()
        return [WindowPage(page) for page in self._pool.allocate(num_pages)]

    def hold(self, page: WindowPage) -> None:
        """Add a user. Raises InvariantError for a page that is not in the tree."""
        if page.node is None:
            raise InvariantError(f"page {page.page} held by a second row; expected one in the tree")
        self._unused[page.node.is_sought].pop(page.page, None)
        page.num_users += 1

    def let_go(self, page: WindowPage) -> None:
        """Remove a user. Raises InvariantError if it has none."""
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
        """Return whether the pages exist that a row needs to start after this node."""
        return all(each.windows[self._index] for each in islice(node.path(), self.tail))

    def attach(self, page: WindowPage, node: CachedPage, *, writer: int) -> None:
        """Attach a page to `node` for steps from `writer` on, unless either is already attached."""
        if page.node is None and node.windows[self._index] is None:
            page.node, page.writer = node, writer
            node.windows[self._index] = self._attached[page.page] = page
            self.version += 1

    def detach(self, page: WindowPage) -> None:
        """Remove a page from the tree; it is free if no row uses it."""
        node = page.node
        assert node is not None
        self._unused[node.is_sought].pop(page.page, None)
        del self._attached[page.page]
        node.windows[self._index] = page.node = None
        self.version += 1
        if not page.num_users:
            self._pool.release((page.page,))

    def seek(self, node: CachedPage) -> None:
        """Mark that a text ended or diverged here; called once per node."""
        page = node.windows[self._index]
        if page is not None and not page.num_users:
            self._unused[1][page.page] = self._unused[0].pop(page.page)

    def withdraw(self, writer: int) -> None:
        for page in [page for page in self._attached.values() if page.writer >= writer]:
            self.detach(page)

    def _evict(self) -> None:
        passed, sought = self._unused
        _, page = (passed or sought).popitem(last=False)
        self.detach(page)
