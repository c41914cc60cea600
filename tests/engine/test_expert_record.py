"""The record of experts' tokens: counters that wrap around, and what start and stop leave out."""

from __future__ import annotations

import numpy as np

from jspec.engine.expert_record import ExpertRecord, ExpertTotals

MOST = 2**32 - 1


def counters(*ranks: int) -> np.ndarray:
    return np.array(ranks, np.uint32).reshape(-1, 1, 1)


def test_counters_may_wrap_around_and_ranks_are_added() -> None:
    totals = ExpertTotals()
    assert totals.add(counters(MOST, 5)).tolist() == [[MOST + 5]]
    assert totals.add(counters(1, 6)).tolist() == [[MOST + 5 + 2 + 1]]


def test_a_restart_loses_nothing_that_was_read() -> None:
    totals = ExpertTotals()
    totals.add(counters(7))
    totals.restarted()
    assert totals.add(counters(2)).tolist() == [[9]]


class Counts:
    def __init__(self) -> None:
        self.now = np.zeros((2, 4), np.int64)
        self.record = ExpertRecord(lambda: self.now, expert_map=((0, 1, 2, 3), ()), num_devices=2)

    def run(self, *counts: int) -> None:
        self.now = self.now + np.array([counts, [0, 0, 0, 0]])

    @property
    def dumped(self) -> list[int]:
        first, second = self.record.dump()["logical_count"]
        assert second == [0, 0, 0, 0]
        return list(first)


def test_a_dump_has_what_ran_between_start_and_stop() -> None:
    counts = Counts()
    counts.run(1, 2, 3, 4)
    assert counts.dumped == [1, 2, 3, 4]
    counts.record.start()
    counts.run(8, 0, 0, 4)
    assert counts.dumped == [8, 0, 0, 4]
    assert counts.record.balancedness() == {0: 6 / 8}
    counts.record.stop()
    counts.run(1, 1, 1, 1)
    assert counts.dumped == [8, 0, 0, 4]
    counts.record.start()
    assert counts.dumped == [0, 0, 0, 0]
    assert counts.record.balancedness() == {}


def test_counts_of_another_process_start_from_zero() -> None:
    counts = Counts()
    counts.run(5, 5, 5, 5)
    counts.record.start()
    counts.now = np.zeros_like(counts.now)
    counts.run(1, 0, 0, 0)
    assert counts.dumped == [1, 0, 0, 0]
