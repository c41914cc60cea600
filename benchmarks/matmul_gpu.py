"""Matrix products of Llama-3.1-8B on a Hopper GPU: XLA's against every candidate's.

    python -m benchmarks.matmul_gpu [--seconds 230] [--tokens 1 8 64] [--shapes qkv o]

Each program is checked against XLA's float32 product before it is timed. Weights rotate through
copies that together are far larger than the L2 cache. Candidates are timed by rank, all shapes'
first ones first, until the time is up; one that fails, faults or hangs is named and left behind.
Writes benchmarks/results/matmul_gpu.json and prints the entries for tuning.MEASURED.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.environment import write_result
from benchmarks.gpu_timing import (
    MATRIX_TFLOP_S,
    READ_TB_S,
    measured_rows,
    num_copies,
    seconds_per_call,
    watched,
)
from jspec.pallas_kernels.matmul_gpu import pack_weights, tuned_matmul
from jspec.pallas_kernels.tuning import (
    Layout,
    MatmulTuning,
    stream_candidates,
    tile_candidates,
)

SHAPES = {
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
    "lm_head": (4096, 128256),
    "draft_fc": (12288, 4096),
    "draft_qkv": (8192, 6144),
    "draft_lm_head": (4096, 32000),
}
LAYER = ("qkv", "o", "gate_up", "down")
TOKENS = (1, 4, 8, 16, 64, 128, 256, 512, 1024)
WORST = 0.01  # largest error, as a share of the largest value, that bf16 rounding explains
RESULT = Path(__file__).parent / "results" / "matmul_gpu.json"


@dataclass(frozen=True)
class Case:
    """One program at one shape: XLA's where tuning is None."""

    m: int
    shape: str
    tuning: MatmulTuning | None = None
    layout: Layout = Layout.IN_OUT  # of XLA's weights

    @property
    def key(self) -> str:
        if self.tuning is None:
            return f"{self.m} {self.shape} xla {self.layout.value}"
        values = asdict(self.tuning) | {
            "rows": self.tuning.rows.value,
            "layout": self.tuning.layout.value,
        }
        return f"{self.m} {self.shape} {' '.join(map(str, values.values()))}"

    def product(self, x: jax.Array, w: jax.Array) -> jax.Array:
        if self.tuning is not None:
            return tuned_matmul(x, w, tuning=self.tuning)
        return x @ (w.T if self.layout is Layout.OUT_IN else w)

    @property
    def storage(self) -> tuple[Layout, int, int]:
        """Which stored form of the weights it reads."""
        if self.tuning is None:
            return self.layout, 0, 0
        tiled = self.tuning.layout is Layout.TILED
        tile = (self.tuning.tile_k, self.tuning.tile_n) if tiled else (0, 0)
        return (self.tuning.layout, *tile)


def cases(tokens: list[int], shapes: list[str]) -> tuple[list[Case], list[Case]]:
    """XLA's programs, and the candidates by rank."""
    problems = [(m, shape) for m in tokens for shape in shapes]
    baselines = [
        Case(m, shape, layout=layout)
        for layout in (Layout.IN_OUT, Layout.OUT_IN)
        for m, shape in problems
        if layout is Layout.IN_OUT or m in (1, 16, 64, 1024)
    ]
    columns = zip_longest(*([Case(m, s, t) for t in ranked(m, *SHAPES[s])] for m, s in problems))
    return baselines, [case for rank in columns for case in rank if case is not None]


def ranked(m: int, k: int, n: int) -> Iterator[MatmulTuning]:
    """Tile shapes in the stored layout first; then what the first one gains by other layouts and
    by an early start; then the other tile shapes."""
    first, *others = stream_candidates(m, k, n) if m <= 16 else tile_candidates(m, k, n)
    if m in (1, 4):  # the program of M = 8 with fewer rows: two are enough
        others = others[:1]
    yield first
    yield from others[:1]
    yield replace(first, layout=Layout.TILED)
    if m <= 16:
        yield replace(first, early_start=True)
    yield from others[1:3]
    yield replace(first, layout=Layout.OUT_IN)
    yield from others[3:]


@dataclass
class Data:
    """Operands on the device, made once and shared by all cases."""

    stored: dict[tuple[str, tuple[Layout, int, int]], list[jax.Array]] = field(default_factory=dict)

    def weights(self, shape: str, storage: tuple[Layout, int, int]) -> list[jax.Array]:
        if (shape, storage) not in self.stored:
            layout, tile_k, tile_n = storage
            k, n = SHAPES[shape]
            if layout is Layout.IN_OUT:
                keys = jax.random.split(jax.random.key(k + n), num_copies(2 * k * n))
                made = [_normal(key, (k, n)) for key in keys]
            else:
                made = [_packed(w, layout, tile_k, tile_n) for w in self.weights(shape, _PLAIN)]
            self.stored[shape, storage] = made
        return self.stored[shape, storage]

    @cache  # noqa: B019 - one Data lives as long as the process
    def tokens(self, m: int, shape: str) -> list[jax.Array]:
        """One x a copy of the weights: XLA merges products that share an operand."""
        k, n = SHAPES[shape]
        keys = jax.random.split(jax.random.key(m), num_copies(2 * k * n))
        return [_normal(key, (m, k)) for key in keys]

    @cache  # noqa: B019
    def wanted(self, m: int, shape: str) -> jax.Array:
        x, w = self.tokens(m, shape)[0], self.weights(shape, _PLAIN)[0]
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    def __hash__(self) -> int:
        return id(self)


_PLAIN = (Layout.IN_OUT, 0, 0)


