"""What the fake runner remembers of each row, and its books of the window spaces' pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from jspec.config.limits import ServeLimits
from jspec.errors import InvariantError
from jspec.messages.plan import Admission, PageGrant, RowRef
from jspec.spec import indexing


class PlanError(InvariantError):
    """A plan that a device could not run safely."""


def require(condition: bool, message: str) -> None:
    """Raises PlanError with `message` unless the condition holds."""
    if not condition:
        raise PlanError(message)


@dataclass(slots=True, kw_only=True)
class FakeRow:
    """A slot as the device has it, and what the host can have read of it.

    window_pages: by window space, the pages that the row owns there, by index. text: its tokens as
    far as anybody has asked for them.
    """

    admission: Admission
    page_ids: list[int]
    num_filled: int = 0
    seq_len: int = 0  # L on the device, all dispatched steps included
    num_emitted: int = 0
    read_len: int = 0  # L as of the collected steps
    num_read: int = 0
    unread_rounds: int = 0
    unread_tokens: int = 0  # at most, of those rounds
    owed: int = 0  # tokens of which the drafter was not told
    steps_in_flight: int = 0
    window_pages: list[dict[int, int]] = field(default_factory=list)
    text: list[int] = field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        return self.num_filled == len(self.admission.fill_ids)

    @property
    def known_len(self) -> int:
        """What the host may take L for: what it dispatched of a fill, then what it read."""
        return self.read_len if self.is_filled else self.num_filled


def fingerprint(row: FakeRow, text: list[int], position: int, *, lookahead: int) -> int:
    """Stands for what a row holds at a position: that depends on all tokens up to it, and on as
    many after it as the drafter looks ahead."""
    seen = tuple(text[: position + 1 + lookahead])
    return hash((row.admission.request.extra_key, seen)) or 1


@dataclass(slots=True)
class FakeWindowPage:
    """A lent page of a window space: what is written at its offsets, and the rows that have it, of
    which `owner` alone writes. is_shared: another has found it; then nobody does."""

    index: int
    owner: RowRef
    rows: set[RowRef]
    written: dict[int, int] = field(default_factory=dict)
    is_shared: bool = False


class FakeWindows:
    """Who has which page of each window space; the rules of the full space are the runner's.

    A page may get a new owner while former rows live if no query of theirs from their known length
    on can see it. All else that a row writes or sees must be on pages of its own, but for those
    that it finds when it is admitted: they hold what it would have written.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._pages: tuple[dict[int, FakeWindowPage], ...] = tuple({} for _ in limits.windows)

    def grant(self, grant: PageGrant, ref: RowRef, rows: dict[int, FakeRow]) -> None:
        """Gives the page to the row; a former one that still needs it must be gone for good."""
        space, size = self._limits.windows[grant.space - 1], self._limits.page_size
        row, pages = rows[ref.slot], self._pages[grant.space - 1]
        table = row.window_pages[grant.space - 1]
        require(1 <= grant.page <= space.num_pages, f"{grant} outside its space")
        require(grant.index < self._limits.pages_per_row, f"{grant} past the page table")
        require(grant.index not in table, f"{grant} where the row has a page")
        if grant.index < row.admission.cached_len // size:
            self._share(grant, row, pages)
        else:
            former = pages.get(grant.page)
            for other in () if former is None else tuple(former.rows):
                self._take(grant, other, rows, ref=ref, index=former.index if former else 0)
            pages[grant.page] = FakeWindowPage(grant.index, ref, {ref})
        table[grant.index] = grant.page

    def _share(self, grant: PageGrant, row: FakeRow, pages: dict[int, FakeWindowPage]) -> None:
        ref, size = row.admission.row, self._limits.page_size
        require(grant.page in pages, f"{grant}, which nobody has written")
        page = pages[grant.page]
        for position in range(grant.index * size, (grant.index + 1) * size):
            ahead = self._limits.spec.tokens_ahead
            expected = fingerprint(row, row.text, position, lookahead=ahead)
            is_right = page.written.get(position % size) == expected
            require(
                is_right, f"{ref} shares page {grant.page} of {grant.space}, wrong at {position}"
            )
        page.rows.add(ref)
        page.is_shared = True

    def _take(
        self, grant: PageGrant, other: RowRef, rows: dict[int, FakeRow], *, ref: RowRef, index: int
    ) -> None:
        """Of a former row, which must not see it any more, or be gone."""
        space, size = self._limits.windows[grant.space - 1], self._limits.page_size
        row = rows.get(other.slot)
        if row is None or row.admission.row != other:
            return
        if (index + 1) * size > row.known_len - self._limits.spec.lag - (space.window - 1):
            require(other != ref, f"{grant} while the row sees it at {index}")
            require(row.steps_in_flight == 0, f"{grant}, which {other}, in flight, sees")
            del rows[other.slot]  # it ended: from now on its RowRef is an error
        else:
            del row.window_pages[grant.space - 1][index]

    def check(self, row: FakeRow, *, first: int, end: int) -> None:
        """Queries from `first` on, which write up to `end`, meet pages of the row's own alone."""
        size = self._limits.page_size
        first = max(first - self._limits.spec.lag, row.admission.cached_len)
        for space, table in zip(self._limits.windows, row.window_pages, strict=True):
            begin = max(first - (space.window - 1), 0) // size
            missing = [i for i in range(begin, indexing.num_pages(end, size)) if i not in table]
            require(
                not missing,
                f"{row.admission.row} at {first} to {end} lacks pages {missing} of the window of "
                f"{space.window}",
            )

    def write(self, row: FakeRow, text: list[int], *, first: int, end: int, scratch: int) -> None:
        """The row writes its positions first to end - 1 and `scratch` more that mean nothing."""
        ref, size, ahead = row.admission.row, self._limits.page_size, self._limits.spec.tokens_ahead
        first = max(first - self._limits.spec.lag, row.admission.cached_len)
        for pages, table in zip(self._pages, row.window_pages, strict=True):
            for position in range(first, end + scratch):
                if position // size not in table:
                    continue  # after the row's end, which is written to page 0
                page = pages[table[position // size]]
                require(page.owner == ref, f"{ref} writes a page of {page.owner} at {position}")
                require(not page.is_shared, f"{ref} writes a shared page at {position}")
                told = fingerprint(row, text, position, lookahead=ahead)
                page.written[position % size] = told if position + max(ahead, 1) <= end else 0
