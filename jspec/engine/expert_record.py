"""The record of each expert's tokens: SGLang's expert distribution recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jspec.config.expert_placement import ExpertMap, balancedness

NOT_RECORDED = (
    "expert_distribution_recorder_mode is None; expected stat, so that the tokens of each expert "
    "are counted"
)


class ExpertTotals:
    """Tokens of each expert since a runner was made, from device counters that wrap around."""

    def __init__(self) -> None:
        self._total: np.ndarray | None = None
        self._last = np.zeros((), np.uint32)

    def add(self, counters: np.ndarray) -> np.ndarray:
        """Return i64[L, X] over all data ranks. counters: u32[ranks, L, X], as they are now."""
        new = (counters - self._last).astype(np.int64).sum(axis=0)
        self._total = new if self._total is None else self._total + new
        self._last = counters
        return self._total

    def restarted(self) -> None:
        self._last = np.zeros((), np.uint32)


class ExpertRecord:
    """Counts from the last start to the last stop, or of everything if there was none. read:
    returns i64[L, X] since the runner was made; RequestError for an engine that does not count."""

    def __init__(
        self, read: Callable[[], np.ndarray], *, expert_map: ExpertMap, num_devices: int
    ) -> None:
        self._read = read
        self._expert_map, self._num_devices = expert_map, num_devices
        self._first: np.ndarray | None = None
        self._last: np.ndarray | None = None

    def start(self) -> None:
        self._first, self._last = self._read(), None

    def stop(self) -> None:
        self._last = self._read()

    def dump(self) -> dict[str, Any]:
        """Return {"logical_count": [L, X] as lists}, which `init_expert_location` reads."""
        return {"logical_count": self._counts().tolist()}

    def balancedness(self) -> Mapping[int, float]:
        """Return the mean load of the devices divided by the largest, from 0 to 1, by layer."""
        return balancedness(self._counts(), self._expert_map, num_devices=self._num_devices)

    def _counts(self) -> np.ndarray:
        last = self._read() if self._last is None else self._last
        if self._first is None or (last < self._first).any():  # another process counts from 0
            return last
        return last - self._first
