"""Per-row numbers that change with every step, as columns indexed by slot, for all data ranks.

Python loops only over rows that end, grow, or have a stop string. A row was admitted with `fill`
tokens and has since emitted `emitted` tokens. The root's KV is not written, so L, as far as read,
is fill + emitted - 1, or `fill` while nothing was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jspec.config.limits import ServeLimits

# Rows with more stop ids are processed individually; chat models have up to five.
MAX_STOP_IDS = 8
NO_ID = -1

Ints = np.ndarray  # i64[...]
Bools = np.ndarray  # bool[...]


@dataclass(slots=True, kw_only=True)
class RowTable:
    """The columns of one engine. `seat` initializes a row; a row that ends needs no cleanup."""

    left: Ints  # tokens still to emit
    last: Ints  # largest useful L (`budget.last_committed`)
    fill: Ints  # tokens at admission
    emitted: Ints  # tokens since
    pages: Ints  # end of the row's pages in the full space
    unread: Ints  # [slots, 3]: the columns steps, rounds and ahead
    pending: Ints  # tokens of plain rounds not yet given to the drafter, including those in flight
    decodes: Bools  # the final chunk is dispatched and the row has not ended
    ended: Bools  # the tenancy is over; steps in flight may still name it
    is_plain: Bools  # its ids alone determine where it ends
    is_watched: Bools  # is_plain, and its ids must be pushed to its StopWatch
    drafts: Bools  # drafts may be accepted
    stop_ids: np.ndarray  # i32[slots, MAX_STOP_IDS], padded with NO_ID
    out_ids: np.ndarray  # i32[slots, context_length + M], undefined from `emitted` on
    steps: Ints = field(init=False)  # in flight
    rounds: Ints = field(init=False)  # in flight
    ahead: Ints = field(init=False)  # most tokens that those rounds can emit
    most_stop_ids: int = field(default=0, init=False)  # of any row so far

    def __post_init__(self) -> None:
        self.steps, self.rounds, self.ahead = self.unread.T  # views

    @classmethod
    def empty(cls, limits: ServeLimits) -> RowTable:
        rows = limits.pool.all_slots
        # np.empty: memory is committed only as far as rows write.
        out_ids = np.empty(
            (rows, limits.pool.context_length + limits.draft_shape.max_emitted), np.int32
        )
        counts = ("left", "last", "fill", "emitted", "pages", "pending")
        flags = ("decodes", "ended", "is_plain", "is_watched", "drafts")
        return cls(
            **{name: np.zeros(rows, np.int64) for name in counts},
            **{name: np.zeros(rows, np.bool_) for name in flags},
            unread=np.zeros((rows, 3), np.int64),
            stop_ids=np.full((rows, MAX_STOP_IDS), NO_ID, np.int32),
            out_ids=out_ids,
        )

    def seat(
        self,
        slot: int,
        *,
        fill: int,
        left: int,
        last: int,
        stop_ids: tuple[int, ...] = (),
        # Its rounds need more than a check of ids: text that may end it, log-probabilities, a
        # grammar, or no drafts, since its steps then count as plain ones.
        is_cut: bool = False,
        is_watched: bool = False,
        drafts: bool = True,
    ) -> None:
        """Initialize a row that no step in flight names."""
        is_cut, self.drafts[slot] = is_cut or not drafts, drafts
        self.left[slot], self.last[slot], self.fill[slot] = left, last, fill
        self.emitted[slot] = self.pages[slot] = self.pending[slot] = 0
        self.unread[slot] = 0
        self.decodes[slot] = self.ended[slot] = False
        self.is_plain[slot] = not is_cut and len(stop_ids) <= MAX_STOP_IDS
        self.is_watched[slot] = is_watched and self.is_plain[slot]
        self.stop_ids[slot] = NO_ID
        if self.is_plain[slot]:
            self.stop_ids[slot, : len(stop_ids)] = stop_ids
            self.most_stop_ids = max(self.most_stop_ids, len(stop_ids))

    # Planning.

    def may_decode(self, slots: Ints) -> Bools:
        """Return whether each row's next decode can be dispatched, regardless of pages: its final
        chunk is, and after one token per round in flight and unread root one more must remain."""
        roots_due = self.emitted[slots] == 0
        return self.decodes[slots] & (self.rounds[slots] + roots_due < self.left[slots])

    def pages_missing(self, slots: Ints, limits: ServeLimits) -> Ints:
        """Return `budget.pages_for_decode` of each row minus the pages that it has, at least 0."""
        draft_shape = limits.draft_shape
        start = self.committed(slots) + self.ahead[slots]
        if limits.scheduling.num_rounds > 1:
            final = start + (limits.scheduling.num_rounds - 1) * draft_shape.max_emitted
            start = np.maximum(start, np.minimum(final, self.last[slots]))
        needed = -(-(start + draft_shape.num_scratch_slots) // limits.pool.page_size)
        return np.maximum(needed - self.pages[slots], 0)

    def committed(self, slots: Ints) -> Ints:
        return self.fill[slots] + np.maximum(self.emitted[slots] - 1, 0)

    # In flight.

    def unread_tokens(self, slots: Ints) -> Ints:
        """Return the most tokens of each row that steps in flight emit, the first root included."""
        return self.ahead[slots] + (self.emitted[slots] == 0)

    def dispatched(self, slots: Ints, *, rounds: int, tokens: int) -> None:
        self.unread[slots] += (1, rounds, tokens)

    def collected(self, slots: Ints, *, rounds: int, tokens: int) -> None:
        self.unread[slots] -= (1, rounds, tokens)

    # Committing.

    def goes_on(self, slots: Ints, counts: Ints, ids: np.ndarray) -> Bools:
        """Return the rows that certainly keep all counts[i] of their ids[i, M] and continue."""
        found = self.is_plain[slots] & (counts < self.left[slots])
        for stop_ids in self.stop_ids.T[: self.most_stop_ids]:
            found &= (ids != stop_ids[slots][:, None]).all(axis=1)
        return found

    def extend(self, slots: Ints, counts: Ints, ids: np.ndarray) -> None:
        columns = self.emitted[slots][:, None] + np.arange(ids.shape[1])
        self.out_ids[slots[:, None], columns] = ids
        self.emitted[slots] += counts
        self.left[slots] -= counts

    def append(self, slot: int, ids: tuple[int, ...]) -> None:
        begin = int(self.emitted[slot])
        self.out_ids[slot, begin : begin + len(ids)] = ids
        self.emitted[slot] += len(ids)
        self.left[slot] -= len(ids)

    def output(self, slot: int, *, begin: int = 0, end: int | None = None) -> list[int]:
        end = self.emitted[slot] if end is None else end
        found: list[int] = self.out_ids[slot, begin:end].tolist()
        return found
