"""The best candidate of a draft on a GPU: XLA's fusions against the kernel (sample/rank_gpu.py).

    python -m benchmarks.rank_gpu [--rows 1 8 64] [--widths 128256 32000]

Each copy of the logits is ranked at positions of its own: with the same ones for all, XLA makes the
noise once. Columns must be XLA's before anything is timed. Writes benchmarks/results/rank_gpu.json.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import write_result
from benchmarks.gpu_timing import num_copies, seconds_per_call
from jspec.pallas_kernels.sample.gpu_rank import rank_one
from jspec.pallas_kernels.sample.reference import rank_one as reference
from jspec.pallas_kernels.sample.tuning import SampleTuning
from jspec.speculative.tree import LOWEST

WAYS: dict[str, Callable[..., Any]] = {
    "xla": reference,
    "1024/4": partial(rank_one, tuning=SampleTuning(chunk=1024)),
    "2048/4": partial(rank_one, tuning=SampleTuning(chunk=2048)),
    "4096/8": partial(rank_one, tuning=SampleTuning(chunk=4096, num_warps=8)),
}
RESULT = Path(__file__).parent / "results" / "rank_gpu.json"


@dataclass(frozen=True)
class Case:
    """rows of `width` logits at one temperature."""

    rows: int
    width: int
    temperature: float

    def arguments(self) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        keys = jax.random.split(jax.random.key(self.rows), num_copies(4 * self.rows * self.width))
        logits = [3 * jax.random.normal(key, (self.rows, self.width)) for key in keys]
        return logits, (
            jnp.full((self.rows,), self.temperature, jnp.float32),
            jax.random.bits(keys[0], (self.rows, 2), jnp.uint32),
            jnp.arange(self.rows, dtype=jnp.int32),
            jnp.arange(self.width, dtype=jnp.int32),
        )


def compiled(way: str, case: Case) -> Any:
    one = partial(WAYS[way], lowest=LOWEST)

    def all_copies(logits: list[jax.Array], rows: tuple[jax.Array, ...]) -> list[Any]:
        temperature, seed, positions, ids = rows
        return [one(x, temperature, seed, positions + i, ids) for i, x in enumerate(logits)]

    return jax.jit(all_copies).lower(*jax.eval_shape(case.arguments)).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--widths", type=int, nargs="+", default=[128_256, 32_000])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    found = []
    cases = [Case(*c) for c in itertools.product(options.rows, options.widths, (0.0, 1.0))]
    with ThreadPoolExecutor(8) as pool:
        jobs = {(case, way): pool.submit(compiled, way, case) for case in cases for way in WAYS}
        programs = {key: job.result() for key, job in jobs.items()}
    for case in cases:
        arguments = case.arguments()
        wanted = programs[case, "xla"](*arguments)[0]
        for way in WAYS:
            got = programs[case, way](*arguments)[0]
            differ = int(np.sum(np.asarray(got[1]) != np.asarray(wanted[1])))
            row: dict[str, Any] = {"rows": case.rows, "width": case.width}
            row |= {"temperature": case.temperature, "way": way, "columns_that_differ": differ}
            if not differ:
                took = seconds_per_call(programs[case, way], arguments, len(arguments[0]))
                row["microseconds"] = round(1e6 * took, 2)
            print(row, flush=True)
            found.append(row)
    write_result(options.out, {"rows": found})


if __name__ == "__main__":
    main()
