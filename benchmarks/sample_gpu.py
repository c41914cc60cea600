"""Sampling over a vocabulary of 128,256 on a GPU: XLA's fusion against the fused kernel.

    python -m benchmarks.sample_gpu [--seconds 90] [--rows 1 64]

Rows are nodes: B x N. Each copy of the logits is sampled at positions of its own: with the same
ones for all, XLA makes the noise once, stores it and reads it back. Values and ids must equal XLA's
bit for bit before anything is timed.
Writes benchmarks/results/sample_gpu.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.environment import write_result
from benchmarks.gpu_timing import (
    READ_TB_S,
    measured_rows,
    num_copies,
    seconds_per_call,
    watched,
)
from jspec.pallas_kernels.sample.gpu import sample
from jspec.pallas_kernels.sample.reference import sample as sample_reference
from jspec.pallas_kernels.sample.tuning import SampleTuning

VOCABULARY = 128_256
ROWS = (1, 8, 64, 256, 1024)
TUNINGS = tuple(
    SampleTuning(chunk=chunk, num_warps=num_warps)
    for chunk, num_warps in (
        (2048, 4),
        (1024, 4),
        (1024, 2),
        (2048, 2),
        (4096, 4),
        (4096, 8),
        (8192, 8),
    )
)
RESULT = Path(__file__).parent / "results" / "sample_gpu.json"


@dataclass(frozen=True)
class Case:
    num_rows: int
    temperature: float
    filtered: bool
    tuning: SampleTuning | None  # None: XLA

    @property
    def key(self) -> str:
        kind = "xla" if self.tuning is None else f"{self.tuning.chunk}/{self.tuning.num_warps}"
        return f"{self.num_rows} T={self.temperature} filtered={self.filtered} {kind}"

    @property
    def copies(self) -> int:
        return num_copies(4 * self.num_rows * VOCABULARY)

    def one(self, logits: jax.Array, *rows: jax.Array) -> Any:
        least = rows if self.filtered else rows[:-1]
        if self.tuning is None:
            return sample_reference(logits, *least)
        return sample(logits, *least, tuning=self.tuning)

    def row_arrays(self) -> tuple[jax.Array, ...]:
        """temperature, seed, positions, threshold."""
        keys = jax.random.split(jax.random.key(7))
        count = self.num_rows
        return (
            jnp.full((count,), self.temperature, jnp.float32),
            jax.random.bits(keys[0], (count, 2), jnp.uint32),
            jax.random.randint(keys[1], (count,), 0, 8192, jnp.int32),
            jnp.full((count,), 3.0, jnp.float32),
        )


def cases(rows: list[int]) -> list[Case]:
    settings = ((0.0, False), (1.0, False), (1.0, True))
    tunings: tuple[SampleTuning | None, ...] = (None, *TUNINGS)
    return [Case(n, t, f, tuning) for tuning in tunings for n in rows for t, f in settings]


def compiled(case: Case) -> Any:
    one = jax.jit(case.one)
    logits = [jax.ShapeDtypeStruct((case.num_rows, VOCABULARY), jnp.float32)] * case.copies

    def all_copies(logits: list[jax.Array], rows: tuple[jax.Array, ...]) -> list[Any]:
        temperature, seed, positions, least = rows
        return [one(each, temperature, seed, positions + i, least) for i, each in enumerate(logits)]

    return jax.jit(all_copies).lower(logits, jax.eval_shape(case.row_arrays)).compile()


def measure(case: Case, program: Callable[[], Any], logits: dict[int, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"rows": case.num_rows, "tuning": repr(case.tuning)}
    try:
        run = program()
        if case.num_rows not in logits:
            logits.clear()
            keys = jax.random.split(jax.random.key(case.num_rows), case.copies)
            shape = (case.num_rows, VOCABULARY)
            logits[case.num_rows] = [3 * jax.random.normal(key, shape) for key in keys]
        arguments = (logits[case.num_rows], case.row_arrays())
        got = run(*arguments)[0]
        wanted = jax.jit(Case(case.num_rows, case.temperature, case.filtered, None).one)(
            arguments[0][0], *arguments[1]
        )
        unequal = [int(jnp.sum(a != b)) for a, b in zip(got, wanted, strict=True)]
        if unequal[1]:
            return row | {"error": f"{unequal[1]} of {case.num_rows} ids differ"}
        seconds = seconds_per_call(run, arguments, case.copies)
    except Exception as failure:  # any candidate may fail in any way; the rest must go on
        return row | {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}
    read = 4 * case.num_rows * VOCABULARY / seconds / 1e12
    return row | {
        "microseconds": seconds * 1e6,
        "values_that_differ": unequal[0],
        "tb_s": read,
        "of_read_ceiling": read / READ_TB_S,
    }


def work(arguments: argparse.Namespace) -> None:
    by_key = {case.key: case for case in cases(arguments.rows)}
    logits: dict[int, Any] = {}
    measured_rows(
        [(key, partial(compiled, case)) for key, case in by_key.items()],
        lambda key, program: measure(by_key[key], program, logits),
        done=arguments.worker,
        deadline=time.monotonic() + arguments.seconds,
        wave=30,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    passed = ["--rows", *map(str, arguments.rows)]
    rows = watched("benchmarks.sample_gpu", passed, seconds=arguments.seconds)
    for row in sorted(rows, key=lambda row: row["key"]):
        print(f"{row['key']:>50}: {row.get('microseconds', row.get('error'))}")
    write_result(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
