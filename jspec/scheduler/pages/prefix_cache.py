"""A prefix tree of KV pages, shared by all rows whose texts begin alike.

An edge is one page. Its key is the page's own tokens and the `lookahead` tokens after them: what a
drafter stores for a token may depend on later tokens (EAGLE's slot i is computed from token i + 1),
so a page fits only texts that continue like its writer's. The path to a page is its prefix.

    worked example: page_size 2, lookahead 1, a text 5 6 7 8 9 in pages 11, 12 and a part of 13
    root --(5 6 7)--> page 11 --(7 8 9)--> page 12
    5 6 7 8 9 4 finds 11 and 12; 5 6 7 8 3 finds 11 alone: page 12 was made with 9 after it

A page is in use while a row uses it or one after it. Others may be evicted, least recently used
first, and never a page with pages after it. It knows no rows, no device, and only the pools of the
windows. A page added belongs to the cache; eviction and withdrawal return it.

With window layers the tree is of full-space pages, and each node has attached window pages with the
same tokens (`window_pool.py`), as long as they last. A row may start after a page if every window
space has the pages of the window before that point:

    page_size 2, window 4, a text in pages 11 12 13 14, attached window pages  -  21 22  -
    after 12  the first query, at 4, sees 1..4: 11 and 12, and 11 has no window page
    after 13  the first query, at 6, sees 3..6: 12 and 13, with 21 and 22: a row may start here
    after 14  14 has no window page
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import count, islice

from jspec.errors import InvariantError
from jspec.scheduler.pages.cached_page import CachedPage, WindowPage
from jspec.scheduler.pages.window_pool import WindowPool

Ids = tuple[int, ...]


class PrefixCache:
    """One tree of pages per namespace: texts of different namespaces share nothing.

    windows: the pools of the window spaces, in the order of their index.
    """

    def __init__(
        self, *, page_size: int, lookahead: int, windows: tuple[WindowPool, ...] = ()
    ) -> None:
        self._page_size = page_size
        self._lookahead = lookahead
        self._windows = windows
        self._longest_tail = max((pool.tail for pool in windows), default=0)
        self._roots: dict[Hashable, CachedPage] = {}
        self._nodes: dict[int, CachedPage] = {}  # by page, the withdrawn ones still in use too
        self._num_evictable = 0
        self._clock = 0
        self._serial = count()  # breaks ties in the heap
        # Unused leaves, by last use. An entry is stale once its node was used again.
        self._leaves: list[tuple[int, int, CachedPage]] = []
        self._version = 0

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    @property
    def version(self) -> int:
        """Changes whenever a page is added or removed."""
        return self._version + sum(pool.version for pool in self._windows)

    @property
    def num_pages(self) -> int:
        """Pages added and not yet returned."""
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    def num_full(self, num_known: int) -> int:
        """Return how many pages of a text have a key once num_known tokens are known."""
        return max(num_known - self._lookahead, 0) // self._page_size

    def match(self, namespace: Hashable, ids: Ids) -> CachedPage | None:
        """Return the last page of the longest cached prefix, or None. At least one token remains.

        The caller must `lock` the page before any other call. Windows are not considered
        (`usable`).
        """
        node = self._roots.get(namespace)
        if node is None:
            return None
        most = min(self.num_full(len(ids)), (len(ids) - 1) // self._page_size)
        while node.depth < most:
            child = node.children.get(self._key(ids, node.depth))
            if child is None:
                break
            node = child
        return node if node.depth else None

    def usable(self, last: CachedPage) -> CachedPage | None:
        """Return the last page up to `last` after which all windows are cached, or None."""
        for node in last.path():
            if all(pool.has_tail(node) for pool in self._windows):
                return node
        return None

    def root(self, namespace: Hashable) -> CachedPage:
        """Return the root of a tree, made if missing; it stays while a row uses it."""
        if namespace not in self._roots:
            self._roots[namespace] = CachedPage(None, namespace, 0, 0)
        return self._roots[namespace]

    def lock(self, node: CachedPage) -> None:
        """Add a user to the page and all before it."""
        self._clock += 1
        self._use(node)
        for before in node.path():
            if before.parent is not None:
                self._use(before.parent)

    def unlock(self, node: CachedPage) -> list[int]:
        """Remove a user; return withdrawn pages that are now unused."""
        self._clock += 1
        gone: list[int] = []
        step: CachedPage | None = node
        while step is not None:
            if step.num_users < 1:
                raise InvariantError(f"page {step.page} let go by a row that does not hold it")
            step.num_users -= 1
            step.last_used = self._clock
            if not step.num_users:
                self._set_unused(step, gone)
            step = step.parent
        return gone

    def extend(
        self,
        last: CachedPage,
        ids: Ids,
        page_ids: Sequence[int],
        *,
        known: int,
        writer: int,
        beside: bool,
        begin: int = 0,
    ) -> CachedPage:
        """Add a row's pages after `last`, which it uses, and return the last page it uses now.

        ids: the row's text from token `begin` on, which is not after `last`.
        page_ids: all of its pages, of which the first num_full(known) are complete.
        beside: if another row's page is already there, continue after it (the row's own page is not
            added); otherwise stop before it.
        """
        node = last
        if node.is_withdrawn:
            return node
        end = min(self.num_full(known), len(page_ids))
        while node.depth < end:
            key, page = self._key(ids, node.depth, begin), page_ids[node.depth]
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, page, writer)
            elif child.page != page and not beside:
                break
            self._use(child)
            node = child
        return node

    def replace(self, node: CachedPage, page: int, *, writer: int) -> int:
        """Replace a node's page by a row's page of the same tokens and return the former page.

        The row uses the node, and no row has the node's former page in its page table.
        """
        if page in self._nodes:
            raise InvariantError(f"page {page} added twice; expected one that is not cached")
        before = node.page
        del self._nodes[before]
        self._nodes[page] = node
        node.page, node.writer = page, writer
        return before

    def attach(
        self,
        last: CachedPage,
        ids: Ids,
        held: Sequence[tuple[int, Sequence[WindowPage]]],
        *,
        known: int,
        writer: int,
        begin: int = 0,
    ) -> CachedPage:
        """Attach a row's window pages to the nodes with the same tokens.

        Nodes may be of other rows. Returns the last node of the row's text. last, ids, known,
            begin: as for `extend`.
        held: for each space, the index of the row's first page there, and its pages.
        """
        node = last
        if node.is_withdrawn:
            return node
        while node.depth < self.num_full(known):
            child = node.children.get(self._key(ids, node.depth, begin))
            if child is None:
                break
            node = child
        earliest = min(first for first, _ in held)
        for each in islice(node.path(), max(node.depth - earliest, 0)):
            for pool, (first, pages) in zip(self._windows, held, strict=True):
                if first < each.depth <= first + len(pages):
                    pool.attach(pages[each.depth - 1 - first], each, writer=writer)
        return node

    def seek(self, last: CachedPage) -> None:
        """Mark that a text ended or diverged after this page.

        The window pages that a row needs to start here are then evicted later than others.
        """
        for node in islice(last.path(), self._longest_tail):
            if not node.is_sought:
                for pool in self._windows:
                    pool.seek(node)
                node.is_sought = True

    def evict(self, num_pages: int) -> list[int]:
        """Evict and return the least recently used pages. Raises InvariantError for too many."""
        if num_pages > self._num_evictable:
            raise InvariantError(
                f"{num_pages} pages to evict; expected at most the {self._num_evictable} unused"
            )
        gone: list[int] = []
        while len(gone) < num_pages:
            last_used, _, node = heapq.heappop(self._leaves)
            if not self._is_leaf(node) or node.last_used != last_used:
                continue
            parent = node.parent
            assert parent is not None
            self._detach(node, parent)
            self._drop_windows(node)
            self._num_evictable -= 1
            del self._nodes[node.page]
            gone.append(node.page)
            self._offer(parent)
        return gone

    def withdraw(self, writer: int) -> list[int]:
        """Remove all pages written by that step or later; return the unused ones.

        The others are returned by the `unlock` of their last user.
        """
        gone: list[int] = []
        for pool in self._windows:  # window pages may be newer than their node
            pool.withdraw(writer)
        for top in [node for node in self._nodes.values() if node.writer >= writer]:
            if top.is_withdrawn:
                continue
            assert top.parent is not None
            self._detach(top, top.parent)
            self._offer(top.parent)
            subtree = [top]
            while subtree:
                node = subtree.pop()
                node.is_withdrawn = True
                subtree += node.children.values()
                if not node.num_users:
                    self._num_evictable -= 1
                    gone.append(node.page)
        for page in gone:
            del self._nodes[page]
        return gone

    def _key(self, ids: Ids, index: int, begin: int = 0) -> Hashable:
        start = index * self._page_size - begin
        return ids[start : start + self._page_size + self._lookahead]

    def _add(self, parent: CachedPage, key: Hashable, page: int, writer: int) -> CachedPage:
        if page in self._nodes:
            raise InvariantError(f"page {page} added twice; expected one that is not cached")
        child = CachedPage(parent, key, page, writer, num_windows=len(self._windows))
        parent.children[key] = self._nodes[page] = child
        self._num_evictable += 1  # until its first user
        self._version += 1
        return child

    def _use(self, node: CachedPage) -> None:
        if not node.num_users and node.parent is not None and not node.is_withdrawn:
            self._num_evictable -= 1
        node.num_users += 1
        node.last_used = self._clock

    def _set_unused(self, node: CachedPage, gone: list[int]) -> None:
        if node.is_withdrawn:
            del self._nodes[node.page]
            gone.append(node.page)
            return
        if node.parent is not None:
            self._num_evictable += 1
        self._offer(node)

    def _offer(self, node: CachedPage) -> None:
        if node.parent is None:
            if not node.num_users and not node.children:
                self._roots.pop(node.key, None)
            return
        if not self._is_leaf(node):
            return
        if len(self._leaves) > 2 * len(self._nodes) + 16:  # mostly stale entries
            self._leaves = [
                (other.last_used, next(self._serial), other)
                for other in self._nodes.values()
                if other is not node and self._is_leaf(other)
            ]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.last_used, next(self._serial), node))

    def _is_leaf(self, node: CachedPage) -> bool:
        is_there = not node.is_withdrawn and self._nodes.get(node.page) is node
        return is_there and not node.num_users and not node.children

    def _detach(self, node: CachedPage, parent: CachedPage) -> None:
        del parent.children[node.key]
        self._version += 1

    def _drop_windows(self, node: CachedPage) -> None:
        for pool, page in zip(self._windows, node.windows, strict=False):
            if page is not None:
                pool.detach(page)
