"""Timing of the loop: its runner calls, step times, and busy time."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass


class TraceKind(enum.Enum):
    DISPATCH = "dispatch"
    COLLECT = "collect"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One call to the runner; times are seconds of time.monotonic()."""

    kind: TraceKind
    step: int
    started: float
    ended: float


class BusyClock:
    """Total running time, including the current run. Any thread may read it."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # before this run, its start

    @property
    def seconds(self) -> float:
        before, started = self._state
        return before if started is None else before + time.monotonic() - started

    def start(self) -> None:
        self._state = (self.seconds, time.monotonic())

    def stop(self) -> None:
        self._state = (self.seconds, None)
