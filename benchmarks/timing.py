"""Measured rates of one H200, and the timing of short programs on any chip."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax

# Measured on one H200.
READ_BYTES_PER_SECOND = 4.49e12
COPY_BYTES_PER_SECOND = 4.3e12  # read plus written
FLOPS_PER_SECOND = 790e12  # bfloat16 matrix products
L2_BYTES = 50 * 2**20


def num_copies(num_bytes: float, *, argument_bytes: int, budget: int = 2**33) -> int:
    """Return how many sets of arguments to alternate, so that the L2 cache serves none of them.

    num_bytes: read by a call, of the `argument_bytes` of a set. budget: for all sets.
    """
    least = -(-4 * L2_BYTES // max(int(num_bytes), 1)) if num_bytes < 2 * L2_BYTES else 2
    return max(1, min(least, 32, budget // max(argument_bytes, 1)))


def seconds_per_run(run: Callable[[], Any], *, samples: int = 7) -> float:
    """Return the median seconds of one run of many that are enqueued one after the other."""
    jax.block_until_ready(run())
    started = time.perf_counter()
    jax.block_until_ready(run())
    once = max(time.perf_counter() - started, 1e-5)
    repeats = max(3, min(50, round(0.01 / once)))
    seconds = []
    for _ in range(samples):
        started = time.perf_counter()
        for _ in range(repeats):
            out = run()
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - started) / repeats)
    return median(seconds)