def _normal(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _packed(w: jax.Array, layout: Layout, tile_k: int, tile_n: int) -> jax.Array:
    tuning = next(t for t in stream_candidates(8, *w.shape))
    tuning = replace(tuning, layout=layout, tile_k=tile_k or 64, tile_n=tile_n or 64)
    return jax.jit(pack_weights, static_argnums=1)(w, tuning)


def compiled(case: Case) -> Any:
    """All copies' products as one program; the kernel is lowered once for all of them."""
    one = jax.jit(case.product)
    k, n = SHAPES[case.shape]
    layout, tile_k, tile_n = case.storage
    stored = {
        Layout.IN_OUT: (k, n),
        Layout.OUT_IN: (n, k),
        Layout.TILED: (n // (tile_n or n), k // (tile_k or k), tile_k, tile_n),
    }[layout]
    copies = num_copies(2 * k * n)
    xs = [jax.ShapeDtypeStruct((case.m, k), jnp.bfloat16)] * copies
    ws = [jax.ShapeDtypeStruct(stored, jnp.bfloat16)] * copies

    def all_copies(xs: list[jax.Array], ws: list[jax.Array]) -> list[jax.Array]:
        return [one(x, w) for x, w in zip(xs, ws, strict=True)]

    return jax.jit(all_copies).lower(xs, ws).compile()


def measure(case: Case, program: Callable[[], Any], data: Data) -> dict[str, Any]:
    """What is reported of one case: its error before its time."""
    tuning = None if case.tuning is None else repr(case.tuning)
    row: dict[str, Any] = {"m": case.m, "shape": case.shape, "tuning": tuning}
    try:
        run = program()
        xs, ws = data.tokens(case.m, case.shape), data.weights(case.shape, case.storage)
        wanted = data.wanted(case.m, case.shape)
        error = float(jnp.max(jnp.abs(run(xs, ws)[0] - wanted)) / jnp.max(jnp.abs(wanted)))
        if not error < WORST:
            return row | {"error": f"wrong: {error:.3g} of the largest value"}
        seconds = seconds_per_call(run, (xs, ws), len(xs))
    except Exception as failure:  # any candidate may fail in any way; the rest must go on
        return row | {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}
    k, n = SHAPES[case.shape]
    read = 2 * (k * n + case.m * (k + n)) / seconds / 1e12
    products = 2 * case.m * k * n / seconds / 1e12
    return row | {
        "microseconds": seconds * 1e6,
        "largest_error": error,
        "tb_s": read,
        "tflop_s": products,
        "of_read_ceiling": read / READ_TB_S,
        "of_matrix_ceiling": products / MATRIX_TFLOP_S,
    }


def work(arguments: argparse.Namespace) -> None:
    """The worker: XLA's programs, then the candidates by rank."""
    deadline = time.monotonic() + arguments.seconds
    data = Data()
    for group in cases(arguments.tokens, arguments.shapes):
        by_key = {case.key: case for case in group}
        measured_rows(
            [(key, partial(compiled, case)) for key, case in by_key.items()],
            lambda key, program, by_key=by_key: measure(by_key[key], program, data),
            done=arguments.worker,
            deadline=deadline,
            wave=24,
        )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of each product, and of a step's target products."""
    timed = [row for row in rows if "microseconds" in row]
    best: dict[str, Any] = {}
    for row in sorted(timed, key=lambda row: row["microseconds"]):
        entry = best.setdefault(f"{row['m']} {row['shape']}", {})
        kind = "xla" if row["tuning"] is None else "kernel"
        if kind == "xla" and "xla in_out" not in row["key"]:
            kind = "xla_out_in"
        entry.setdefault(kind, row)
    steps = {}
    for m in sorted({row["m"] for row in timed}):
        for kind in ("xla", "kernel"):
            us = [best.get(f"{m} {s}", {}).get(kind, {}).get("microseconds") for s in SHAPES]
            by_shape = dict(zip(SHAPES, us, strict=True))
            if all(by_shape[shape] for shape in (*LAYER, "lm_head")):
                layer = sum(by_shape[shape] or 0.0 for shape in LAYER)
                steps[f"{m} {kind}"] = (32 * layer + (by_shape["lm_head"] or 0.0)) / 1e3
    return {"best": best, "milliseconds_of_a_step": steps}


def report(found: dict[str, Any]) -> None:
    """A line a product, and the entries for tuning.MEASURED where a kernel wins by 2%."""
    for name, entry in found["best"].items():
        parts = [
            f"{kind} {row['microseconds']:.1f} us {row['of_read_ceiling']:.0%} read "
            f"{row['of_matrix_ceiling']:.0%} matrix"
            for kind, row in entry.items()
        ]
        print(f"{name:>20}: {' | '.join(parts)}")
    for name, entry in found["best"].items():
        xla, kernel = entry.get("xla"), entry.get("kernel")
        if xla and kernel and kernel["microseconds"] < 0.98 * xla["microseconds"]:
            m, shape = name.split()
            k, n = SHAPES[shape]
            print(f"    ({m}, {k}, {n}): {kernel['tuning']},")
    print(json.dumps(found["milliseconds_of_a_step"], indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=[*LAYER, "lm_head"])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument(
        "--triton-gemm",
        action="store_true",
        help="let XLA try Triton's products too: minutes of autotuning, and no gain seen so far",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    passed = ["--tokens", *map(str, arguments.tokens), "--shapes", *arguments.shapes]
    flags = "" if arguments.triton_gemm else "--xla_gpu_enable_triton_gemm=false"
    rows = watched("benchmarks.matmul_gpu", passed, seconds=arguments.seconds, xla_flags=flags)
    found = summary(rows)
    report(found)
    write_result(arguments.out, {"xla_flags": flags, "rows": rows, **found})


if __name__ == "__main__":
    main()
