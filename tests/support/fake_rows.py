"""The fake runner's state of each row, and its model of the window spaces' pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from jspec.config.limits import ServeLimits
from jspec.errors import InvariantError
from jspec.messages.plan import Admission, PageGrant, RowRef
from jspec.spec import indexing


class PlanError(InvariantError):
    pass


def require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


@dataclass(slots=True, kw_only=True)
class FakeRow:
    """A slot's state on the device, and what the host can have read of it.

    window_pages: by window space, the row's pages there, by index
    text: its tokens so far, extended on demand
    """

    admission: Admission
    page_ids: list[int]
    num_filled: int = 0
    seq_len: int = 0  # L on the device, after all dispatched steps
    num_emitted: int = 0
    read_len: int = 0  # L after the collected steps
    num_read: int = 0
    unread_rounds: int = 0
    unread_tokens: int = 0  # upper bound for those rounds
    pending: int = 0  # pending tokens
    steps_in_flight: int = 0
    window_pages: list[dict[int, int]] = field(default_factory=list)
    text: list[int] = field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        return self.num_filled == len(self.admission.fill_ids)

    @property
    def known_len(self) -> int:
        """L as the host may assume: the dispatched part of a fill, later what it read."""
        return self.read_len if self.is_filled else self.num_filled


def fingerprint(row: FakeRow, text: list[int], position: int, *, lookahead: int) -> int:
    """Hash the tokens that the cache at a position depends on: all up to position + lookahead."""
    seen = tuple(text[: position + 1 + lookahead])
    return hash((row.admission.request.extra_key, seen)) or 1


@dataclass(slots=True)
class FakeWindowPage:
    """An allocated page of a window space: its contents by offset, and its rows.

    Only `owner` writes it. is_shared: another row has found it; then it is read-only.
    """

    index: int
    owner: RowRef
    rows: set[RowRef]
    written: dict[int, int] = field(default_factory=dict)
    is_shared: bool = False


class FakeWindows:
    """Owners of each page of the window spaces; the full space is in FakePages.

    A page may get a new owner while former rows live if none of their queries from their known
    length on can see it. Everything else that a row writes or sees must be on its own pages, except
    those found at admission, which must have what the row would have written.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._pages: tuple[dict[int, FakeWindowPage], ...] = tuple({} for _ in limits.pool.windows)

    def grant(self, grant: PageGrant, ref: RowRef, rows: dict[int, FakeRow]) -> None:
        """Give the page to the row; a former row that still needs it must have ended."""
        space, size = self._limits.pool.windows[grant.space - 1], self._limits.pool.page_size
        row, pages = rows[ref.slot], self._pages[grant.space - 1]
        table = row.window_pages[grant.space - 1]
        for index, page in enumerate(grant.pages, grant.index):
            require(1 <= page <= space.num_pages, f"{grant} outside its space")
            require(index < self._limits.pages_per_row, f"{grant} past the page table")
            require(index not in table, f"{grant} where the row has a page")
            if index < row.admission.cached_len // size:
                self._share(grant, row, pages, index=index)
            else:
                former = pages.get(page)
                for other in () if former is None else tuple(former.rows):
                    self._take(grant, other, rows, ref=ref, index=former.index if former else 0)
                pages[page] = FakeWindowPage(index, ref, {ref})
            table[index] = page

    def _share(
        self, grant: PageGrant, row: FakeRow, pages: dict[int, FakeWindowPage], *, index: int
    ) -> None:
        ref, size = row.admission.row, self._limits.pool.page_size
        number = grant.pages[index - grant.index]
        require(number in pages, f"{grant}, which nobody has written")
        page = pages[number]
        for position in range(index * size, (index + 1) * size):
            ahead = self._limits.draft_shape.tokens_ahead
            expected = fingerprint(row, row.text, position, lookahead=ahead)
            is_right = page.written.get(position % size) == expected
            require(is_right, f"{ref} shares page {number} of {grant.space}, wrong at {position}")
        page.rows.add(ref)
        page.is_shared = True

    def _take(
        self, grant: PageGrant, other: RowRef, rows: dict[int, FakeRow], *, ref: RowRef, index: int
    ) -> None:
        """Take the page from a former row, which must not see it any more, or have ended."""
        space, size = self._limits.pool.windows[grant.space - 1], self._limits.pool.page_size
        row = rows.get(other.slot)
        if row is None or row.admission.row != other:
            return
        if (index + 1) * size > row.known_len - self._limits.draft_shape.lag - (space.window - 1):
            require(other != ref, f"{grant} while the row sees it at {index}")
            require(row.steps_in_flight == 0, f"{grant}, which {other}, in flight, sees")
            del rows[other.slot]  # it ended: from now on its RowRef is an error
        else:
            del row.window_pages[grant.space - 1][index]

    def check(self, row: FakeRow, *, first: int, end: int) -> None:
        """Check that queries from `first` and writes up to `end` use only the row's own pages."""
        size = self._limits.pool.page_size
        first = max(first - self._limits.draft_shape.lag, row.admission.cached_len)
        for space, table in zip(self._limits.pool.windows, row.window_pages, strict=True):
            begin = max(first - (space.window - 1), 0) // size
            missing = [i for i in range(begin, indexing.num_pages(end, size)) if i not in table]
            require(
                not missing,
                f"{row.admission.row} at {first} to {end} lacks pages {missing} of the window of "
                f"{space.window}",
            )

    def write(self, row: FakeRow, text: list[int], *, first: int, end: int, scratch: int) -> None:
        ref, size, ahead = (
            row.admission.row,
            self._limits.pool.page_size,
            self._limits.draft_shape.tokens_ahead,
        )
        first = max(first - self._limits.draft_shape.lag, row.admission.cached_len)
        for pages, table in zip(self._pages, row.window_pages, strict=True):
            for position in range(first, end + scratch):
                if position // size not in table:
                    continue  # past the row's end: goes to page 0
                page = pages[table[position // size]]
                require(page.owner == ref, f"{ref} writes a page of {page.owner} at {position}")
                require(not page.is_shared, f"{ref} writes a shared page at {position}")
                told = fingerprint(row, text, position, lookahead=ahead)
                page.written[position % size] = told if position + max(ahead, 1) <= end else 0
