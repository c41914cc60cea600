"""The data ranks of an engine: placement of requests, and sums over all ranks.

A step runs on all ranks at once, each with its own slots, pages and prefix cache (`Seats`). A
slot's number determines its rank, so one row table and one plan hold the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Any

from jspec.config.limits import ServeLimits
from jspec.messages.plan import RowRef
from jspec.messages.request import DEFAULT_VERSION
from jspec.scheduler.pages.cache_spaces import Hit
from jspec.scheduler.prefilling import Prefilling
from jspec.scheduler.row_table import RowTable
from jspec.scheduler.seats import Seats
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.scheduler.stats import RankStats, Totals

# The rank with the most rows determines a step's time. So a cached prefix attracts a request only
# to a rank with at most this many times the rows of the least loaded one, plus one.
MOST_TIMES_THE_ROWS = 2


class DataRanks:
    def __init__(
        self,
        limits: ServeLimits,
        totals: Totals,
        prefilling: Prefilling,
        *,
        epochs: list[int],
        weight_version: str = DEFAULT_VERSION,
    ) -> None:
        self._pool = limits.pool
        self.table = RowTable.empty(limits)
        self.all = tuple(
            Seats(
                limits,
                totals,
                prefilling,
                rank=rank,
                table=self.table,
                epochs=epochs,
                weight_version=weight_version,
            )
            for rank in range(limits.pool.num_ranks)
        )

    def number_of(self, tenancy: Tenancy) -> int:
        return self._pool.rank_of(tenancy.row.slot)

    def of(self, tenancy: Tenancy) -> Seats:
        return self.all[self._pool.rank_of(tenancy.row.slot)]

    def tenancy_of(self, row: RowRef) -> Tenancy:
        return self.all[self._pool.rank_of(row.slot)].tenancies[row]

    def place(self, newcomer: Sequence, has_room: Ordered[bool]) -> tuple[int, Hit] | None:
        """Return the rank for the head of the queue and its cached prefix there, or None to wait:
        with room in this step, by balance, longest cached prefix, fewest rows, and most free
        pages."""
        able = [i for i, seats in enumerate(self.all) if has_room[i] and seats.free_slots]
        least = min((len(self.all[i].running) for i in able), default=0)

        def worth(place: tuple[int, Hit]) -> tuple[bool, int, int, int]:
            rank, hit = place
            num_rows = len(self.all[rank].running)
            is_balanced = num_rows <= MOST_TIMES_THE_ROWS * least + 1
            return is_balanced, hit.num_pages, -num_rows, self.all[rank].pages.num_free

        hits = [(i, self.all[i].hit_of(newcomer)) for i in able]
        return max(((i, hit) for i, hit in hits if hit is not None), key=worth, default=None)

    def end(self, sequence: Sequence, *, step: int, keeps_pages: bool = True) -> None:
        if sequence.tenancy is not None:
            self.of(sequence.tenancy).end(sequence, step=step, keeps_pages=keeps_pages)

    # Over all ranks.

    @property
    def running(self) -> list[Sequence]:
        """The sequences with a slot, by rank and then by arrival."""
        return [sequence for seats in self.all for sequence in seats.running.values()]

    @property
    def tenancies(self) -> list[Tenancy]:
        return [tenancy for seats in self.all for tenancy in seats.tenancies.values()]

    @property
    def num_running(self) -> int:
        return sum([len(seats.running) for seats in self.all])

    @property
    def num_free_slots(self) -> int:
        return sum([len(seats.free_slots) for seats in self.all])

    @property
    def num_changes(self) -> int:
        return sum([seats.num_changes for seats in self.all])

    @property
    def num_leaked(self) -> int:
        return sum(seats.num_leaked for seats in self.all)

    @property
    def is_leaking(self) -> bool:
        try:
            return self.num_leaked != 0
        except Exception:
            return True

    def counts(self) -> dict[str, Any]:
        full, *windows = zip(*[seats.pages.spaces for seats in self.all], strict=True)
        return {
            "num_running": self.num_running,
            "num_pages": sum(space.num_pages for space in full),
            "num_free_pages": sum(space.num_free for space in full),
            "num_cached_pages": sum(space.num_cached for space in full),
            "num_free_window_pages": tuple(sum(s.num_free for s in each) for each in windows),
            "num_cached_window_pages": tuple(sum(s.num_cached for s in each) for each in windows),
            "by_rank": tuple(
                RankStats(len(seats.running), space.num_pages - space.num_free)
                for seats, space in zip(self.all, full, strict=True)
            ),
        }

    @property
    def weight_version(self) -> str:
        return self.all[0].pages.weight_version

    def set_weight_version(self, version: str, *, renames: bool) -> None:
        for seats in self.all:
            seats.pages.set_weight_version(version, renames=renames)

    def flush(self) -> None:
        for seats in self.all:
            seats.pages.flush()
