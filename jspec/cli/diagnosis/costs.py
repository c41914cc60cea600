"""Step costs of a single row, measured on the serving engines and on the drafter alone."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jspec.cli.diagnosis.texts import make_texts
from jspec.device.state import empty_caches, empty_sampling
from jspec.engine.weights.served_weights import ServedWeights
from jspec.messages.request import Request
from jspec.serving.engine import Engine
from jspec.spec.cache_entry import CacheLayout
from jspec.speculative.drafter import StepBatch

REPEATS, MOST_REPEATS, ROUNDS = 3, 15, 10
MOST_ERROR = 0.02  # relative standard error of the median above which it is measured again
PAGE_SIZE, NUM_PAGES = 64, 4


@dataclass(frozen=True, slots=True)
class Timing:
    """A median of `count` measurements, and its standard error, estimated from their spread."""

    seconds: float
    error: float
    count: int

    @classmethod
    def of(cls, found: Sequence[float]) -> Timing:
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        # For a normal distribution. A few outliers hardly move a quartile.
        sigma, of_median = (high - low) / 1.349, 1.2533
        return cls(middle, of_median * sigma / math.sqrt(len(found)), len(found))


def repeated(measure: Callable[[], float]) -> Timing:
    """Measure REPEATS times, then again while the spread leaves the median uncertain."""
    found = [measure() for _ in range(REPEATS)]
    while len(found) < MOST_REPEATS:
        timing = Timing.of(found)
        if timing.error <= MOST_ERROR * timing.seconds:
            break
        found.append(measure())
    return Timing.of(found)


def step_timing(engine: Engine, request: Request) -> Timing:
    """Return the seconds per decode step of one row: device busy time over steps."""

    def measure() -> float:
        before = engine.busy_seconds
        (text,) = make_texts(engine, [request])
        # Includes the short prefill and the first step after it.
        return (engine.busy_seconds - before) / (len(text.steps) + 2)

    return repeated(measure)


def propose_seconds(served: ServedWeights) -> float | None:
    """Return the median seconds of one row's `propose`; None on several devices or without a draft
    model."""
    drafter, mesh = served.models.drafter, served.mesh
    if mesh.size > 1 or not drafter.cache_groups:
        return None
    models = served.models
    dtype = jnp.dtype(models.config.dtype)
    layout = CacheLayout(page_size=PAGE_SIZE, dtype=dtype.name, lanes=models.target.ops.lanes)
    caches = empty_caches(drafter.cache_groups, layout=layout, num_units=lambda _: NUM_PAGES + 1)
    state = drafter.init_state(1, context_length=NUM_PAGES * PAGE_SIZE, dtype=dtype)
    rows = StepBatch(
        root_ids=jnp.zeros((1,), jnp.int32),
        seq_lens=jnp.full((1,), PAGE_SIZE, jnp.int32),
        page_table=1 + jnp.arange(NUM_PAGES, dtype=jnp.int32)[None],
        sampling=empty_sampling(1, vocab_size=models.target.vocab_size),
    )
    all_of_it = PartitionSpec()
    whole = partial(jax.shard_map, mesh=mesh, in_specs=all_of_it, out_specs=all_of_it)
    run = jax.jit(whole(drafter.propose, check_vma=False), donate_argnums=(1,))
    params = served.params["draft"]
    caches, _ = jax.block_until_ready(run(params, caches, state, rows))
    return _median_seconds(run, params, caches, state, rows)


def _median_seconds(run: Any, params: Any, caches: Any, state: Any, rows: StepBatch) -> float:
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        caches, _ = jax.block_until_ready(run(params, caches, state, rows))
        found.append(time.perf_counter() - started)
    return statistics.median(found)
