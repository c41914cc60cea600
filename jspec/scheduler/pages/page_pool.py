"""The pool of KV pages: which page ids are free and which are lent.

It knows neither contents nor owners of a page, nor whether the device still writes to it: the
scheduler returns a page only when no dispatched step names it.
"""

from __future__ import annotations

from collections.abc import Iterable

from jspec.errors import InvariantError

DUMMY_PAGE = 0


class PagePool:
    """Pages 1..num_pages; page 0 is the dummy, to which stray writes go, and is never lent.

    The page returned last is lent first. That keeps the working set small and makes a page that was
    returned too early show up at once.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InvariantError(f"num_pages is {num_pages}; expected at least 1")
        self._num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))  # used as a stack: page 1 is lent first
        self._is_lent = bytearray(num_pages + 1)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_lent(self) -> int:
        return self._num_pages - len(self._free)

    def allocate(self, num_pages: int) -> tuple[int, ...]:
        """Lend `num_pages` distinct pages. Raises InvariantError if fewer are free."""
        if not 0 <= num_pages <= len(self._free):
            raise InvariantError(
                f"asked for {num_pages} pages; expected from 0 to the {len(self._free)} free ones"
            )
        pages = tuple(self._free.pop() for _ in range(num_pages))
        for page in pages:
            self._is_lent[page] = 1
        return pages

    def release(self, page_ids: Iterable[int]) -> None:
        """Take pages back. Raises InvariantError for a page that is not lent (double free)."""
        for page in page_ids:
            if not 1 <= page <= self._num_pages:
                raise InvariantError(f"page {page} released; expected 1 to {self._num_pages}")
            if not self._is_lent[page]:
                raise InvariantError(f"page {page} released twice; expected a page that is lent")
            self._is_lent[page] = 0
            self._free.append(page)

    def num_leaked(self, num_held: int) -> int:
        """Return the number of lent pages beyond the `num_held` known ones; 0 without a leak."""
        return self.num_lent - num_held
