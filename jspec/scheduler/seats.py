"""The slots and pages of a data rank: admission, end and release of sequences."""

from __future__ import annotations

import heapq

from jspec.config.limits import ServeLimits
from jspec.messages.plan import PageGrant, RowRef
from jspec.messages.request import DEFAULT_VERSION
from jspec.scheduler.blame import blaming
from jspec.scheduler.pages import budget
from jspec.scheduler.pages.cache_spaces import CacheSpaces, Hit
from jspec.scheduler.prefilling import Prefilling
from jspec.scheduler.row_table import RowTable
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.scheduler.stats import Totals


class Seats:
    """The slots and pages of one data rank; `table` and `epochs` are of all ranks, by slot."""

    def __init__(
        self,
        limits: ServeLimits,
        totals: Totals,
        prefilling: Prefilling,
        *,
        rank: int,
        table: RowTable,
        epochs: list[int],
        weight_version: str = DEFAULT_VERSION,
    ) -> None:
        self._limits = limits
        self._totals = totals
        self._prefilling = prefilling
        self._epochs = epochs
        self.pages = CacheSpaces(limits, weight_version=weight_version)
        self.table = table
        first = limits.pool.first_slot(rank) + 1
        # a heap: lowest slot first
        self.free_slots = list(range(first, first + limits.pool.num_slots))
        self.running: dict[str, Sequence] = {}  # in order of arrival
        self.tenancies: dict[RowRef, Tenancy] = {}  # that occupy a slot, ended ones included
        self.num_changes = 0  # of `running`

    @property
    def num_leaked(self) -> int:
        return self.pages.num_leaked(tuple(self.tenancies.values()))

    def hit_of(self, newcomer: Sequence) -> Hit | None:
        """Return the cached prefix of the head of the queue if it may be admitted, else None."""
        hit = self.pages.find(newcomer)
        if not self.pages.may_admit(newcomer, hit, tuple(self.running.values())):
            return None
        writers = [each for each in self._prefilling.tenancies if each.row in self.tenancies]
        return None if self.pages.waits(newcomer, hit, writers) else hit

    def admit(self, sequence: Sequence, hit: Hit) -> tuple[Tenancy, list[PageGrant]]:
        slot = heapq.heappop(self.free_slots)
        self._epochs[slot] += 1
        num_pages = budget.pages_for_admission(
            self._limits, sequence.num_tokens, num_tokens_left=sequence.num_tokens_left
        )
        tenancy = Tenancy.begin(RowRef(slot, self._epochs[slot]), sequence, self.table)
        grants = self.pages.admit(tenancy, hit, num_pages)
        self._totals.num_cached_tokens += 0 if sequence.num_retractions else tenancy.cached_len
        self.tenancies[tenancy.row] = tenancy
        self.running[sequence.request.request_id] = sequence
        self.num_changes += 1
        sequence.tenancy = tenancy
        self._prefilling.add(sequence)
        return tenancy, grants

    def end(self, sequence: Sequence, *, step: int, keeps_pages: bool = True) -> None:
        """End the tenancy of a sequence that runs here. step: the last dispatched step."""
        with blaming(sequence):
            del self.running[sequence.request.request_id]
            self.num_changes += 1
            self._prefilling.drop(sequence)
            if keeps_pages:
                self.pages.keep(sequence.active_tenancy, step=step)
            tenancy = sequence.leave()
            self.table.ended[tenancy.row.slot] = True
            self.table.decodes[tenancy.row.slot] = False
        if tenancy.steps_in_flight == 0:
            self.release(tenancy)

    def release(self, tenancy: Tenancy) -> None:
        with blaming(tenancy.sequence):
            del self.tenancies[tenancy.row]
            self.pages.release(tenancy)
            heapq.heappush(self.free_slots, tenancy.row.slot)
