"""Candidates for the products of a dense layer with fp8 weights, beside XLA's in bf16 and fp8.

    python -m benchmarks.fp8_products_gpu [--shapes out down] [--tokens 1 16 64] [--out FILE]

Llama-3.1-8B's four products, and gate and up with SiLU, with column-major weights and scales per
channel or per block. A program multiplies several sets of tokens by several weights in turn, more
than the L2 cache holds. Tokens of a kernel are quantised beforehand unless its name says `bf16`;
`quantise` times that by itself. Everything is compiled first, on all cores, and nothing is
measured beside it. A candidate that fails or hangs says so, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.environment import write_result
from benchmarks.timing import FLOPS_PER_SECOND, L2_BYTES, READ_BYTES_PER_SECOND, seconds_per_run
from jspec.device.fp8 import BLOCK, FP8Weight
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.fp8_product import gpu, gpu_few, reference
from jspec.pallas_kernels.fp8_product.tuning import (
    DEPTH,
    PADDED_TOKENS,
    FewTuning,
    ProductTuning,
    deepest,
    fullest,
)
from jspec.pallas_kernels.gated_mlp.reference import gated
from jspec.pallas_kernels.gated_mlp.tuning import LANES, Shared

SHAPES = {
    "out": (4096, 4096),
    "down": (14336, 4096),
    "qkv": (4096, 6144),
    "gate_up": (4096, 28672),
    "gated": (4096, 28672),
}
TOKENS = (1, 8, 64, 256, 16, 4096, 128, 512, 4, 32)  # what is asked first comes first
TUNED = (1, 8, 64, 256)  # with every candidate; others with the first of each kind
SETS = 4  # of tokens: one product each with every weight
RESULT = Path(__file__).parent / "results" / "fp8_products_gpu.json"
QUANTISE = "quantise"  # the candidate without a product
BROKEN = 3  # the status of a process whose device failed
PATIENCE, GRACE = 25.0, 15.0  # seconds for one measurement, and to end after the deadline
TOLERANCE = 0.02  # of the largest result


@dataclass(frozen=True)
class Job:
    """A candidate. run: (tokens, weight) -> result; both as `tokens` and `weight` make them."""

    shape: str
    m: int
    form: str  # "bf16", "channel" or "blocks": of the weights
    name: str
    run: Callable[[Any, Any], Any]
    quantised: bool = False

    @property
    def is_gated(self) -> bool:
        return self.shape == "gated"

    @property
    def floor(self) -> float:
        k, n = SHAPES[self.shape]
        each, rate = (2, FLOPS_PER_SECOND) if self.form == "bf16" else (1, 2 * FLOPS_PER_SECOND)
        return max(each * k * n / READ_BYTES_PER_SECOND, 2 * self.m * k * n / rate)


def activated(product: jax.Array) -> jax.Array:
    halves = jnp.split(product.astype(jnp.float32), 2, axis=-1)
    return gated(*halves).astype(product.dtype)


def xla(x: jax.Array, w: Any, *, is_gated: bool) -> jax.Array:
    """XLA's product, with the quantisation for fp8 weights."""
    is_fp8 = isinstance(w, FP8Weight)
    out = reference.fp8_product(x, w, out_dtype=jnp.bfloat16) if is_fp8 else x @ w
    return activated(out) if is_gated else out


def xla_quantised(x: Any, w: FP8Weight, *, is_gated: bool) -> jax.Array:
    """XLA's product of quantised tokens, for a scale per channel."""
    sums = jax.lax.dot(x.codes[: x.num], w.codes, preferred_element_type=jnp.float32)
    out = (sums * x.scales[0, : x.num, None] * w.scales).astype(jnp.bfloat16)
    return activated(out) if is_gated else out


def kernel(x: Any, w: FP8Weight, *, tuning: Any, is_gated: bool) -> jax.Array:
    module = gpu_few.few_product if isinstance(tuning, FewTuning) else gpu.product
    found: jax.Array = module(x, w, tuning=tuning, is_gated=is_gated)
    return found


