"""One cache space: its pages, the rows that use them, and those cached in the prefix tree.

The full space keeps all tokens of a row. A window space keeps those that a window of `keep` keys
sees: from position p, the keys p - keep + 1 .. p. There a row releases a page as soon as

    its end <= committed length as the host knows it - (keep - 1) - the drafter's lag

This must not use the upper bound of the length, since the device may have committed less. During a
prefill the known length is the dispatched one, which is exact, because every later step of the row
starts there. Dispatched, unread steps may still read the page. They run before any step of its next
owner writes to it, and what they read before their window is masked.

    worked example: page_size 4, window 8, a prompt of 20 in chunks of 8
    chunk 0..7    pages 0 1        granted; the next query is at 8 and sees 1..8: both stay
    chunk 8..15   pages 0 1 2 3    the next query is at 16 and sees 9..16: 0 and 1 are released
    chunk 16..19  pages 2 3 4      the next query is at 20 and sees 13..20: 2 is released

A row's need of a window is bounded. So a window space promises it at admission and never runs
short: the most that the row will ever have, plus one prefill's chunks for all rows together. In the
full space, rows grow while there are free pages and may have to wait or be retracted.

Rows with a common prefix may share its pages. A page attached to the prefix tree stays there when
its last row releases it, until it is evicted; an unattached page is free at once. Cached pages that
no row uses count as free. Rows continue only from ends of texts and from places where texts
diverged, so a window space first evicts pages that no such place needs. Otherwise the page released
first is evicted. A row releases its last page first, so that no page is evicted before those after
it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from jspec.config.limits import ServeLimits
from jspec.errors import InvariantError
from jspec.scheduler.pages import budget
from jspec.scheduler.pages.prefix_cache import Node

DUMMY_PAGE = 0  # stray writes go there


@dataclass(slots=True)
class RowPages:
    """A row's pages in one space, at indices first, first + 1, ..."""

    promised: int  # most pages that it has between two plans
    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class PageSpace:
    """Pages 1..num_pages; page 0 is the dummy. The page released last is allocated first."""

    def __init__(
        self,
        limits: ServeLimits,
        num_pages: int,
        *,
        index: int,
        keep: int | None,  # keys that a query sees; None: all
        on_evict: Callable[[Node], None] | None = None,  # called with a node that lost its page
    ) -> None:
        if num_pages < 1:
            raise InvariantError(f"num_pages is {num_pages}; expected at least 1")
        self.index = index
        self.keep = keep
        self.num_pages = num_pages
        # Pages before a page end that a row needs to start there (fewer near the beginning).
        self.tail = sys.maxsize if keep is None else limits.pool.tail_pages(keep)
        self.version = 0  # changes with each page attached or detached
        self._limits = limits
        self._on_evict = on_evict
        self._of_chunks = 0 if keep is None else limits.pages_of_chunks(limits.programs.chunk_size)
        self._free = list(range(num_pages, 0, -1))  # a stack
        self._users = [0] * (num_pages + 1)  # rows that use a page
        self._num_uses = 0  # the sum of _users
        self._promised = 0  # to all rows
        self._attached: dict[int, tuple[Node, int]] = {}  # node, and the step that wrote the page
        # Unused attached pages in eviction order: those not sought, and those sought.
        self._unused: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, including cached ones that no row uses."""
        return len(self._free) + sum(map(len, self._unused))

    @property
    def num_cached(self) -> int:
        return len(self._attached)

    def num_leaked(self, rows: Iterable[RowPages]) -> int:
        return self._num_uses - sum(len(row.pages) for row in rows)

    # Pages.

    def allocate(self, num_pages: int) -> list[int]:
        """Return pages with one user, evicting if necessary. Raises InvariantError for too many."""
        if not 0 <= num_pages <= self.num_free:
            raise InvariantError(
                f"asked for {num_pages} pages; expected from 0 to the {self.num_free} free ones"
            )
        for _ in range(num_pages - len(self._free)):
            self._evict()
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._users[page] = 1
        self._num_uses += num_pages
        return pages

    def acquire(self, page: int) -> None:
        """Add a user. Raises InvariantError for a page that is neither in use nor cached."""
        if not self._users[page]:
            if page not in self._attached:
                raise InvariantError(f"page {page} acquired; expected one in use or cached")
            self._unused_of(page).pop(page)
        self._users[page] += 1
        self._num_uses += 1

    def drop(self, page: int) -> None:
        if not (0 < page <= self.num_pages and self._users[page]):
            raise InvariantError(f"page {page} released; expected a page in use")
        self._users[page] -= 1
        self._num_uses -= 1
        if not self._users[page]:
            if page in self._attached:
                self._unused_of(page)[page] = None
            else:
                self._free.append(page)

    def _evict(self) -> None:
        passed, sought = self._unused
        page = next(iter(passed or sought))
        node, _ = self._attached[page]
        self._detach(page)
        if self._on_evict is not None:
            self._on_evict(node)

    def _unused_of(self, page: int) -> OrderedDict[int, None]:
        return self._unused[self._attached[page][0].sought >> self.index & 1]

    # Rows.

    def most(self, last: int) -> int:
        """Return the most pages of a row between two plans. last: `budget.last_committed`."""
        return budget.pages_at_most(self._limits, last=last, keep=self.keep)

    def may_promise(self, last: int) -> bool:
        promised = self._promised + self.most(last) + self._of_chunks
        return self.keep is None or promised <= self.num_pages

    def num_in_use(self, path: Sequence[Node]) -> int:
        """Return how many of these nodes' pages rows use already, which need no free page."""
        return sum(self._users[node.records[self.index]] > 0 for node in path)

    def admit(self, path: Sequence[Node], *, last: int, end: int) -> RowPages:
        """Return a new row's pages: cached ones of `path` that its first query sees, and new ones:
        up to index `end` in a space that keeps all tokens, none in a window."""
        row = RowPages(self.most(last))
        self._promised += row.promised
        for node in path[-self.tail :] if self.tail else ():
            page = node.records[self.index]
            self.acquire(page)
            row.pages.append(page)
        row.first = len(path) - len(row.pages)
        if self.keep is None:
            self.grow(row, end)
        return row

    def grow(self, row: RowPages, end: int) -> tuple[int, ...]:
        missing, most = max(end - row.end, 0), row.promised + self._of_chunks
        if len(row.pages) + missing > most:
            raise InvariantError(
                f"a row gets {missing} pages of space {self.index} after {len(row.pages)}; "
                f"expected at most {most}"
            )
        pages = self.allocate(missing)
        row.pages += pages
        return tuple(pages)

    def num_unseen(self, row: RowPages, length: int) -> int:
        """Return how many of the row's first pages no query from `length` on can see."""
        if self.keep is None:
            return 0
        end = max(length - (self.keep - 1), 0) // self._limits.pool.page_size
        return min(max(end - row.first, 0), len(row.pages))

    def trim(self, row: RowPages, length: int) -> None:
        unseen = self.num_unseen(row, length)
        for page in row.pages[:unseen]:
            self.drop(page)
        del row.pages[:unseen]
        row.first += unseen
        if len(row.pages) > row.promised:
            raise InvariantError(
                f"a row has {len(row.pages)} pages of the window of {self.keep}; expected at most "
                f"the {row.promised} that it was promised"
            )

    def release(self, row: RowPages) -> None:
        for page in reversed(row.pages):
            self.drop(page)
        row.pages.clear()
        self._promised -= row.promised

    # The prefix tree.

    def last_start(self, path: Sequence[Node], depth: int) -> int:
        i = depth
        while i > max(depth - self.tail, 0):
            i -= 1
            if not path[i].records[self.index]:
                depth = i
        return depth

    def publish(self, row: RowPages, last: Node, *, since: int, writer: int) -> None:
        """Attach the row's pages to the nodes up to `last`, from depth `since` + 1 on, replacing
        pages that no row uses. writer: the first step that may read the pages."""
        for node in islice(last.path(), max(last.depth - max(since, row.first), 0)):
            if node.depth > row.end:
                continue
            page, before = row.pages[node.depth - 1 - row.first], node.records[self.index]
            if page == before or (before and self._users[before]):
                continue
            if page in self._attached:
                raise InvariantError(f"page {page} added twice; expected one that is not cached")
            if before:
                self._take_off(before)
            node.records[self.index] = page
            self._attached[page] = node, writer
            self.version += 1

    def seek(self, node: Node) -> None:
        """Note that a text ended or diverged here; the pages for a start here are evicted later."""
        # In the full space every page is needed, so only the order of release counts.
        bit = 1 << self.index
        for each in islice(node.path(), self.tail) if self.keep is not None else ():
            page = each.records[self.index]
            if not each.sought & bit and page and not self._users[page]:
                self._unused[1][page] = self._unused[0].pop(page)
            each.sought |= bit

    def forget(self, node: Node) -> None:
        if node.records[self.index]:
            self._detach(node.records[self.index])

    def withdraw(self, step: int) -> None:
        for page in [page for page, (_, writer) in self._attached.items() if writer >= step]:
            self._detach(page)

    def _detach(self, page: int) -> None:
        self._take_off(page).prune()

    def _take_off(self, page: int) -> Node:
        if not self._users[page]:
            del self._unused_of(page)[page]
            self._free.append(page)
        node, _ = self._attached.pop(page)
        node.records[self.index] = 0
        self.version += 1
        return node
