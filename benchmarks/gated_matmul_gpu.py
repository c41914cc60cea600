"""The gated half of Llama-3.1-8B's MLP on a Hopper GPU, XLA's against the kernel's.

    python -m benchmarks.gated_matmul_gpu [--seconds 110] [--tokens 128 256 512 1024 2048 8192]

XLA is what a layer does without the kernel: the product, then the activation, in one program. Each
program is checked against the reference before it is timed, and timed warm: the card lowers its
clock under load, so each runs back to back for half a second before the first sample and on through
the last. XLA's is timed at the beginning and at the end. A candidate that fails, faults or hangs is
named and left behind. Writes benchmarks/results/gated_matmul_gpu.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Order
from jax.sharding import SingleDeviceSharding

from benchmarks.environment import write_result
from benchmarks.gpu_timing import MATRIX_TFLOP_S, measured_rows, sustained_seconds, watched
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.gated_mlp.gpu import DEFAULT, FEW, MOST_FEW, NARROW, gated_product
from jspec.pallas_kernels.gated_mlp.gpu_few import ONE, SEVERAL, few_gated_product
from jspec.pallas_kernels.gated_mlp.reference import gated_product as reference
from jspec.pallas_kernels.gated_mlp.tuning import (
    FEWEST_LANES,
    FewTuning,
    GatedTuning,
    Layout,
    Shared,
)

GATE_UP = "gate_up"
SHAPES = {GATE_UP: (4096, 28672)}
TOKENS = (128, 256, 512, 1024, 2048, 8192)
CALLS = 4  # of one program, each with operands of its own
WORST = 0.01  # largest error, as a share of the largest value, that bf16 rounding explains
RESULT = Path(__file__).parent / "results" / "gated_matmul_gpu.json"

ALONE = replace(DEFAULT, cluster=1)
TURNED = replace(DEFAULT, layout=Layout.OUT_IN)
# Timed where a layer might use them; those after EVERYWHERE at the largest M only.
TUNINGS = {
    "pairs share weights": DEFAULT,
    "alone": ALONE,
    "pairs, by columns": TURNED,
    "pieces of 32": replace(DEFAULT, piece=32),
    "groups of 8": replace(DEFAULT, group=8),
    "groups of 32": replace(DEFAULT, group=32),
    "pairs share tokens": replace(DEFAULT, shared=Shared.TOKENS),
    "epilogue not hidden": replace(DEFAULT, overlaps=False),
}
FEW_TUNINGS = {
    "narrow pairs": NARROW,
    "narrow, alone": replace(NARROW, cluster=1),
    "pairs share weights": DEFAULT,
    "alone": ALONE,
}
FEWEST_TUNINGS = {  # up to MOST_FEW tokens
    "one tile each": FEW,
    "steps of 64": replace(FEW, tile_k=64, num_stages=6),
    "pairs share tokens": replace(FEW, cluster=2, shared=Shared.TOKENS),
    "tiles of 64": replace(FEW, tile_n=64, num_stages=4),
    "tiles of 64, by rows": replace(FEW, tile_n=64, num_stages=4, layout=Layout.IN_OUT),
    "late start": replace(FEW, early_start=False, early_release=False),
}
TRITON_TUNINGS = {  # by columns, too; those that do not fit M are left out
    "lanes, 4 columns": ONE,
    "lanes, 2 columns": replace(ONE, tile_n=2),
    "lanes, 4 columns of 1,024": replace(ONE, tile_k=1024, num_warps=4),
    "lanes, 4 columns of 4,096": replace(ONE, tile_k=4096),
    "lanes, 8 columns of 1,024": replace(ONE, tile_n=8, tile_k=1024),
    "64 columns, four stages": SEVERAL,
    "32 columns of 256": replace(SEVERAL, tile_n=32, tile_k=256, num_stages=3),
    "64 columns of 64, eight stages": replace(SEVERAL, tile_k=64, num_stages=8),
    "32 columns, six stages": replace(SEVERAL, tile_n=32, num_stages=6),
}
WIDE_TUNINGS = {  # the same for more tokens than FEWEST_LANES
    f"Triton, {lanes} lanes, {name}": replace(SEVERAL, num_lanes=lanes, **tuning)
    for lanes, tunings in {
        32: {
            "four stages": {},
            "steps of 64": {"tile_k": 64, "num_stages": 7},
            "eight warps": {"num_warps": 8},
        },
        64: {
            "four stages": {},
            "three stages": {"num_stages": 3},
            "steps of 64": {"tile_k": 64, "num_stages": 6},
            "eight warps": {"num_warps": 8},
        },
    }.items()
    for name, tuning in tunings.items()
}
EVERYWHERE, FEW_TOKENS = 3, 512


@dataclass(frozen=True)
class Case:
    """One program at one shape: XLA's where tuning is None. column_major: how XLA's weights lie."""

    m: int
    shape: str
    name: str
    tuning: GatedTuning | FewTuning | None = None
    column_major: bool = False

    @property
    def key(self) -> str:
        return f"{self.m} {self.shape} | {self.name}"

    @property
    def place(self) -> Format:
        """Of the weights: as the kernel reads them."""
        turned = self.column_major or isinstance(self.tuning, FewTuning)
        if isinstance(self.tuning, GatedTuning):
            turned = self.tuning.layout is Layout.OUT_IN
        device = SingleDeviceSharding(jax.devices()[0])
        return Format(Order(major_to_minor=(1, 0) if turned else (0, 1)), device)

    @property
    def flops(self) -> float:
        k, n = SHAPES[self.shape]
        return 2.0 * self.m * k * n

    def one(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """What is timed, for one call."""
        if isinstance(self.tuning, FewTuning):
            return few_gated_product(x, w, tuning=self.tuning)
        if self.tuning is not None:
            return gated_product(x, w, tuning=self.tuning)
        gate, up = jnp.split(x @ w, 2, axis=-1)
        return jax.nn.silu(gate) * up


def cases(tokens: list[int]) -> list[Case]:
    """XLA's, the candidates by rank, and XLA's again."""
    largest = max(tokens)
    found = [Case(m, GATE_UP, "XLA") for m in tokens]
    for m in tokens:
        programs: dict[str, Any] = FEW_TUNINGS if m <= FEW_TOKENS else TUNINGS
        if m <= MOST_FEW:
            programs = FEWEST_TUNINGS
            if m <= FEWEST_LANES:
                k, n = SHAPES[GATE_UP]
                few = {name: t for name, t in TRITON_TUNINGS.items() if not t.problem(m, k, n)}
                programs = few | {"one tile each": FEW}
            else:
                wide = {n: t for n, t in WIDE_TUNINGS.items() if m <= t.num_lanes < 2 * m}
                programs = wide | {"one tile each": FEW}
            found.append(Case(m, GATE_UP, "XLA, by columns", column_major=True))
        for rank, (name, tuning) in enumerate(programs.items()):
            if m <= FEW_TOKENS or rank < EVERYWHERE or m == largest:
                found.append(Case(m, GATE_UP, name, tuning))
    found += [Case(m, GATE_UP, "XLA, again") for m in tokens]
    return found


@cache
def operands(m: int, shape: str) -> tuple[list[jax.Array], list[jax.Array]]:
    """Tokens and weights of every call; products are of about one."""
    k, n = SHAPES[shape]
    keys = jax.random.split(jax.random.key(m + n), 2 * CALLS)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    xs = [draw(key, (m, k), jnp.bfloat16) for key in keys[:CALLS]]
    ws = [draw(key, (k, n), jnp.bfloat16) * k**-0.5 for key in keys[CALLS:]]
    return xs, [w.astype(jnp.bfloat16) for w in ws]


@cache
def wanted(m: int, shape: str) -> jax.Array:
    """What the last call must give."""
    xs, ws = operands(m, shape)
    return jax.jit(reference)(xs[-1], ws[-1]).astype(jnp.float32)


def compiled(case: Case) -> Any:
    """All calls as one program; the kernel is lowered once for all of them."""
    one = jax.jit(case.one)
    k, n = SHAPES[case.shape]
    xs = [jax.ShapeDtypeStruct((case.m, k), jnp.bfloat16)] * CALLS
    ws = [jax.ShapeDtypeStruct((k, n), jnp.bfloat16, sharding=case.place)] * CALLS

    def all_calls(xs: list[jax.Array], ws: list[jax.Array]) -> list[jax.Array]:
        return [one(x, w) for x, w in zip(xs, ws, strict=True)]

    options = OPS["gpu"].compiler_options(decode_tokens=case.m)  # what a step of them has
    return jax.jit(all_calls).lower(xs, ws).compile(compiler_options=options)


def measure(case: Case, program: Callable[[], Any]) -> dict[str, Any]:
    """What is reported of one case: its error before its time."""
    tuning = None if case.tuning is None else repr(case.tuning)
    row: dict[str, Any] = {"m": case.m, "shape": case.shape, "name": case.name, "tuning": tuning}
    try:
        run = program()
        xs, ws = operands(case.m, case.shape)
        right = wanted(case.m, case.shape)
        arguments = (xs, jax.device_put(ws, case.place))
        error = jnp.max(jnp.abs(run(*arguments)[-1] - right)) / jnp.max(jnp.abs(right))
        row["largest_error"] = float(error)
        if not row["largest_error"] < WORST:
            return row | {"error": f"wrong: {row['largest_error']:.3g} of the largest value"}
        seconds = sustained_seconds(run, arguments, CALLS)
    except Exception as failure:  # any candidate may fail in any way; the rest must go on
        return row | {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}
    rate = case.flops / seconds / 1e12
    return row | {
        "microseconds": seconds * 1e6,
        "tflop_s": rate,
        "of_ceiling": rate / MATRIX_TFLOP_S,
    }


def work(arguments: argparse.Namespace) -> None:
    """The worker: every case, in order, until the time is up."""
    by_key = {case.key: case for case in cases(arguments.tokens)}
    measured_rows(
        [(key, partial(compiled, case)) for key, case in by_key.items()],
        lambda key, program: measure(by_key[key], program),
        done=arguments.worker,
        deadline=time.monotonic() + arguments.seconds,
        wave=10,
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per shape and M: XLA's faster time, the best candidate, and the ratio of the two."""
    found: dict[str, Any] = {}
    for row in sorted(rows, key=lambda row: row.get("microseconds", 0.0)):
        if "microseconds" not in row:
            continue
        kind = "xla" if row["tuning"] is None else "kernel"
        found.setdefault(f"{row['shape']} {row['m']}", {}).setdefault(kind, row)
    for entry in found.values():
        if len(entry) == 2:
            entry["speedup"] = entry["xla"]["microseconds"] / entry["kernel"]["microseconds"]
    return found


