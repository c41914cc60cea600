"""Progress of a batch: one rewritten line on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from jspec.scheduler.stats import SchedulerStats

LOG_SECONDS, SCREEN_SECONDS = 10.0, 0.2


class Screen(Protocol):
    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


class BatchProgress:
    def __init__(
        self,
        screen: Screen,
        *,
        total: int,  # items, called `noun`
        before: int,  # items that earlier runs answered
        errors_before: int = 0,
        read_stats: Callable[[], SchedulerStats],
        clock: Callable[[], float] = time.monotonic,
        noun: str = "lines",
        emitted_before: int = 0,  # tokens in read_stats that do not belong to this batch
    ) -> None:
        self._screen = screen
        self._total, self._before = total, before
        self._read_stats = read_stats
        self._clock, self._noun, self._emitted_before = clock, noun, emitted_before
        self._started = self._said = clock()
        self._now = 0
        self.num_errors = errors_before

    def add(self, is_well: bool) -> None:
        self._now += 1
        self.num_errors += not is_well
        now = self._clock()
        is_terminal = self._screen.isatty()
        if now - self._said >= (SCREEN_SECONDS if is_terminal else LOG_SECONDS):
            self._said = now
            self._screen.write(f"\r\x1b[K{self.line()}" if is_terminal else f"{self.line()}\n")
            self._screen.flush()

    def line(self) -> str:
        """Return, for example, "412/10000 lines, 3 errors, 1234 tokens/s, 0:12:31 left"."""
        seconds = max(self._clock() - self._started, 1e-9)
        stats = self._read_stats()
        parts = [f"{self._before + self._now}/{self._total} {self._noun}"]
        if self.num_errors:
            parts.append(f"{self.num_errors} error{'s' if self.num_errors > 1 else ''}")
        parts.append(f"{(stats.num_emitted - self._emitted_before) / seconds:.0f} tokens/s")
        if stats.counters.full_verify_ct:
            parts.append(f"acceptance length {stats.counters.acceptance_length:.2f}")
        left = self._total - self._before - self._now
        if left and self._now:
            parts.append(f"{_clock_time(left * seconds / self._now)} left")
        return ", ".join(parts)

    def close(self) -> None:
        self._screen.write(f"{chr(13)}\x1b[K" if self._screen.isatty() else "")
        self._screen.write(f"{self.line()}\n")
        self._screen.flush()


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
