"""How many prompt tokens fit a time, by what the last prefills took.

Numbers in, a number out: it knows no plan and no clock.
"""

from __future__ import annotations

import statistics
from collections import deque

from jspec.spec import indexing

SAMPLES = 9  # of a size; a slow moment takes fewer
COLD_RUNS = 1  # of a program, which are slower: they are not counted


class PrefillPace:
    """Seconds of a prefill step by its size, which is one of `buckets`."""

    def __init__(self, buckets: tuple[int, ...]) -> None:
        self._buckets = buckets
        self._seconds: dict[int, deque[float]] = {}
        self._num_cold: dict[int, int] = {}

    def see(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, padded to its bucket, took so long."""
        bucket = indexing.bucket(num_tokens, self._buckets)
        left = self._num_cold.setdefault(bucket, COLD_RUNS)
        if left:
            self._num_cold[bucket] = left - 1
            return
        self._seconds.setdefault(bucket, deque(maxlen=SAMPLES)).append(seconds)

    def tokens_within(self, seconds: float) -> int | None:
        """The largest bucket that takes no longer, the smallest if none does: prompts must go on.
        None: nothing is known yet.

            256 tokens took 10 ms, 1024 took 30: 512 are held for 15, 768 for 22.5, 2048 for 60
        """
        if not self._seconds:
            return None
        fit = [size for size in self._buckets if self._expected(size) <= seconds]
        return max(fit, default=self._buckets[0])

    def _expected(self, bucket: int) -> float:
        """The median; of a size that was not seen in proportion to one that was: the next larger
        one, else the largest of all."""
        larger = [size for size in self._seconds if size >= bucket]
        known = min(larger) if larger else max(self._seconds)
        return statistics.median_low(self._seconds[known]) * bucket / known
