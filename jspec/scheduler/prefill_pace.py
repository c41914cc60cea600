"""Estimate the prompt tokens that fit a time, from the durations of recent prefills."""

from __future__ import annotations

import statistics
from collections import deque

from jspec.spec import indexing

SAMPLES = 9  # per size; the median ignores slow moments, which span fewer
COLD_RUNS = 1  # slower first runs of a program, which are ignored


class PrefillPace:
    """Median seconds of a prefill step by its size, one of `buckets`."""

    def __init__(self, buckets: tuple[int, ...]) -> None:
        self._buckets = buckets
        self._seconds: dict[int, deque[float]] = {}
        self._num_cold: dict[int, int] = {}

    def see(self, num_tokens: int, seconds: float) -> None:
        bucket = indexing.bucket(num_tokens, self._buckets)
        left = self._num_cold.setdefault(bucket, COLD_RUNS)
        if left:
            self._num_cold[bucket] = left - 1
            return
        self._seconds.setdefault(bucket, deque(maxlen=SAMPLES)).append(seconds)

    def tokens_within(self, seconds: float) -> int | None:
        """Return the largest bucket that fits `seconds`, else the smallest; None if not measured.

        256 tokens took 10 ms, 1024 took 30: 512 count as 15, 768 as 22.5, 2048 as 60
        """
        if not self._seconds:
            return None
        fit = [size for size in self._buckets if self._expected(size) <= seconds]
        return max(fit, default=self._buckets[0])

    def _expected(self, bucket: int) -> float:
        """Return the median, scaled from the next larger measured size, or else the largest."""
        larger = [size for size in self._seconds if size >= bucket]
        known = min(larger) if larger else max(self._seconds)
        return statistics.median_low(self._seconds[known]) * bucket / known