def report(rows: list[dict[str, Any]], best: dict[str, Any]) -> None:
    """The table, then one line per shape and M."""
    xla = {name: entry["xla"]["microseconds"] for name, entry in best.items() if "xla" in entry}
    print(f"{'M':>5} {'product':8} {'program':28} {'us':>9} {'TFLOP/s':>8} {'ceiling':>8} vs XLA")
    for row in sorted(rows, key=lambda row: (row.get("shape", ""), row.get("m", 0))):
        if "microseconds" not in row:
            print(f"      {row['key']}: {row.get('error')}")
            continue
        ratio = xla.get(f"{row['shape']} {row['m']}", 0.0) / row["microseconds"]
        print(
            f"{row['m']:>5} {row['shape']:8} {row['name']:28} {row['microseconds']:9.1f} "
            f"{row['tflop_s']:8.0f} {row['of_ceiling']:8.1%} {ratio:.3f}"
        )
    for name, entry in best.items():
        if "speedup" in entry:
            kernel, other = entry["kernel"], entry["xla"]
            print(
                f"BEST {name}: {kernel['name']}, {kernel['microseconds']:.1f} us, "
                f"XLA {other['microseconds']:.1f} us: {entry['speedup']:.3f} times as fast"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    passed = ["--tokens", *map(str, arguments.tokens)]
    rows = watched("benchmarks.gated_matmul_gpu", passed, seconds=arguments.seconds)
    best = summary(rows)
    report(rows, best)
    every = {**TUNINGS, **FEW_TUNINGS, **FEWEST_TUNINGS}
    names = {name: str(asdict(tuning)) for name, tuning in every.items()}
    write_result(arguments.out, {"tunings": names, "rows": rows, "best": best})


if __name__ == "__main__":
    main()
