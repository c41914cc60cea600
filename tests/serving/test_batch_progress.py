"""The progress line of a batch."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import cast

import pytest

from jspec.messages.request import SpecCounters
from jspec.scheduler.stats import SchedulerStats
from jspec.serving.batch_progress import BatchProgress


class Screen(io.StringIO):
    """A text buffer that claims to be a terminal, or not to be one."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
def test_it_says_how_far_how_fast_and_how_long(is_terminal: bool) -> None:
    screen = Screen(is_terminal=is_terminal)
    drafted = {"verify_ct": 100, "num_accepted": 181, "num_proposed": 300}
    counters = SpecCounters(**drafted, full_verify_ct=90, full_num_emitted=253)
    stats = cast(SchedulerStats, SimpleNamespace(num_emitted=2400, counters=counters))
    times = iter(float(second) for second in range(0, 1000, 6))
    progress = BatchProgress(
        screen, total=103, before=100, read_stats=lambda: stats, clock=lambda: next(times)
    )
    for is_well in (True, False):
        progress.add(is_well)
    progress.close()
    said = screen.getvalue()
    end = "102/103 lines, 1 error, "
    assert end in said
    assert "acceptance length 2.81" in said
    assert said.count("\n") == (1 if is_terminal else 2)
    assert ("\r" in said) is is_terminal


def test_the_time_left_is_that_of_the_lines_left() -> None:
    screen = io.StringIO()
    stats = cast(
        SchedulerStats, SimpleNamespace(num_emitted=100, counters=SpecCounters(verify_ct=1))
    )
    now = [0.0]
    progress = BatchProgress(
        screen,
        total=4000,
        before=10,
        errors_before=3,
        read_stats=lambda: stats,
        clock=lambda: now[0],
    )
    now[0] = 10.0
    for _ in range(10):
        progress.add(True)
    assert progress.line() == "20/4000 lines, 3 errors, 10 tokens/s, 1:06:20 left"
