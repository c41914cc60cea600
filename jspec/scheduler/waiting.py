"""The queue of waiting requests.

First come, first served among requests of one rank; a higher rank goes first (`rank_of`). To
prevent starvation, a request goes next, whatever its rank, once PATIENCE per slot have overtaken
it (not counting those that were already waiting when it came). A retracted sequence goes before all
others of its rank.

It knows no pages and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from jspec.config.limits import PriorityOrder, SchedulingLimits, ServeLimits
from jspec.scheduler.sequence import Sequence

PATIENCE = 4


def rank_of(scheduling: SchedulingLimits, sequence: Sequence) -> int:
    """Return the rank: higher goes first; 0 for all if priorities are off."""
    priority = sequence.request.priority
    if scheduling.priority_order is PriorityOrder.OFF:
        return 0
    return priority if scheduling.priority_order is PriorityOrder.HIGH_FIRST else -priority


class WaitingQueue:
    """Waiting sequences by rank, iterated in admission order if no more came."""

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._by_rank: dict[int, deque[Sequence]] = {}
        self._latest: dict[int, int] = {}  # by arrival: value of _num_gone at which it is overdue
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._latest)

    def __iter__(self) -> Iterator[Sequence]:
        for rank in sorted(self._by_rank, reverse=True):
            yield from self._by_rank[rank]

    def push(self, sequence: Sequence) -> None:
        patience = PATIENCE * self._limits.pool.num_slots
        self._latest[sequence.arrival] = self._num_gone + len(self) + patience
        self._of(sequence).append(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Put a retracted sequence before all others of its rank."""
        self._latest[sequence.arrival] = self._num_gone + PATIENCE * self._limits.pool.num_slots
        self._of(sequence).appendleft(sequence)

    @property
    def head(self) -> Sequence:
        """The next sequence. Raises ValueError if the queue is empty."""
        firsts = [waiting[0] for waiting in self._by_rank.values()]
        if len(firsts) > 1:
            overdue = [each for each in firsts if self._latest[each.arrival] <= self._num_gone]
            if overdue:
                return min(overdue, key=lambda each: self._latest[each.arrival])
        return max(firsts, key=lambda each: rank_of(self._limits.scheduling, each))

    def pop(self) -> Sequence:
        """Remove and return the head, which is admitted now."""
        head = self.head
        self.remove(head)
        self._num_gone += 1
        return head

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ends while it waits. Raises ValueError if it is not queued."""
        rank = rank_of(self._limits.scheduling, sequence)
        waiting = self._by_rank.get(rank, deque())
        waiting.remove(sequence)
        if not waiting:
            del self._by_rank[rank]
        del self._latest[sequence.arrival]

    def _of(self, sequence: Sequence) -> deque[Sequence]:
        return self._by_rank.setdefault(rank_of(self._limits.scheduling, sequence), deque())
