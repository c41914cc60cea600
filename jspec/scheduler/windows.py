"""Pages of the window spaces: lent as a row grows, given back behind its window.

A layer with a window of w sees, from position p, the keys p - w + 1 .. p. So a row needs few pages
there, however long it becomes: those from the oldest key that its next query sees to the end of
what is reserved for it. Pages of the full space stay with their row (`scheduler.py`); here a page
goes back to its pool as soon as

    its end <= committed length as the host knows it - (w - 1)

Never the upper bound: the device may have committed less. During a prefill the known length is
what was dispatched, for that is exact: every later step of the row begins there. Steps that are
dispatched and unread may still look back at the page. They run before any step that writes to it
for its next owner, and what they read behind their window is masked.

What is lent can never run short: a row is promised at its admission the most that it will ever
hold, one prefill's chunks come on top (of all rows together, whatever their number), and nobody is
admitted whose promise does not fit. So a window space knows neither waiting rows nor retraction.

    worked example: page_size 4, window 8, a prompt of 20 in chunks of 8
    chunk 0..7    pages 0 1        lent; the next query is at 8 and sees 1..8: both stay
    chunk 8..15   pages 0 1 2 3    the next query is at 16 and sees 9..16: 0 and 1 go back
    chunk 16..19  pages 2 3 4      the next query is at 20 and sees 13..20: 2 goes back
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jspec.cache.page_pool import PagePool
from jspec.core import shapes
from jspec.core.config import ServeLimits
from jspec.core.errors import InvariantError
from jspec.core.plan import PageGrant, RowRef
from jspec.scheduler import budget
from jspec.scheduler.sequence import Sequence, Tenancy


@dataclass(slots=True)
class HeldPages:
    """What a row holds in one window space: `pages` of the indices first, first + 1, ...

    promised: the most that it holds between two plans.
    """

    promised: int
    first: int = 0
    pages: deque[int] = field(default_factory=deque)

    @property
    def end(self) -> int:
        """The index behind its last page."""
        return self.first + len(self.pages)


class WindowPages:
    """The pools of all window spaces of `limits`, and who holds what of them."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._pools = tuple(PagePool(space.num_pages) for space in limits.windows)
        self._held: dict[RowRef, tuple[HeldPages, ...]] = {}

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free pages of each window space."""
        return tuple(pool.num_free for pool in self._pools)

    @property
    def num_leaked(self) -> int:
        """Lent pages that no row holds; 0 always."""
        leaked = 0
        for i, pool in enumerate(self._pools):
            leaked += pool.num_leaked(sum(len(row[i].pages) for row in tuple(self._held.values())))
        return leaked

    def may_admit(self, sequence: Sequence) -> bool:
        """Whether what `sequence` may ever hold is left in every space."""
        of_chunks = self._limits.pages_of_chunks(self._limits.chunk_size)
        for i, needed in enumerate(self._most(sequence)):
            promised = sum(row[i].promised for row in self._held.values())
            if promised + needed + of_chunks > self._pools[i].num_pages:
                return False
        return True

    def admit(self, tenancy: Tenancy) -> None:
        """Promises the row its pages; it has none yet."""
        most = self._most(tenancy.sequence)
        self._held[tenancy.row] = tuple(HeldPages(promised) for promised in most)

    def grow(self, tenancy: Tenancy, num_pages: int) -> list[PageGrant]:
        """Lends what the row lacks of the first num_pages pages of its sequence, in every space."""
        grants = []
        for i, (pool, held) in enumerate(self._spaces(tenancy)):
            begin = held.end
            for index, page in enumerate(pool.allocate(max(num_pages - begin, 0)), begin):
                held.pages.append(page)
                grants.append(PageGrant(tenancy.row.slot, index, page, space=i + 1))
        return grants

    def trim(self, tenancy: Tenancy) -> None:
        """Takes back the pages that no query from `tenancy.known_len` on can see, nor one of a
        drafter that is told of earlier tokens later (`drafted_len`)."""
        for space, (pool, held) in zip(self._limits.windows, self._spaces(tenancy), strict=True):
            first_seen = max(tenancy.drafted_len - (space.window - 1), 0)
            while held.pages and (held.first + 1) * self._limits.page_size <= first_seen:
                pool.release((held.pages.popleft(),))
                held.first += 1
            if len(held.pages) > held.promised:
                raise InvariantError(
                    f"row {tenancy.row} holds {len(held.pages)} pages of the window of "
                    f"{space.window}; expected at most the {held.promised} that it was promised"
                )

    def release(self, tenancy: Tenancy) -> None:
        """Takes back all that an ended row holds."""
        for pool, held in self._spaces(tenancy):
            pool.release(held.pages)
        del self._held[tenancy.row]

    def _spaces(self, tenancy: Tenancy) -> Iterable[tuple[PagePool, HeldPages]]:
        return zip(self._pools, self._held[tenancy.row], strict=True)

    def _most(self, sequence: Sequence) -> tuple[int, ...]:
        """Pages of each space that the row may hold between two plans: bounded also by its end."""
        limits = self._limits
        last = budget.last_committed(sequence.prompt_len, sequence.max_new_tokens)
        whole = shapes.num_pages(limits.reserved_tokens_at_most(last), limits.page_size)
        return tuple(min(limits.window_pages_per_row(s.window), whole) for s in limits.windows)
