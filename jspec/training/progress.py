"""Time used by a run, and its progress lines on the terminal."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

import numpy as np


class Schedule(Protocol):
    @property
    def num_steps(self) -> int: ...

    @property
    def budget_seconds(self) -> float | None: ...


class Clock:
    """Seconds of training over all resumptions, compilation (the first step) included."""

    def __init__(self, schedule: Schedule, *, used: float, step: int) -> None:
        self._schedule = schedule
        self._used = used
        self._start = time.monotonic()
        self.compiling = 0.0
        self._since = self._start, step
        self._paused = 0.0

    def first_step_done(self, *, step: int) -> None:
        """Start the schedule. Compilation takes time but no part of the schedule."""
        now = time.monotonic()
        self.compiling = now - self._start
        self._since, self._paused = (now, step), 0.0

    def seconds(self) -> float:
        return self._used + time.monotonic() - self._start

    def progress(self, step: int) -> float:
        """Return the finished share of the schedule: by steps or by time, the larger."""
        share = step / self._schedule.num_steps
        budget = self._schedule.budget_seconds
        if budget is None:
            return share
        spent = self.seconds() - self.compiling
        return max(share, spent / max(budget - self.compiling, 1e-3))

    def leave_out(self, seconds: float) -> None:
        self._paused += seconds

    def steps_per_second(self, step: int) -> float:
        start, first = self._since
        taken = time.monotonic() - start - self._paused
        return (step - first) / taken if step > first and taken > 0 else 0.0

    def seconds_left(self, step: int) -> float | None:
        rate = self.steps_per_second(step)
        if not rate:
            return None
        by_steps = (self._schedule.num_steps - step) / rate
        budget = self._schedule.budget_seconds
        return by_steps if budget is None else min(by_steps, max(budget - self.seconds(), 0.0))


def duration(seconds: float) -> str:
    """Format seconds for display: 59.6 → 1m00s, 3599 → 59m59s, 86399 → 23h59m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def speed(clock: Clock, *, step: int, tokens_a_step: int) -> dict[str, str]:
    left, rate = clock.seconds_left(step), clock.steps_per_second(step) * tokens_a_step
    shown = {"tokens/s": f"{rate:.0f}"} if rate else {}
    return shown if left is None else {**shown, "left": duration(left)}


def note(text: str) -> None:
    print(text, flush=True)


def show(name: str, *, step: int, num_steps: int, progress: float, metrics: dict[str, Any]) -> None:
    filled = round(20 * min(progress, 1.0))
    parts = []
    for key, value in metrics.items():
        if isinstance(value, str):
            parts.append(f"{key} {value}")
            continue
        values = np.atleast_1d(np.asarray(value, np.float64))
        parts.append(f"{key} " + "/".join(f"{item:.3g}" for item in values))
    line = f"{name} [{'#' * filled}{'.' * (20 - filled)}] {step}/{num_steps} " + "  ".join(parts)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
