"""The queue of waiting requests, which shares the slots between callers.

A caller is a client's name for its user or, without one, a call. Three rules choose the next
request:

    rank     The highest rank (`rank_of`) goes first. To prevent starvation, a rank goes next once
             PATIENCE requests per slot were admitted since its own last turn.
    caller   The caller with the fewest rows in slots; callers with equally many alternate.
             Retracted sequences go before all others of their rank, since they had a slot.
    arrival  First come, first served.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from jspec.config.limits import PriorityOrder, SchedulingLimits, ServeLimits
from jspec.scheduler.sequence import Sequence

PATIENCE = 4

Line = dict[int, Sequence]  # by arrival, and in that order


def rank_of(scheduling: SchedulingLimits, sequence: Sequence) -> int:
    """Return the rank, of which higher ones go first; 0 if priorities are off."""
    priority = sequence.request.priority
    if scheduling.priority_order is PriorityOrder.OFF:
        return 0
    return priority if scheduling.priority_order is PriorityOrder.HIGH_FIRST else -priority


@dataclass(slots=True)
class Rank:
    """The waiting sequences of one rank, iterated in about the order of admission."""

    due: int  # number of admissions after which this rank goes next
    retracted: Line = field(default_factory=dict)
    # Each caller's line, by the caller's number of rows. Equal callers take turns: one that starts
    # to wait, or whose number of rows changes, goes to the end.
    lines: dict[int, dict[Hashable, Line]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.retracted or self.lines)

    def __iter__(self) -> Iterator[Sequence]:
        yield from (self.retracted[arrival] for arrival in sorted(self.retracted))
        lines = [line.values() for _, some in sorted(self.lines.items()) for line in some.values()]
        for turn in itertools.zip_longest(*lines):
            yield from (sequence for sequence in turn if sequence is not None)

    @property
    def head(self) -> Sequence:
        if self.retracted:
            return self.retracted[min(self.retracted)]
        line = next(iter(self.lines[min(self.lines)].values()))
        return next(iter(line.values()))

    def push(self, sequence: Sequence, *, num_rows: int) -> None:
        lines = self.lines.setdefault(num_rows, {})
        lines.setdefault(sequence.caller, {})[sequence.arrival] = sequence

    def remove(self, sequence: Sequence, *, num_rows: int) -> None:
        if self.retracted.pop(sequence.arrival, None) is None:
            line = self.lines[num_rows][sequence.caller]
            del line[sequence.arrival]
            if not line:
                self._take(sequence.caller, num_rows)

    def move(self, caller: Hashable, *, before: int, now: int) -> None:
        if caller in self.lines.get(before, ()):
            line = self._take(caller, before)
            self.lines.setdefault(now, {})[caller] = line

    def _take(self, caller: Hashable, num_rows: int) -> Line:
        line = self.lines[num_rows].pop(caller)
        if not self.lines[num_rows]:
            del self.lines[num_rows]
        return line


class WaitingQueue:
    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._by_rank: dict[int, Rank] = {}
        self._num_rows: Counter[Hashable] = Counter()  # in slots, by caller
        self._num_waiting: Counter[Hashable] = Counter()  # by caller
        self._size = 0
        self._num_gone = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for rank in sorted(self._by_rank, reverse=True):
            yield from self._by_rank[rank]

    @property
    def num_callers(self) -> int:
        return len(self._num_waiting)

    @property
    def most_rows(self) -> int:
        return max(list(self._num_rows.values()), default=0)  # a copy, for other threads

    def push(self, sequence: Sequence) -> None:
        self._rank_for(sequence).push(sequence, num_rows=self._num_rows[sequence.caller])

    def push_back(self, sequence: Sequence) -> None:
        """Put a retracted sequence before all others of its rank."""
        self._rank_for(sequence).retracted[sequence.arrival] = sequence

    @property
    def head(self) -> Sequence:
        return self._by_rank[self._next_rank()].head

    def pop(self) -> Sequence:
        """Remove and return the head, which is admitted now, so its caller has one more row."""
        rank = self._next_rank()
        head = self._by_rank[rank].head
        self._num_gone += 1
        self._by_rank[rank].due = self._num_gone + self._patience
        self.remove(head)
        self._change_rows(head.caller, by=1)
        return head

    def leave(self, sequence: Sequence) -> None:
        self._change_rows(sequence.caller, by=-1)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ends while it waits. Raises KeyError if it is not queued."""
        number = rank_of(self._limits.scheduling, sequence)
        rank = self._by_rank[number]
        rank.remove(sequence, num_rows=self._num_rows[sequence.caller])
        if not rank:
            del self._by_rank[number]
        _add(self._num_waiting, sequence.caller, -1)
        self._size -= 1

    def _rank_for(self, sequence: Sequence) -> Rank:
        _add(self._num_waiting, sequence.caller, 1)
        self._size += 1
        number = rank_of(self._limits.scheduling, sequence)
        if number not in self._by_rank:
            self._by_rank[number] = Rank(self._num_gone + self._patience)
        return self._by_rank[number]

    def _next_rank(self) -> int:
        overdue = [rank for rank, each in self._by_rank.items() if each.due <= self._num_gone]
        if overdue:
            return min(overdue, key=lambda rank: self._by_rank[rank].due)
        return max(self._by_rank)

    def _change_rows(self, caller: Hashable, *, by: int) -> None:
        before = self._num_rows[caller]
        _add(self._num_rows, caller, by)
        for rank in self._by_rank.values():
            rank.move(caller, before=before, now=before + by)

    @property
    def _patience(self) -> int:
        return PATIENCE * self._limits.pool.max_rows


def _add(counts: Counter[Hashable], caller: Hashable, number: int) -> None:
    """Count without keeping zeros, since the number of callers grows without bound."""
    counts[caller] += number
    if not counts[caller]:
        del counts[caller]