def quantised(x: jax.Array, w: None, *, by_blocks: bool) -> gpu_few.QuantisedTokens:
    del w
    return gpu_few.quantise(x, by_blocks=by_blocks)


def few_candidates(m: int) -> Iterator[tuple[str, FewTuning, bool]]:
    """(name, tuning, tokens are quantised)."""
    one = FewTuning(tile_n=4, tile_k=2048, num_warps=8, by_lanes=True)
    if m == 1:
        yield "one 4x2048 w8", one, False
        yield "one 8x2048 w8", replace(one, tile_n=8), False
        yield "one 4x1024 w4", replace(one, tile_k=1024, num_warps=4), False
        yield "one 8x1024 w4", replace(one, tile_n=8, tile_k=1024, num_warps=4), False
    if m > 32:
        return
    lanes = 16 if m <= 16 else 32
    tiles = ((32, 256, 5), (64, 128, 5), (32, 512, 4), (16, 512, 4))
    for tile_n, tile_k, stages in tiles[: 1 if m == 1 else None]:
        tuning = FewTuning(
            tile_n=tile_n, tile_k=tile_k, num_warps=4, num_stages=stages, num_lanes=lanes
        )
        name = f"few {tile_n}x{tile_k} s{stages}"
        yield name, tuning, True
        if tile_k <= 256 and m <= 16:
            yield name, tuning, False


