"""The timing of a part of a step, and the summary of a profiler's trace."""

from __future__ import annotations

import math
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from benchmarks.step_parts import Part, Step
from jspec.engine.weights.dummy_weights import hashed_normal

REPEATS = 5
GOAL_MS = 40.0


def part_ms(
    part: Part, step: Step, mesh: Mesh, *, floor_ms: float, compiler_options: dict[str, Any]
) -> float:
    """Return milliseconds of one run of the part, in a loop of about GOAL_MS (by its floor)."""
    arrays = (step.rows, step.tree, part.arrays)
    count = int(np.clip(GOAL_MS / max(2 * floor_ms, 0.1), 8, 200))

    def loop(carry: Any, arrays: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, c: part.body(c, *arrays), carry)

    run = jax.jit(
        on_mesh(loop, mesh), donate_argnums=(0,), compiler_options=compiler_options or None
    )
    carry = jax.block_until_ready(run(part.carry, arrays))
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        carry = jax.block_until_ready(run(carry, arrays))
        times.append(time.perf_counter() - started)
    return 1e3 * max(statistics.median(times) - call_seconds(), 0.0) / count


def on_mesh(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Wrap the function in a shard_map over one device, like the step's own programs."""
    spec = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def call_seconds() -> float:
    """Return the overhead of one call and one wait of any program."""
    nothing = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(nothing(jnp.zeros(())))
    times = []
    for _ in range(20):
        started = time.perf_counter()
        x = jax.block_until_ready(nothing(x))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def largest_kernels(run: Callable[[int], None], *, count: int = 30) -> list[Any]:
    """Return [milliseconds per step, launches per step, kernel] from a trace of five steps."""
    sums: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for plane, line, event in _traced(run):
        if plane.startswith("/device:") and line.startswith("Stream"):
            sums[event.name] += event.duration_ns
            launches[event.name] += 1
    return [
        [round(ns / 5e6, 4), launches[name] / 5, name[:120]] for name, ns in sums.most_common(count)
    ] + [[round(sum(sums.values()) / 5e6, 4), sum(launches.values()) / 5, "all"]]


def largest_operations(text: str, run: Callable[[int], None], *, count: int = 25) -> list[Any]:
    """Return [milliseconds per step, operation, its source] from a trace of five steps. text: the
    compiled program, with the source of each operation. run: n steps.
    """
    named = re.compile(r'%?([\w.\-]+) = .*?op_name="([^"]*)"')
    origins = dict(named.findall(text))
    sums: Counter[str] = Counter()
    for _, _, event in _traced(run):
        name = dict(event.stats).get("hlo_op")
        if name is not None:
            sums[str(name)] += event.duration_ns
    return [
        [round(ns / 5e6, 4), name, origins.get(name, "")] for name, ns in sums.most_common(count)
    ]


def _traced(run: Callable[[int], None]) -> Iterator[tuple[str, str, Any]]:
    """Yield (plane, line, event) of a trace of five steps."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(5)
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    yield plane.name, line.name, event


def randomized(cache: Any, seed: int) -> Any:
    """Return a layer's cache with small random numbers: zeros would be read faster."""

    def drawn(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        shape, dtype = x.shape, x.dtype
        x.delete()  # all pools together fill the memory
        return _random_pool(jnp.uint32(seed), shape=shape, dtype=dtype)

    return jax.tree.map(drawn, cache)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _random_pool(seed: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    flat = (shape[0] * shape[1], math.prod(shape[2:]))
    return hashed_normal(seed, shape=flat, dtype=dtype).reshape(shape)
