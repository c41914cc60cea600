"""How a part of a step is timed, and what a profiler's trace says of the whole.

It knows loops, clocks and traces, and nothing of what the programs compute.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from benchmarks.step_parts import Part, Step

REPEATS = 5
GOAL_MS = 40.0


def part_ms(
    part: Part, step: Step, mesh: Mesh, *, floor_ms: float, compiler_options: dict[str, Any]
) -> float:
    """Milliseconds of one run of the part, inside a loop of about GOAL_MS (by its floor)."""
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
    """As the step's own programs run: inside a shard_map, here over one device."""
    spec = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def call_seconds() -> float:
    """What one call and one wait cost around any program."""
    nothing = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(nothing(jnp.zeros(())))
    times = []
    for _ in range(20):
        started = time.perf_counter()
        x = jax.block_until_ready(nothing(x))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def largest_operations(text: str, run: Callable[[int], None], *, count: int = 25) -> list[Any]:
    """[milliseconds a step, operation, where it comes from] from a trace of five steps.

    text: the compiled program, which says where each operation comes from. run: n steps.
    """
    named = re.compile(r'%?([\w.\-]+) = .*?op_name="([^"]*)"')
    origins = dict(named.findall(text))
    sums: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(5)
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    name = dict(event.stats).get("hlo_op")
                    if name is not None:
                        sums[str(name)] += event.duration_ns
    return [
        [round(ns / 5e6, 4), name, origins.get(name, "")] for name, ns in sums.most_common(count)
    ]
