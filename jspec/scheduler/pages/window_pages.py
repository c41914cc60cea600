"""Pages of the window spaces: lent as a row grows, released as its window moves past them.

A layer with a window of w sees, from position p, the keys p - w + 1 .. p. So a row needs few pages
there, however long it becomes: from the oldest key that its next query sees to the end of its
reservation. Pages of the full space stay with their row; here a page is released as soon as

    its end <= committed length as the host knows it - (w - 1) - the drafter's lag

Never the upper bound: the device may have committed less. During a prefill the known length is the
dispatched one, which is exact: every later step of the row starts there. Dispatched, unread steps
may still read the page. They run before any step of its next owner writes to it, and what they read
before their window is masked.

Lent pages never run short: admission reserves the most that a row will ever have, plus one
prefill's chunks (for all rows together), and a request whose reservation does not fit is not
admitted. So a window space knows neither waiting rows nor retraction.

With a prefix cache, a page that a row has filled is attached to the tree (`prefix_cache.py`) and
stays there after the row releases it, until it is evicted. A row that starts after cached pages
shares those of its first window with their other users. So rows together use at most what was
reserved for them, and everything else can be lent.

    worked example: page_size 4, window 8, a prompt of 20 in chunks of 8
    chunk 0..7    pages 0 1        lent; the next query is at 8 and sees 1..8: both stay
    chunk 8..15   pages 0 1 2 3    the next query is at 16 and sees 9..16: 0 and 1 go back
    chunk 16..19  pages 2 3 4      the next query is at 20 and sees 13..20: 2 goes back
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from jspec.config.limits import ServeLimits
from jspec.errors import InvariantError
from jspec.messages.plan import PageGrant, RowRef
from jspec.scheduler.pages import budget
from jspec.scheduler.pages.cached_page import CachedPage, WindowPage
from jspec.scheduler.pages.window_pool import WindowPool
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.spec import indexing


@dataclass(slots=True)
class HeldPages:
    """A row's pages in one window space, of the indices first, first + 1, ...

    promised: the most that it has between two plans.
    """

    promised: int
    first: int = 0
    pages: deque[WindowPage] = field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class WindowPages:
    """The pools of all window spaces of `limits`, and the pages of each row in them."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self.pools = tuple(
            WindowPool(space.num_pages, index=i, tail=limits.tail_pages(space.window))
            for i, space in enumerate(limits.windows)
        )
        self._held: dict[RowRef, tuple[HeldPages, ...]] = {}

    @property
    def num_free(self) -> tuple[int, ...]:
        """Pages of each window space that can be lent: free ones, and unused cached ones."""
        return tuple(pool.num_free for pool in self.pools)

    @property
    def num_cached(self) -> tuple[int, ...]:
        """Pages of each window space attached to the tree, in use or not."""
        return tuple(pool.num_attached for pool in self.pools)

    @property
    def num_leaked(self) -> int:
        """Lent pages that neither a row nor the cache accounts for; always 0."""
        rows = tuple(self._held.values())
        return sum(
            pool.num_leaked(page.page for row in rows for page in tuple(row[i].pages))
            for i, pool in enumerate(self.pools)
        )

    def may_admit(self, sequence: Sequence) -> bool:
        """Return whether every space has the pages that `sequence` may ever have."""
        of_chunks = self._limits.pages_of_chunks(self._limits.chunk_size)
        for i, needed in enumerate(self._most(sequence)):
            promised = sum(row[i].promised for row in self._held.values())
            if promised + needed + of_chunks > self.pools[i].num_pages:
                return False
        return True

    def admit(self, tenancy: Tenancy, last: CachedPage | None) -> None:
        """Reserve the row's pages; after a cached prefix ending with `last`, take its first window.

        `last` must be usable (`PrefixCache.usable`).
        """
        promised = self._most(tenancy.sequence)
        self._held[tenancy.row] = tuple(HeldPages(most) for most in promised)
        if last is None:
            return
        for i, (pool, held) in enumerate(self._spaces(tenancy)):
            for node in islice(last.path(), pool.tail):
                page = node.windows[i]
                assert page is not None
                pool.hold(page)
                held.pages.appendleft(page)
            held.first = last.depth - len(held.pages)

    def grants(self, tenancy: Tenancy) -> list[PageGrant]:
        """Return grants for all pages of a row that is admitted now, which it found cached."""
        return [
            PageGrant(tenancy.row.slot, index, page.page, space=i + 1)
            for i, held in enumerate(self._held[tenancy.row])
            for index, page in enumerate(held.pages, held.first)
        ]

    def grow(self, tenancy: Tenancy, num_pages: int) -> list[PageGrant]:
        """Lend the pages missing among the row's first num_pages, in every space."""
        grants = []
        for i, (pool, held) in enumerate(self._spaces(tenancy)):
            begin = held.end
            for index, page in enumerate(pool.allocate(max(num_pages - begin, 0)), begin):
                held.pages.append(page)
                grants.append(PageGrant(tenancy.row.slot, index, page.page, space=i + 1))
        return grants

    def held(self, tenancy: Tenancy) -> list[tuple[int, deque[WindowPage]]]:
        """Return, for each space, the index of the row's first page, and its pages."""
        return [(held.first, held.pages) for held in self._held[tenancy.row]]

    def may_trim(self, tenancy: Tenancy) -> bool:
        ends = self._seen_from(tenancy)
        return any(
            held.pages and held.first < end
            for held, end in zip(self._held[tenancy.row], ends, strict=True)
        )

    def trim(self, tenancy: Tenancy) -> None:
        """Release the pages that no later query can see.

        That is no query from `tenancy.known_len` on, and none of a drafter that gets earlier tokens
        later (`drafted_len`) or whose layers lag.
        """
        ends = self._seen_from(tenancy)
        spaces = zip(self._limits.windows, ends, self._spaces(tenancy), strict=True)
        for space, end, (pool, held) in spaces:
            while held.pages and held.first < end:
                pool.let_go(held.pages.popleft())
                held.first += 1
            if len(held.pages) > held.promised:
                raise InvariantError(
                    f"row {tenancy.row} holds {len(held.pages)} pages of the window of "
                    f"{space.window}; expected at most the {held.promised} that it was promised"
                )

    def release(self, tenancy: Tenancy) -> None:
        for pool, held in self._spaces(tenancy):
            for page in held.pages:
                pool.let_go(page)
        del self._held[tenancy.row]

    def _seen_from(self, tenancy: Tenancy) -> list[int]:
        """Return, for each space, the index of the first page that later queries may see."""
        if not self.pools:
            return []
        length, size = tenancy.drafted_len - self._limits.spec.lag, self._limits.page_size
        return [max(length - (space.window - 1), 0) // size for space in self._limits.windows]

    def _spaces(self, tenancy: Tenancy) -> Iterable[tuple[WindowPool, HeldPages]]:
        return zip(self.pools, self._held[tenancy.row], strict=True)

    def _most(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the most pages of each space that the row may have between two plans."""
        limits = self._limits
        if not limits.windows:
            return ()
        last = budget.last_committed(sequence.prompt_len, sequence.max_new_tokens)
        whole = indexing.num_pages(limits.reserved_tokens_at_most(last), limits.page_size)
        return tuple(min(limits.window_pages_per_row(s.window), whole) for s in limits.windows)
