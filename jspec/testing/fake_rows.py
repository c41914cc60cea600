"""What the fake runner remembers of each row, and its books of the window spaces' pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from jspec.core import shapes
from jspec.core.config import ServeLimits
from jspec.core.errors import InvariantError
from jspec.core.plan import Admission, PageGrant, RowRef


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


class FakeWindows:
    """Who owns which page of each window space; the rules of the full space are the runner's.

    A page may get a new owner while the old one lives if no query of the old one from its known
    length on can see it. All else that a row writes or sees must be on pages of its own.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._owners: tuple[dict[int, tuple[RowRef, int]], ...] = tuple({} for _ in limits.windows)

    def grant(self, grant: PageGrant, ref: RowRef, rows: dict[int, FakeRow]) -> None:
        """Gives the page to the row; a former owner that still needs it must be gone for good."""
        space, size = self._limits.windows[grant.space - 1], self._limits.page_size
        owners, table = self._owners[grant.space - 1], rows[ref.slot].window_pages[grant.space - 1]
        require(1 <= grant.page <= space.num_pages, f"{grant} outside its space")
        require(grant.index < self._limits.pages_per_row, f"{grant} past the page table")
        require(grant.index not in table, f"{grant} where the row has a page")
        if grant.page in owners:
            former, index = owners[grant.page]
            row = rows.get(former.slot)
            if row is not None and row.admission.row == former:
                first_seen = row.known_len - (space.window - 1)
                if (index + 1) * size > first_seen:
                    require(former != ref, f"{grant} while the row sees it at {index}")
                    in_flight = row.steps_in_flight
                    require(in_flight == 0, f"{grant}, which {former}, in flight, sees")
                    del rows[former.slot]  # it ended: from now on its RowRef is an error
                else:
                    del row.window_pages[grant.space - 1][index]
        owners[grant.page] = (ref, grant.index)
        table[grant.index] = grant.page

    def check(self, row: FakeRow, *, first: int, end: int) -> None:
        """Queries from `first` on, which write up to `end`, meet pages of the row's own alone."""
        size = self._limits.page_size
        for space, table in zip(self._limits.windows, row.window_pages, strict=True):
            begin = max(first - (space.window - 1), 0) // size
            missing = [i for i in range(begin, shapes.num_pages(end, size)) if i not in table]
            require(
                not missing,
                f"{row.admission.row} at {first} to {end} lacks pages {missing} of the window of "
                f"{space.window}",
            )
