"""The numbers of all rows that hold a slot, as columns: what changes with every step.

A step of many rows is planned and committed by a few operations on whole columns; Python touches
only the rows that end, grow, or have a stop string. A column is indexed by slot; slot 0 is the
dummy. It holds numbers only and decides nothing but sums and comparisons; `Tenancy` reads one row
of it by name.

Of a row: `fill` tokens were given to it at admission, `emitted` came since. The root's KV is not
written, so L, as far as it was read, is fill + emitted - 1, and `fill` while nothing was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jspec.config.limits import ServeLimits

# A row with more stop ids is compared by itself at each step; chat models have up to five.
MAX_STOP_IDS = 8
NO_ID = -1

Ints = np.ndarray  # i64[...]
Bools = np.ndarray  # bool[...]


@dataclass(slots=True, kw_only=True)
class RowTable:
    """Columns of one engine; `seat` begins a row, and nothing has to be done when it ends.

    left: tokens to emit. last: largest useful L (`budget.last_committed`). pages: page ids held.
    steps, rounds: in flight. ahead: tokens that those rounds can emit. pending: tokens that plain
    rounds have not given to its drafter, including those in flight.
    decodes: its final chunk is dispatched and it has not ended.
    ended: its tenancy is over, though steps may name it. is_plain: ids alone say where it ends;
    is_watched: and these must be shown to its StopWatch.
    drafts: drafts may be accepted. stop_ids: those ids, NO_ID after them. out_ids: emitted ids;
    past `emitted` anything. unread: steps, rounds and ahead side by side, which are its columns.
    """

    left: Ints
    last: Ints
    fill: Ints
    emitted: Ints
    pages: Ints
    unread: Ints  # [slots, 3]
    pending: Ints
    decodes: Bools
    ended: Bools
    is_plain: Bools
    is_watched: Bools
    drafts: Bools
    stop_ids: np.ndarray  # i32[slots, MAX_STOP_IDS]
    out_ids: np.ndarray  # i32[slots, context_length + M]
    steps: Ints = field(init=False)
    rounds: Ints = field(init=False)
    ahead: Ints = field(init=False)
    most_stop_ids: int = field(default=0, init=False)  # that a row has had

    def __post_init__(self) -> None:
        self.steps, self.rounds, self.ahead = self.unread.T  # views

    @classmethod
    def empty(cls, limits: ServeLimits) -> RowTable:
        rows = limits.num_slots + 1
        # Of memory only what rows have come to is ever touched.
        out_ids = np.empty((rows, limits.context_length + limits.spec.max_emitted), np.int32)
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
        is_cut: bool = False,
        is_watched: bool = False,
        drafts: bool = True,
    ) -> None:
        """Begins a row that nothing in flight names. is_cut: more than its ids is to be looked at:
        its text may end it, it has log-probabilities, or its grammar is to go on; so it is where
        its steps count as plain ones (not drafts)."""
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
        """`policy.may_decode` of each row: rounds in flight, and a root that is not read yet,
        emit at least one token each, and must leave one."""
        roots_due = self.emitted[slots] == 0
        return self.decodes[slots] & (self.rounds[slots] + roots_due < self.left[slots])

    def pages_missing(self, slots: Ints, limits: ServeLimits) -> Ints:
        """`budget.pages_for_decode` of each row, less the pages that it holds; 0 at least."""
        spec = limits.spec
        start = self.committed(slots) + self.ahead[slots]
        if limits.num_rounds > 1:
            final = start + (limits.num_rounds - 1) * spec.max_emitted
            start = np.maximum(start, np.minimum(final, self.last[slots]))
        needed = -(-(start + spec.num_scratch_rows) // limits.page_size)
        return np.maximum(needed - self.pages[slots], 0)

    def committed(self, slots: Ints) -> Ints:
        """L as far as it was read."""
        return self.fill[slots] + np.maximum(self.emitted[slots] - 1, 0)

    # In flight.

    def dispatched(self, slots: Ints, *, rounds: int, tokens: int) -> None:
        """A step of these rows; of a decode, its rounds, and the tokens that they can emit."""
        self.unread[slots] += (1, rounds, tokens)

    def collected(self, slots: Ints, *, rounds: int, tokens: int) -> None:
        """That step."""
        self.unread[slots] -= (1, rounds, tokens)

    # Committing.

    def goes_on(self, slots: Ints, counts: Ints, ids: np.ndarray) -> Bools:
        """Which rows surely take all of counts[i] ids of ids[i, M] and do not end by them.

        Of the others some do the same: a stop id may be past the count, or among the first
        min_new_tokens tokens.
        """
        found = self.is_plain[slots] & (counts < self.left[slots])
        for stop_ids in self.stop_ids.T[: self.most_stop_ids]:
            found &= (ids != stop_ids[slots][:, None]).all(axis=1)
        return found

    def extend(self, slots: Ints, counts: Ints, ids: np.ndarray) -> None:
        """Appends counts[i] ids of ids[i, M] to each row."""
        columns = self.emitted[slots][:, None] + np.arange(ids.shape[1])
        self.out_ids[slots[:, None], columns] = ids
        self.emitted[slots] += counts
        self.left[slots] -= counts

    def append(self, slot: int, ids: tuple[int, ...]) -> None:
        """Appends ids to one row."""
        begin = int(self.emitted[slot])
        self.out_ids[slot, begin : begin + len(ids)] = ids
        self.emitted[slot] += len(ids)
        self.left[slot] -= len(ids)

    def output(self, slot: int, *, begin: int = 0) -> list[int]:
        """What a row has emitted, from its token `begin` on."""
        found: list[int] = self.out_ids[slot, begin : self.emitted[slot]].tolist()
        return found
