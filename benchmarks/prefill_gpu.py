"""The packed Hopper kernel alone, at the sizes of Llama-3.1-8B: its rate by chunk and tuning.

    python -m benchmarks.prefill_gpu [--page-size 64] [--out benchmarks/results/prefill_gpu.json]

Chunks are what a server dispatches: one prompt of 1,024 tokens, one of 8,192 whole and as four
chunks of 2,048 on what came before, and prompts of 1,024 packed two by two. One program is 8 calls
in a row, as layers are, each over pages of its own and on the result of the one before; they share
one plan, as a step's layers do, and its cost is part of the time. Every chunk is compared with the
reference at 64 of its queries first and not timed when it is wrong. FLOPs are those of the keys
that a query sees (4 x keys x heads x head_dim); the ceiling is what the card multiplies. A process
of its own runs the candidates, so that one which hangs is ended.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import write_result
from benchmarks.gpu_timing import MATRIX_TFLOP_S, measured_rows, seconds_per_call, watched
from jspec.pallas_kernels.attention import reference
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.prefill.gpu import attend_packed
from jspec.pallas_kernels.prefill.gpu_plan import plan_prefill
from jspec.pallas_kernels.prefill.tuning import Tuning

HEADS, GROUPS, WIDTH = 32, 8, 128
SCALE = WIDTH**-0.5
CALLS = 8
SAMPLES = 64  # queries that are compared, at most
RESULT = Path(__file__).parent / "results" / "prefill_gpu.json"

TUNINGS = (
    Tuning(),
    Tuning(takes_turns=False),
    Tuning(block_tokens=64, stages=6),
    Tuning(stages=2),
    Tuning(block_tokens=64, stages=4, consumers=3),
    Tuning(programs=1 << 20),  # a program for each task
)


@dataclass(frozen=True)
class Chunk:
    """One call: rows of `length` new tokens, each on `prefix` older ones."""

    name: str
    num_rows: int
    length: int
    prefix: int = 0

    @property
    def num_queries(self) -> int:
        return self.num_rows * self.length

    @property
    def flops(self) -> float:
        seen = self.num_rows * (self.length * self.prefix + self.length * (self.length + 1) / 2)
        return 4 * seen * HEADS * WIDTH


CHUNKS = (
    Chunk("1 x 1,024", 1, 1024),
    Chunk("2 of 64 x 1,024", 2, 1024),
    Chunk("1 x 8,192", 1, 8192),
    *(Chunk(f"2,048 of 1 x 8,192, from {p:,}", 1, 2048, p) for p in (0, 2048, 4096, 6144)),
)
DRY_CHUNKS = (Chunk("dry, 2 x 12 on 70", 2, 12, 70),)
DRY_TUNINGS = (Tuning(programs=4),)


@dataclass(frozen=True)
class Case:
    chunk: Chunk
    tuning: Tuning
    page_size: int
    interpret: bool = False

    @property
    def key(self) -> str:
        return f"{self.chunk.name} | {self.tuning}"

    @property
    def calls(self) -> int:
        return 1 if self.interpret else CALLS

    @property
    def pages(self) -> int:
        """Of one row."""
        return -(-(self.chunk.prefix + self.chunk.length) // self.page_size)

    def tables(self) -> jax.Array:
        """i32[calls, B, P], no page twice."""
        shape = (self.calls, self.chunk.num_rows, self.pages)
        order = np.random.default_rng(0).permutation(int(np.prod(shape))) + 1
        return jnp.asarray(order.reshape(shape), jnp.int32)

    def rows(self, table: jax.Array) -> AttentionMetadata:
        chunk = self.chunk
        positions = chunk.prefix + jnp.arange(chunk.length, dtype=jnp.int32)
        return AttentionMetadata(
            page_table=table,
            prefix_lens=jnp.full(chunk.num_rows, chunk.prefix, jnp.int32),
            cu_q_lens=jnp.arange(chunk.num_rows + 1, dtype=jnp.int32) * chunk.length,
            q_positions=jnp.tile(positions, chunk.num_rows),
        )

    def run(self, q: jax.Array, pool: jax.Array, tables: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Results of the first call and of the last."""
        plan = plan_prefill(
            self.rows(tables[0]),
            self.chunk.num_queries,
            group=HEADS // GROUPS,
            page_size=self.page_size,
            window=None,
            block_tokens=self.tuning.block_tokens,
            consumers=self.tuning.consumers,
        )
        outs = [q]
        for table in tables:
            out = attend_packed(
                outs[-1],
                pool,
                self.rows(table),
                scale=SCALE,
                tuning=self.tuning,
                plan=plan,
                interpret=self.interpret,
            )
            outs.append(out)
        return outs[1], outs[-1]