def ring_candidates(
    m: int, n: int, halves: int, by_blocks: bool
) -> Iterator[tuple[str, ProductTuning]]:
    of_form: dict[str, Any] = {"halves": halves, "by_blocks": by_blocks}
    deep = partial(deepest, m=m, halves=halves)
    if m <= LANES:
        strip = fullest(m, n, tile_m=LANES, **of_form)
        base = ProductTuning(tile_n=strip, tile_k=2 * DEPTH)
        yield "ring", deep(base)
        if m >= 16:
            yield "ring cluster2", deep(replace(base, cluster=2))
            yield "ring cluster4", deep(replace(base, cluster=4))
        yield "ring k128", deep(replace(base, tile_k=DEPTH))
        yield "ring k512", deep(replace(base, tile_k=4 * DEPTH))
        yield "ring alone", deep(replace(base, early_release=False, early_start=False))
        if not by_blocks:
            yield "ring promotes", deep(replace(base, promotes=True))
        for other in (32, 56, 64, 112):
            if other != strip and n // halves % other == 0:
                yield f"ring n{other}", deep(replace(base, tile_n=other))
        return
    best = fullest(m, n, tile_m=2 * LANES, **of_form)
    widest = (DEPTH if by_blocks else 2 * DEPTH) // halves
    base = ProductTuning(tile_m=2 * LANES, num_consumers=2, tile_n=best)
    for tile_n in dict.fromkeys((best, widest, widest // 2)):
        if n // halves % tile_n:
            continue
        tuning = replace(base, tile_n=tile_n)
        yield f"ring n{tile_n}", deep(tuning)
        if m > 2 * LANES:
            yield f"ring n{tile_n} pairs", deep(replace(tuning, cluster=2, shared=Shared.WEIGHTS))
        if m <= 512:
            yield f"ring n{tile_n} tokens2", deep(replace(tuning, cluster=2))
        if m <= 2 * LANES:
            yield f"ring n{tile_n} tokens4", deep(replace(tuning, cluster=4))


def jobs_of(shape: str, m: int) -> Iterator[Job]:
    (k, n), is_gated = SHAPES[shape], shape == "gated"
    make = partial(Job, shape, m)
    yield make("bf16", "xla", partial(xla, is_gated=is_gated))
    for form in ("channel", "blocks"):
        by_blocks = form == "blocks"
        how: dict[str, Any] = {"halves": 2 if is_gated else 1, "by_blocks": by_blocks}
        is_tuned = m in TUNED and shape in (("out",) if by_blocks else ("out", "down", "gated"))
        if (is_tuned and not by_blocks) or (m in (1, 4096) and shape == "out"):
            yield make(form, "xla with quantise", partial(xla, is_gated=is_gated))
        if not by_blocks:
            yield make(form, "xla", partial(xla_quantised, is_gated=is_gated), quantised=True)
        for name, few, takes_codes in islice(few_candidates(m), None if is_tuned else 2):
            if few.problem(m, k, n, **how) is None:
                run = partial(kernel, tuning=few, is_gated=is_gated)
                yield make(
                    form, name + ("" if takes_codes else " bf16"), run, quantised=takes_codes
                )
        for name, ring in islice(ring_candidates(m, n, **how), None if is_tuned else 3):
            label = f"{name} [{ring.tile_m}x{ring.tile_n}x{ring.tile_k} s{ring.num_stages}]"
            if ring.problem(m, k, n, **how) is None:
                run = partial(kernel, tuning=ring, is_gated=is_gated)
                yield make(form, label, run, quantised=True)
        if shape in ("out", "down"):
            yield make(form, QUANTISE, partial(quantised, by_blocks=by_blocks))


@cache
def weights(shape: str, form: str) -> list[Any]:
    """As [N, K] and scales, on the device, for more bytes than the L2 cache has."""
    k, n = SHAPES[shape]
    size = k * n * (2 if form == "bf16" else 1)
    copies = max(2, -(-3 * L2_BYTES // size))
    return [_weight(jax.random.key(i), k, n, form) for i in range(copies)]


@partial(jax.jit, static_argnums=(1, 2, 3))
def _weight(key: jax.Array, k: int, n: int, form: str) -> Any:
    numbers = jax.random.normal(key, (n, k), jnp.bfloat16)
    if form == "bf16":
        return numbers * jnp.bfloat16(k**-0.5)
    size = (-(-k // BLOCK), -(-n // BLOCK)) if form == "blocks" else (n,)
    scales = jax.random.uniform(key, size, minval=0.5, maxval=2.0) * k**-0.5 / 64
    return (numbers * 64).astype(reference.E4M3), scales


def as_weight(stored: Any) -> Any:
    if isinstance(stored, tuple) and not stored:
        return None
    if isinstance(stored, tuple):
        return FP8Weight(codes=stored[0].T, scales=stored[1])
    return stored.T


@cache
def tokens(k: int, m: int, count: int = SETS) -> list[jax.Array]:
    keys = [jax.random.key(100 + i) for i in range(count)]
    return [jax.random.normal(key, (m, k), jnp.bfloat16) for key in keys]


@cache
def quantised_tokens(k: int, m: int, by_blocks: bool) -> list[Any]:
    return [_quantised(x, BLOCK if by_blocks else None) for x in tokens(k, m)]


@partial(jax.jit, static_argnums=1)
def _quantised(x: jax.Array, block: int | None) -> gpu_few.QuantisedTokens:
    """As gpu_few.quantise lays them out, by XLA: no candidate depends on another."""
    num = x.shape[0]
    codes, scales = reference.quantise(x, block)
    return gpu_few.QuantisedTokens(
        codes=jnp.pad(codes, ((0, -num % 8), (0, 0))),
        scales=jnp.pad(scales.T, ((0, 0), (0, -num % PADDED_TOKENS))),
        num=num,
    )


def arguments(job: Job) -> tuple[list[Any], list[Any]]:
    k, _ = SHAPES[job.shape]
    if job.name == QUANTISE:  # short, so there are many
        return tokens(k, job.m, SETS if job.m > 512 else 10 * SETS), [()]
    found = weights("gate_up" if job.is_gated else job.shape, job.form)
    sets = quantised_tokens(k, job.m, job.form == "blocks") if job.quantised else tokens(k, job.m)
    return (sets[:1] if job.m > 512 else sets), found


def compiled(job: Job, shapes: Any) -> Any:
    one = jax.jit(job.run, inline=False)  # lowered once

    def call(x: Any, stored: Any) -> Any:
        if job.name.startswith("xla"):  # else XLA would join products of the same tokens
            x, stored = jax.lax.optimization_barrier((x, stored))
        return one(x, as_weight(stored))

    def program(sets: list[Any], stored: list[Any]) -> list[Any]:
        return [call(x, w) for x in sets for w in stored]

    tokens_of_step = job.m if job.m <= 512 else None
    options = OPS["gpu"].compiler_options(decode_tokens=tokens_of_step)
    return jax.jit(program).lower(*shapes).compile(compiler_options=options or None)


def error_of(job: Job, found: Any) -> float:
    """Largest difference to the reference, as a share of its largest value."""
    if job.name == QUANTISE:
        k, by_blocks = SHAPES[job.shape][0], job.form == "blocks"
        mine, right = (
            numbers_of(tokens) for tokens in (found, quantised_tokens(k, job.m, by_blocks)[0])
        )
    else:
        mine, right = found, wanted(job.shape, job.form, job.m)
    difference = jnp.abs(mine.astype(jnp.float32) - right.astype(jnp.float32))
    return float(jnp.max(difference) / jnp.max(jnp.abs(right.astype(jnp.float32))))


def numbers_of(tokens: gpu_few.QuantisedTokens) -> jax.Array:
    codes = tokens.codes[: tokens.num].astype(jnp.float32)
    scales = tokens.scales[:, : tokens.num].T
    numbers: jax.Array = codes * scales.repeat(codes.shape[1] // scales.shape[1], axis=1)
    return numbers


@cache
def wanted(shape: str, form: str, m: int) -> jax.Array:
    """The first result: that of dense float32 numbers and the reference's tokens."""
    k, _ = SHAPES[shape]
    stored = weights("gate_up" if shape == "gated" else shape, form)[0]
    found: jax.Array = _wanted(tokens(k, m)[0], stored, shape == "gated")
    return found


@partial(jax.jit, static_argnums=2)
def _wanted(x: jax.Array, stored: Any, is_gated: bool) -> jax.Array:
    w = as_weight(stored)
    if not isinstance(w, FP8Weight):
        return xla(x, w, is_gated=is_gated)
    codes, scales = reference.quantise(x, w.block)
    of_each = scales.repeat(w.block, axis=-1) if w.block else scales
    numbers = codes.astype(jnp.float32) * of_each
    out = jnp.matmul(numbers, w.dense(jnp.float32), precision="highest").astype(jnp.bfloat16)
    return activated(out) if is_gated else out


def measured(job: Job, program: Any) -> dict[str, Any]:
    sets, stored = arguments(job)
    first = program(sets, stored)[0]
    row: dict[str, Any] = {}
    if job.form != "bf16":
        row["error"] = float(f"{error_of(job, first):.3g}")
        if not row["error"] <= TOLERANCE:
            row["failed"] = f"differs by {row['error']:.3g}"
    seconds = seconds_per_run(lambda: program(sets, stored), samples=3)
    seconds /= len(sets) * len(stored)
    k, n = SHAPES[job.shape]
    size = k * n * (2 if job.form == "bf16" else 1)
    row["microseconds"] = round(1e6 * seconds, 2)
    if job.name != QUANTISE:
        row |= {
            "gigabytes_per_second": round(size / seconds / 1e9),
            "share_of_floor": round(job.floor / seconds, 3),
        }
    return row


def described(row: dict[str, Any]) -> str:
    name = f"{row['shape']:8}{row['m']:5} {row['form']:8}{row['name']:38}"
    if "microseconds" not in row:
        return f"{name} {row['failed']}"
    rate, share = row.get("gigabytes_per_second", 0), row.get("share_of_floor", 0)
    rest = f"{rate:6} GB/s {share:6.1%} of the floor, error {row.get('error', 0):.2g}"
    return f"{name} {row['microseconds']:9.2f} us {rest} {row.get('failed', '')}"


def failure(error: Exception) -> str:
    return " | ".join([type(error).__name__, *str(error).splitlines()[:3]])[:400]


def shapes_of(jobs: list[Job]) -> list[Any]:
    """Make the arguments of all jobs, each once, on the main thread; return their shapes."""

    def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return [jax.tree.map(abstract, arguments(job)) for job in jobs]


def measure_from(first: int, jobs: list[Job], journal: Path, *, deadline: float) -> int:
    """Write a line to the journal before and after each job, from the first on. Return a status.

    A round for each count of tokens is compiled before it is measured: if time ends, those that
    came first have all their figures.
    """
    threads = max(2, (os.cpu_count() or 4) - 2)
    started = time.monotonic()
    with ThreadPoolExecutor(threads) as pool, journal.open("a", encoding="utf-8") as lines:

        def write(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=lines, flush=True)

        for m, group in groupby(list(enumerate(jobs))[first:], key=lambda each: each[1].m):
            if time.time() > deadline:
                return 0
            of_round = list(group)
            shapes = shapes_of([job for _, job in of_round])
            futures = [
                pool.submit(compiled, job, of_job)
                for (_, job), of_job in zip(of_round, shapes, strict=True)
            ]
            for future in futures:
                future.exception()  # waits: nothing is measured beside a compilation
            print(f"-- {m} tokens, compiled by {time.monotonic() - started:.0f} s", flush=True)
            for (index, job), future in zip(of_round, futures, strict=True):
                if time.time() > deadline:
                    return 0
                write({"index": index})
                row = identity(job)
                try:
                    row |= measured(job, future.result())
                except Exception as error:  # a candidate may fail in any way
                    row["failed"] = failure(error)
                write({"index": index, "row": row})
                print(described(row), flush=True)
                if "CUDA_ERROR" in row.get("failed", ""):
                    return BROKEN
            for made in (tokens, quantised_tokens, wanted):
                made.cache_clear()
    return 0


def identity(job: Job) -> dict[str, Any]:
    return {"shape": job.shape, "m": job.m, "form": job.form, "name": job.name}


def entries_of(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]


def survive(argv: list[str], jobs: list[Job], out: Path, *, deadline: float) -> list[Any]:
    """Measure in a process of its own, and start another after a job that breaks or stops it."""
    journal = out.with_suffix(".journal")
    journal.parent.mkdir(parents=True, exist_ok=True)
    journal.write_text("", encoding="utf-8")
    first = 0
    while first < len(jobs) and time.time() < deadline:
        command = [sys.executable, "-m", "benchmarks.fp8_products_gpu", *argv]
        worker = subprocess.Popen([*command, "--first", str(first), "--until", str(deadline)])
        while worker.poll() is None:
            time.sleep(0.5)
            entries = entries_of(journal)
            is_inside = bool(entries) and "row" not in entries[-1]
            silent = time.time() - journal.stat().st_mtime
            if (is_inside and silent > PATIENCE) or time.time() > deadline + GRACE:
                worker.kill()
                worker.wait()
        entries = entries_of(journal)
        if entries and "row" not in entries[-1]:
            index = entries[-1]["index"]
            row = identity(jobs[index]) | {"failed": f"ended or stopped its process, {first}"}
            with journal.open("a", encoding="utf-8") as lines:
                print(json.dumps({"index": index, "row": row}), file=lines)
            print(described(row), flush=True)
        elif worker.returncode != BROKEN:
            break
        first = entries[-1]["index"] + 1
    rows = [entry["row"] for entry in entries_of(journal) if "row" in entry]
    journal.unlink()
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--only", default="", help="of candidates whose name contains this")
    parser.add_argument("--seconds", type=float, default=125.0, help="nothing starts after this")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--first", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    given = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(given)
    jobs = [
        job
        for m in options.tokens
        for shape in options.shapes
        for job in jobs_of(shape, m)
        if options.only in job.name
    ]
    if options.first is not None:
        journal = options.out.with_suffix(".journal")
        return measure_from(options.first, jobs, journal, deadline=options.until)
    started = time.time()
    rows = survive(given, jobs, options.out, deadline=started + options.seconds)
    write_result(options.out, {"rows": rows})
    print(f"{len(rows)} of {len(jobs)} in {time.time() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
