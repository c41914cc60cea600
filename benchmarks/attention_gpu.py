"""The Hopper attention kernel alone, at the sizes of Llama-3.1-8B: bandwidth by shape and tuning.

    python -m benchmarks.attention_gpu [--out benchmarks/results/attention_gpu.json]

One program is 32 calls in a row, as 32 layers are, each with a page table of its own; the tables
and further sets of them walk through a pool of gigabytes, so that nothing is in the L2 cache when
it is read again. Time is wall time of many such programs over the number of calls: it includes
packing the queries and merging the shares. Every configuration is compared with the reference
first and not timed when it is wrong. The default tuning is measured at all shapes first, then one
further tuning after the other until the time is up, so that a cut sweep is still a result.
Bytes are those of the keys and values that exist; the ceiling is what the card reads.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import write_result
from jspec.pallas_kernels.attention import reference
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu import attend_rows
from jspec.pallas_kernels.attention.gpu_plan import NUM_SMS
from jspec.pallas_kernels.attention.tuning import Tuning

READ_CEILING = 4.49e12  # bytes per second, measured on one H200
HEADS, GROUPS, WIDTH = 32, 8, 128
TOKEN_BYTES = 2 * GROUPS * WIDTH * 2
SCALE = WIDTH**-0.5

TUNINGS = (
    Tuning(),
    Tuning(stages=2),
    Tuning(loader="producer", consumers=2, stages=3),
    Tuning(block_tokens=128, stages=1),
    Tuning(loader="producer", consumers=1, stages=6),
    Tuning(consumers=2, stages=3),
    Tuning(block_tokens=128, stages=2),
    Tuning(splits=1),
    Tuning(splits=2),
    Tuning(splits=4),
    Tuning(splits=8),
    Tuning(splits=32),
    Tuning(weights="shared", stages=2),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one run measures."""

    batches: tuple[int, ...]
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    page_size: int
    calls: int  # of one program
    seconds: float  # for the whole sweep
    pool_tokens: int
    interpret: bool  # for a dry run on a machine without a GPU

    @property
    def width(self) -> int:
        """Pages of a table's row: the same at all contexts, so that one program serves them."""
        return -(-(max(self.contexts) + max(self.queries)) // self.page_size)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One shape's arguments, and the right answer for its first and last row."""

    batch: int
    queries: int
    context: int
    q: jax.Array
    tables: list[jax.Array]  # sets of [calls, B, pages]
    fields: dict[str, jax.Array]  # of AttentionMetadata, but the page table
    expected: dict[int, jax.Array]  # of the first set's first call, by row


class Clock:
    """Seconds since the start, against the time that the sweep may take."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = time.perf_counter(), seconds

    def spent(self) -> float:
        return time.perf_counter() - self.start

    def is_up(self) -> bool:
        return self.spent() > self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1168, 8192])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--pool-tokens", type=int, default=700_000, help="4 KiB each")
    parser.add_argument("--dry-run", action="store_true", help="interpret mode, tiny, no numbers")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention_gpu.json"))
    args = parser.parse_args()
    settings = Settings(
        batches=tuple(args.batches),
        queries=tuple(args.queries),
        contexts=tuple(args.contexts),
        page_size=args.page_size,
        calls=args.calls,
        seconds=args.seconds,
        pool_tokens=args.pool_tokens,
        interpret=args.dry_run,
    )
    results = sweep(settings)
    best = best_of(results)
    for row in best:
        print("best", describe_row(row), flush=True)
    write_result(args.out, {"settings": asdict(settings), "best": best, "all": results})


def sweep(settings: Settings) -> list[dict[str, Any]]:
    """All shapes under one tuning, then under the next, until the time is up."""
    clock = Clock(settings.seconds)
    pool = make_pool(settings)
    problems: dict[tuple[int, int, int], Problem] = {}
    results: list[dict[str, Any]] = []
    # Tracing holds Python's lock, XLA's compiler does not: one thread traces ahead, eight compile.
    with ThreadPoolExecutor(8) as compilers:
        for tuning in TUNINGS:
            if clock.is_up():
                print(f"out of time before {tuning}", flush=True)
                break
            programs = {
                shape: start_compiling(compilers, settings, pool, *shape, tuning)
                for shape in itertools.product(settings.batches, settings.queries)
                if is_worth_it(tuning, shape[0])
            }
            wait(programs.values())  # nothing else runs on the host while a program is timed
            for shape, context in itertools.product(programs, settings.contexts):
                key = (*shape, context)
                if clock.is_up():
                    continue
                if key not in problems:
                    problems[key] = make_problem(settings, pool, *key)
                row = measure(settings, pool, programs[shape], problems[key])
                row["tuning"] = asdict(tuning)
                results.append(row)
                print(f"{clock.spent():5.0f}s", describe_row(row), tuning, flush=True)
    return results


def is_worth_it(tuning: Tuning, batch: int) -> bool:
    """Not more shares than eight rounds of programs over the chip."""
    return batch * GROUPS * (tuning.splits or 1) <= 8 * NUM_SMS


def describe_row(row: dict[str, Any]) -> str:
    name = f"B={row['batch']} R={row['queries']} context={row['context']}"
    if "error" in row:
        return f"{name}: {row['error']}"
    return f"{name}: {row['ms']:.4f} ms, {row['TB/s']:.2f} TB/s, {row['of_ceiling']:.0%}"


def best_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest correct row of each shape."""
    best: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in results:
        key = (row["batch"], row["queries"], row["context"])
        if "ms" in row and (key not in best or row["ms"] < best[key]["ms"]):
            best[key] = row
    return [best[key] for key in sorted(best)]


def make_pool(settings: Settings) -> jax.Array:
    """Random K and V; page 0 is the dummy and holds NaN."""
    pages = settings.pool_tokens // settings.page_size + 1
    shape = (pages, settings.page_size, 2 * GROUPS, WIDTH)

    @jax.jit
    def make() -> jax.Array:
        pool = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        return pool.at[0].set(jnp.nan, mode="drop")

    pool: jax.Array = jax.block_until_ready(make())
    return pool


def make_tables(settings: Settings, batch: int, context: int, queries: int) -> list[jax.Array]:
    """Sets of `calls` page tables that together read more than the pool, or four sets."""
    used = -(-(context + queries) // settings.page_size)
    total = settings.pool_tokens // settings.page_size
    order = np.random.default_rng(0).permutation(total) + 1
    per_set = settings.calls * batch * used
    sets = max(1, min(-(-total // per_set), 4))
    tables = np.zeros((sets, settings.calls, batch, settings.width), np.int32)
    places = np.arange(sets * per_set).reshape(sets, settings.calls, batch, used)
    tables[..., :used] = order[places % total]
    return [jnp.asarray(table) for table in tables]


def make_fields(batch: int, queries: int, context: int) -> dict[str, jax.Array]:
    """Rows of one length whose new keys count among the context; a random tree when R > 1."""
    rng = np.random.default_rng(1)
    prefix = np.full(batch, context - queries, np.int32)
    positions = (prefix[:, None] + np.arange(queries)).astype(np.int32)
    fields = {
        "prefix_lens": prefix,
        "cu_q_lens": (np.arange(batch + 1) * queries).astype(np.int32),
        "q_positions": positions.reshape(-1),
    }
    if queries > 1:
        sees = np.tril(rng.random((batch, queries, queries)) < 0.5) | np.eye(queries, dtype=bool)
        words = (sees * (1 << np.arange(queries))).sum(axis=-1)
        fields["tail_mask"] = words.reshape(-1, 1).astype(np.uint32)
        fields["tail_positions"] = positions
    return {name: jnp.asarray(value) for name, value in fields.items()}


def start_compiling(
    compilers: ThreadPoolExecutor,
    settings: Settings,
    pool: jax.Array,
    batch: int,
    queries: int,
    tuning: Tuning,
) -> Future[Callable[..., Any]]:
    """A program of `calls` calls: (first result, last result)."""

    def run(
        q: jax.Array, pool: jax.Array, tables: jax.Array, fields: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        outs: list[jax.Array] = []
        for table in tables:
            # Each call waits for the one before it, as layers do.
            x = q + outs[-1] * jnp.asarray(1e-3, q.dtype) if outs else q
            rows = AttentionMetadata(page_table=table, **fields)
            outs.append(
                attend_rows(
                    x,
                    pool,
                    rows,
                    scale=SCALE,
                    queries_per_row=queries,
                    tuning=tuning,
                    interpret=settings.interpret,
                )
            )
        return outs[0], outs[-1]

    tables = jax.ShapeDtypeStruct((settings.calls, batch, settings.width), jnp.int32)
    q = jax.ShapeDtypeStruct((batch * queries, HEADS, WIDTH), jnp.bfloat16)
    fields = make_fields(batch, queries, min(settings.contexts))
    try:
        lowered = jax.jit(run).lower(q, pool, tables, fields)
    except Exception as error:  # a tuning that does not fit is a result, not the end
        failed: Future[Callable[..., Any]] = Future()
        failed.set_exception(error)
        return failed
    return compilers.submit(lowered.compile)


def make_problem(
    settings: Settings, pool: jax.Array, batch: int, queries: int, context: int
) -> Problem:
    fields = make_fields(batch, queries, context)
    tables = make_tables(settings, batch, context, queries)
    q = jax.random.normal(jax.random.key(2), (batch * queries, HEADS, WIDTH), jnp.bfloat16)
    expected = {}
    for b in {0, batch - 1}:
        at = slice(b * queries, (b + 1) * queries)
        one = {
            name: x[at] if x.shape[0] == batch * queries else x[b : b + 1]
            for name, x in fields.items()
            if name != "cu_q_lens"
        }
        rows = AttentionMetadata(
            page_table=tables[0][0, b : b + 1], cu_q_lens=fields["cu_q_lens"][:2], **one
        )
        expected[b] = attend_slowly(q[at], pool, rows)
    return Problem(
        batch=batch,
        queries=queries,
        context=context,
        q=q,
        tables=tables,
        fields=fields,
        expected=expected,
    )


@jax.jit
def attend_slowly(q: jax.Array, pool: jax.Array, rows: AttentionMetadata) -> jax.Array:
    """The reference, for one row."""
    return reference.attend(
        q,
        pool,
        rows,
        scale=SCALE,
        queries_per_row=q.shape[0],
        window=None,
        sinks=None,
        soft_cap=None,
    )


def measure(
    settings: Settings, pool: jax.Array, program: Future[Callable[..., Any]], problem: Problem
) -> dict[str, Any]:
    """Milliseconds of one call, or what went wrong."""
    row: dict[str, Any] = {
        "batch": problem.batch,
        "queries": problem.queries,
        "context": problem.context,
    }
    try:
        run = program.result()
        first, _ = run(problem.q, pool, problem.tables[0], problem.fields)
        row["largest_difference"] = difference(first, problem)
        if not row["largest_difference"] < 0.02:
            return {**row, "error": f"differs by {row['largest_difference']}: not timed"}
        seconds = time_program(run, pool, problem) / settings.calls
    except Exception as error:  # a tuning that does not fit is a result, not the end
        return {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    speed = problem.batch * problem.context * TOKEN_BYTES / seconds
    return {
        **row,
        "ms": round(seconds * 1e3, 5),
        "TB/s": round(speed / 1e12, 3),
        "of_ceiling": round(speed / READ_CEILING, 3),
    }


def difference(out: jax.Array, problem: Problem) -> float:
    """Largest distance to the reference; NaN if there is one."""
    worst = 0.0
    for b, expected in problem.expected.items():
        mine = out[b * problem.queries : (b + 1) * problem.queries].astype(jnp.float32)
        distance = jnp.max(jnp.abs(mine - expected.astype(jnp.float32)))
        worst = float(np.maximum(worst, distance))
    return worst


def time_program(run: Callable[..., Any], pool: jax.Array, problem: Problem) -> float:
    """Seconds of one program: the better of two rounds of at least 20 ms."""
    tables = problem.tables

    def round_of(count: int) -> float:
        start = time.perf_counter()
        out = None
        for i in range(count):
            out = run(problem.q, pool, tables[i % len(tables)], problem.fields)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / count

    one = round_of(len(tables))
    count = len(tables) * max(1, int(0.02 / (one * len(tables))))
    return min(round_of(count), round_of(count))


if __name__ == "__main__":
    main()