def compiled(case: Case) -> Any:
    shapes = jax.eval_shape(partial(operands, case.chunk, case.page_size, case.calls))
    return jax.jit(case.run).lower(*shapes, jax.eval_shape(case.tables)).compile()


def operands(chunk: Chunk, page_size: int, calls: int) -> tuple[jax.Array, jax.Array]:
    """q, and a pool that is random but for page 0: that is the dummy and holds NaN."""
    keys = jax.random.split(jax.random.key(0))
    pages = calls * chunk.num_rows * -(-(chunk.prefix + chunk.length) // page_size) + 1
    q = jax.random.normal(keys[0], (chunk.num_queries, HEADS, WIDTH), jnp.bfloat16)
    pool = jax.random.normal(keys[1], (pages, page_size, 2 * GROUPS, WIDTH), jnp.bfloat16)
    return q, pool.at[0].set(jnp.nan, mode="drop")


@cache
def problem(case: Case) -> tuple[tuple[jax.Array, ...], np.ndarray, jax.Array]:
    """(arguments, queries that are compared, what they must be), of any tuning."""
    chunk = case.chunk
    make = jax.jit(partial(operands, chunk, case.page_size, case.calls))
    arguments = (*make(), case.tables())
    q, pool, tables = arguments
    drawn = np.random.default_rng(1).choice(chunk.num_queries, min(SAMPLES, chunk.num_queries))
    edges = np.arange(chunk.num_rows) * chunk.length
    sample = np.unique(np.concatenate([drawn, edges, edges + chunk.length - 1]))
    expected = [attend_one(q[t], pool, tables[0, t // chunk.length], case, t) for t in sample]
    return arguments, sample, jnp.stack(expected)


def attend_one(q: jax.Array, pool: jax.Array, table: jax.Array, case: Case, t: int) -> jax.Array:
    """The reference, for query t."""
    slot = jnp.asarray([case.chunk.prefix + t % case.chunk.length], jnp.int32)
    return _reference(q[None], pool, table[None], slot)[0]


@jax.jit
def _reference(q: jax.Array, pool: jax.Array, table: jax.Array, slot: jax.Array) -> jax.Array:
    rows = AttentionMetadata(
        page_table=table, prefix_lens=slot, cu_q_lens=jnp.arange(2), q_positions=slot
    )
    return reference.attend(
        q, pool, rows, scale=SCALE, queries_per_row=1, window=None, sinks=None, soft_cap=None
    )


def measure(case: Case, program: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of one call and its share of the ceiling, or what went wrong."""
    row: dict[str, Any] = {"chunk": case.chunk.name, "tuning": asdict(case.tuning)}
    try:
        run = program()
        arguments, sample, expected = problem(
            Case(case.chunk, Tuning(), case.page_size, case.interpret)
        )
        first, _ = run(*arguments)
        distance = jnp.abs(first[sample].astype(jnp.float32) - expected.astype(jnp.float32))
        row["largest_difference"] = float(jnp.max(distance))
        if not row["largest_difference"] < 0.03:
            return row | {"error": f"differs by {row['largest_difference']}: not timed"}
        if case.interpret:
            return row
        seconds = seconds_per_call(run, arguments, case.calls)
    except Exception as failure:  # any candidate may fail in any way; the rest must go on
        return row | {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}
    rate = case.chunk.flops / seconds / 1e12
    return row | {"ms": seconds * 1e3, "tflop_s": rate, "of_ceiling": rate / MATRIX_TFLOP_S}


def work(arguments: argparse.Namespace) -> None:
    dry = arguments.dry_run
    cases = [
        Case(chunk, tuning, arguments.page_size, dry)
        for tuning in (DRY_TUNINGS if dry else TUNINGS)
        for chunk in (DRY_CHUNKS if dry else CHUNKS)
    ]
    by_key = {case.key: case for case in cases}
    measured_rows(
        [(key, partial(compiled, case)) for key, case in by_key.items()],
        lambda key, program: measure(by_key[key], program),
        done=arguments.worker,
        deadline=time.monotonic() + arguments.seconds,
        wave=len(CHUNKS),
    )


def describe_row(row: dict[str, Any]) -> str:
    if "ms" not in row:
        return f"{row['key']}: {row.get('error', 'right, not timed')}"
    return (
        f"{row['key']}: {row['ms']:.4f} ms, {row['tflop_s']:.0f} TFLOP/s, {row['of_ceiling']:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--dry-run", action="store_true", help="interpret mode, tiny, no numbers")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    passed = ["--page-size", str(arguments.page_size)]
    passed += ["--dry-run"] if arguments.dry_run else []
    rows = watched("benchmarks.prefill_gpu", passed, seconds=arguments.seconds)
    for row in sorted(rows, key=lambda row: row["key"]):
        print(describe_row(row))
    write_result(arguments.out, {"page_size": arguments.page_size, "rows": rows})


if __name__ == "__main__":
    main()
