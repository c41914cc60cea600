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


class StepClock:
    """Device time of each step: from its dispatch, or the previous result if later, to its result.

    Used on the engine's thread. Call `seconds` once per step, in order.
    """

    def __init__(self) -> None:
        self._dispatched: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._last = 0.0

    def dispatched(self, step: int, now: float) -> None:
        self._dispatched[step] = now

    def collected(self, step: int, now: float) -> None:
        self._seconds[step] = now - max(self._dispatched.pop(step), self._last)
        self._last = now

    def lose_steps(self) -> None:
        self._dispatched.clear()
        self._seconds.clear()

    def seconds(self, step: int) -> float:
        return self._seconds.pop(step)


class BusyClock:
    """Accumulated running time, including the current run. Readable from any thread."""

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
