"""The fake runner's model of the full space: owners, sharers and contents of pages.

The cache at a position depends on all tokens up to it, and on as many after it as the drafter looks
ahead. A fingerprint of those tokens represents it: a shared page is correct if each of its
positions has the fingerprint of the reader's own text.
"""

from __future__ import annotations

from jspec.config.limits import ServeLimits
from jspec.messages.plan import RowRef, StepPlan
from jspec.spec import indexing
from tests.support.fake_rows import FakeRow, fingerprint, require

SCRATCH = 0  # not a fingerprint of any text


class FakePages:
    """A page has one owner, the only row that writes it; once shared it is read-only."""

    def __init__(self, limits: ServeLimits) -> None:
        self._size = limits.pool.page_size
        self._num_pages = limits.pool.num_pages
        self._lookahead, self._lag = limits.draft_shape.tokens_ahead, limits.draft_shape.lag
        self._owners: dict[int, RowRef] = {}
        self._sharers: dict[int, set[RowRef]] = {}
        self._written: dict[int, dict[int, int]] = {}  # page → offset → fingerprint

    def own(self, page: int, ref: RowRef, rows: dict[int, FakeRow]) -> None:
        """Give a page to a row; former owner and sharers must have ended."""
        require(1 <= page <= self._num_pages, f"page {page} for {ref}")
        formers = self._sharers.pop(page, set())
        if page in self._owners:
            formers.add(self._owners[page])
        for former in formers:
            row = rows.get(former.slot)
            if row is not None and row.admission.row == former:
                require(former != ref, f"page {page} granted twice to {ref}")
                require(row.steps_in_flight == 0, f"page {page} of {former}, in flight, for {ref}")
                del rows[former.slot]  # it ended: from now on its RowRef is an error
        self._owners[page] = ref
        self._written[page] = {}
        rows[ref.slot].page_ids.append(page)

    def share(self, row: FakeRow, text: list[int], pages: tuple[int, ...]) -> None:
        """Give a new row the pages of its cached tokens, which must have the row's own KV."""
        admission, size = row.admission, self._size
        ref, cached_len = admission.row, admission.cached_len
        require(cached_len % size == 0, f"{ref} begins at {cached_len}, inside a page")
        require(cached_len < len(admission.fill_ids), f"{ref} computes no token")
        for index, page in enumerate(pages[: cached_len // size]):
            require(page not in row.page_ids, f"page {page} twice in {ref}")
            for offset in range(size):
                expected = self._fingerprint(row, text, index * size + offset)
                found = self._written.get(page, {}).get(offset)
                require(found == expected, f"{ref} shares page {page}, wrong at {offset}")
            self._sharers.setdefault(page, set()).add(ref)
            row.page_ids.append(page)

    def write(self, row: FakeRow, text: list[int], *, first: int, end: int, scratch: int) -> None:
        """Write positions first to end - 1, and `scratch` more with arbitrary contents.

        Positions that a layer lagged behind are written again: their contents are final once the
        tokens that they look ahead at are known. Writes past the row's pages go to page 0.
        """
        ref = row.admission.row
        first = max(first - self._lag, row.admission.cached_len)
        for position in range(first, min(end + scratch, len(row.page_ids) * self._size)):
            page = row.page_ids[position // self._size]
            require(self._owners[page] == ref, f"{ref} writes page {page} of {self._owners[page]}")
            require(page not in self._sharers, f"{ref} writes page {page}, which others share")
            is_text = position + max(self._lookahead, 1) <= end
            self._written[page][position % self._size] = (
                self._fingerprint(row, text, position) if is_text else SCRATCH
            )

    def _fingerprint(self, row: FakeRow, text: list[int], position: int) -> int:
        return fingerprint(row, text, position, lookahead=self._lookahead)

    def check_shared(self, plan: StepPlan, rows: dict[int, FakeRow]) -> None:
        """Check that shared prefixes are in their leader's pages and are written."""
        of_plan = [rows[ref.slot] for ref in plan.rows]
        require(len(plan.shared) in (0, len(of_plan)), f"{plan.shared} of {len(of_plan)} rows")
        for row, shared in zip(of_plan, plan.shared, strict=False):
            leader, num_keys = shared
            num_pages = indexing.num_pages(num_keys, self._size)
            require(plan.shared[leader] == shared, f"{shared}, whose leader has another prefix")
            theirs = of_plan[leader].page_ids[:num_pages]
            require(row.page_ids[:num_pages] == theirs, f"{shared} of {row.page_ids}: {theirs}")
            require(num_keys <= row.seq_len, f"{shared} of {row.seq_len} keys")
