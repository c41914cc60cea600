"""A mixture's experts on a GPU, one layer: XLA's grouped product against the kernels.

    python -m benchmarks.experts_gpu [--seconds 110] [--models qwen3-30b-a3b gpt-oss-20b]
                                     [--tokens 1 4 8 32 64 128 256 2048]

Each program is checked on a few tokens before it is timed. Every token draws its experts evenly,
another draw in each call, so that the L2 cache serves no weights twice. The floor is the bytes of
the experts that the tokens touch, over what one H200 reads, or the pairs' arithmetic where that
takes longer. "products alone" is the planned kernels without the sorting before them and the sum
after; "unpacked first" the kernels on weights that each call unpacks. Candidates are the planned
tiles and changes of them. One that fails, faults or hangs is named and left behind. Writes
benchmarks/results/experts_gpu.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import write_result
from benchmarks.gpu_timing import (
    MATRIX_TFLOP_S,
    READ_TB_S,
    measured_rows,
    seconds_per_call,
    watched,
)
from jspec.device.weights import Weight, dense, weight_of
from jspec.pallas_kernels.experts.api import ExpertBlocks
from jspec.pallas_kernels.experts.gpu import down_product, gate_up_product
from jspec.pallas_kernels.experts.gpu import run_experts as run_kernels
from jspec.pallas_kernels.experts.reference import blocks_of, gated, run_experts
from jspec.pallas_kernels.experts.tuning import ExpertsTuning, choose_experts
from jspec.spec.model_spec import Gate
from jspec.spec.weight_format import MXFP4, ArraySpec

PRODUCTS = ("gate_up", "down")
CALLS = 4  # of one program, each with tokens and experts of its own
CHECKED = 4  # tokens
WORST = 0.02  # largest error, as a share of the largest value, that bf16 rounding explains
TOKENS = (1, 4, 8, 32, 64, 128, 256, 2048)
RESULT = Path(__file__).parent / "results" / "experts_gpu.json"
XLA, PLANNED, ALONE, UNPACKED = "XLA", "planned", "products alone", "unpacked first"


@dataclass(frozen=True)
class Model:
    """The experts of one layer."""

    num_experts: int
    top_k: int
    size: int
    inner: int
    gate: Gate = Gate.SILU
    bias: bool = False
    is_packed: bool = False

    @property
    def expert_bytes(self) -> int:
        if self.is_packed:  # four bits a number, and eight for each 32
            return 3 * self.size * self.inner * 17 // 32
        return 2 * 3 * self.size * self.inner


MODELS = {
    "qwen3-30b-a3b": Model(num_experts=128, top_k=8, size=2048, inner=768),
    "gpt-oss-20b": Model(
        num_experts=32, top_k=4, size=2880, inner=2880, gate=Gate.CLAMPED, bias=True
    ),
    "gpt-oss-20b-mxfp4": Model(
        num_experts=32,
        top_k=4,
        size=2880,
        inner=2880,
        gate=Gate.CLAMPED,
        bias=True,
        is_packed=True,
    ),
    # For a run without a GPU, where the kernels are interpreted.
    "tiny": Model(num_experts=4, top_k=2, size=32, inner=64, gate=Gate.CLAMPED, bias=True),
}
# Tiles that replace planned ones, by rank; what does not fit a model, or is planned, is left out.
CHANGES: dict[str, dict[str, int]] = {
    "rounds of 128": {"gate_up_k": 128, "down_k": 128},
    "32 columns": {"gate_up_n": 32, "down_n": 32},
    "64 columns": {"gate_up_n": 64, "down_n": 64},
    "three stages": {"num_stages": 3},
    "eight warps": {"num_warps": 8},
    "four warps": {"num_warps": 4},
    "blocks of 16": {"tile_m": 16},
    "blocks of 32": {"tile_m": 32},
    "blocks of 64": {"tile_m": 64, "num_warps": 4, "num_stages": 4},
    "blocks of 128": {"tile_m": 128, "num_warps": 8, "num_stages": 3},
    "128 columns": {"gate_up_n": 128, "down_n": 128, "num_warps": 8, "num_stages": 3},
    "two warps": {"num_warps": 2},
}
MOST_BLOCK_RATIO = 4  # blocks up to so many times shorter or longer than planned


@dataclass(frozen=True)
class Case:
    """One program at one model and number of tokens; XLA's where tuning is None."""

    model: str
    tokens: int
    name: str
    tuning: ExpertsTuning | None = None

    @property
    def key(self) -> str:
        return f"{self.model} {self.tokens} | {self.name}"

    def one(self, x: jax.Array, ids: jax.Array, weights: jax.Array, params: Any) -> jax.Array:
        """What is timed, for one call."""
        model = MODELS[self.model]
        if self.tuning is None:
            return run_experts(x, ids, weights, params, gate=model.gate)
        interpret = jax.default_backend() != "gpu"
        if self.name == UNPACKED:
            params = params | {name: dense(params[name], x.dtype) for name in PRODUCTS}
        run = partial(run_kernels, gate=model.gate, tuning=self.tuning, interpret=interpret)
        return run(x, ids, weights, params).sum()

    def products(self, x: jax.Array, tables: dict[str, jax.Array], params: Any) -> jax.Array:
        """The planned kernels, for pairs that are sorted: `tables` of ExpertBlocks."""
        model, interpret = MODELS[self.model], jax.default_backend() != "gpu"
        tuning = planned(model, self.tokens)
        blocks = ExpertBlocks(tile_m=tuning.tile_m, **tables)
        how: dict[str, Any] = {"tuning": tuning, "interpret": interpret}
        inner = gate_up_product(x, params, blocks, gate=model.gate, **how)
        return down_product(inner, params["down"], blocks, size=model.size, **how)


def planned(model: Model, tokens: int) -> ExpertsTuning:
    """What a layer would use. ValueError where that is XLA's product, or unpacks first."""
    found = choose_experts(
        tokens * model.top_k,
        num_experts=model.num_experts,
        size=model.size,
        inner=model.inner,
        is_packed=model.is_packed,
    )
    if found is None:
        raise ValueError(f"{tokens} tokens of {model} have no plan; expected sizes with tiles")
    return found


def changed(model: Model, plan: ExpertsTuning) -> dict[str, ExpertsTuning]:
    """The candidates beside the plan."""
    found: dict[str, ExpertsTuning] = {}
    for name, change in CHANGES.items():
        tuning = replace(plan, **change)
        ratio = max(tuning.tile_m, plan.tile_m) / min(tuning.tile_m, plan.tile_m)
        is_new = tuning != plan and tuning not in found.values()
        if (
            is_new
            and ratio <= MOST_BLOCK_RATIO
            and tuning.problem(model.size, model.inner, is_packed=model.is_packed) is None
        ):
            found[name] = tuning
    return found


def cases(models: list[str], tokens: list[int]) -> list[Case]:
    """XLA's, the planned, the planned without what is around them; then the candidates by rank."""
    first, rest = [], []
    for t in tokens:
        for name in models:
            plan = planned(MODELS[name], t)
            first += [Case(name, t, XLA), Case(name, t, PLANNED, plan), Case(name, t, ALONE, plan)]
            if MODELS[name].is_packed:
                whole = planned(replace(MODELS[name], is_packed=False), t)
                first.append(Case(name, t, UNPACKED, whole))
            candidates = changed(MODELS[name], plan).items()
            rest += [(i, Case(name, t, *item)) for i, item in enumerate(candidates)]
    return first + [case for _, case in sorted(rest, key=lambda item: item[0])]


@cache
def parameters(name: str) -> dict[str, Any]:
    """Weights whose products are of about one."""
    model = MODELS[name]
    X, E, inner = model.num_experts, model.size, model.inner
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (X, E, 2 * inner), "down": (X, inner, E)}
    found: dict[str, Any] = {}
    if model.is_packed:
        found = {name: random_packed(seed, shapes.pop(name)) for seed, name in enumerate(PRODUCTS)}
    if model.bias:
        shapes["gate_up_bias"] = (X, 2 * inner)

    def draw(seed: int, shape: tuple[int, ...]) -> jax.Array:
        scale = shape[-2] ** -0.5 if len(shape) == 3 else 1.0
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * jnp.bfloat16(scale)

    make = jax.jit(draw, static_argnums=(0, 1))
    return found | {key: make(seed, shape) for seed, (key, shape) in enumerate(shapes.items())}


def random_packed(seed: int, shape: tuple[int, ...]) -> Weight:
    """Packed numbers [X, K, N] whose deviation is 2.9 / 128, as gpt-oss's products want it."""

    def make(array: ArraySpec) -> jax.Array:
        if array.dtype == "uint8":
            return jnp.full(array.shape, 120, jnp.uint8)
        draw = partial(jax.random.bits, shape=array.shape, dtype=jnp.dtype(array.dtype))
        return jax.jit(draw)(jax.random.key(seed))

    return weight_of(MXFP4(), shape, make)


@cache
def routed(name: str, tokens: int) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """(x, ids, weights) of every call."""
    model, rng = MODELS[name], np.random.default_rng(tokens)
    calls = []
    for _ in range(CALLS):
        order = np.argsort(rng.random((tokens, model.num_experts)), axis=1)[:, : model.top_k]
        weights = rng.random(order.shape, np.float32)
        x = jnp.asarray(rng.standard_normal((tokens, model.size), np.float32), jnp.bfloat16)
        weights /= weights.sum(axis=1, keepdims=True)
        calls.append((x, jnp.asarray(order, jnp.int32), jnp.asarray(weights)))
    return calls


@partial(jax.jit, static_argnames="gate")
def one_by_one(
    x: jax.Array, ids: jax.Array, weights: jax.Array, params: dict[str, Any], *, gate: Gate
) -> jax.Array:
    """A few tokens, each with copies of its experts' weights, in float32 between the roundings."""
    gate_up, down = (dense(params[name], x.dtype) for name in PRODUCTS)
    wide = jnp.einsum("te,tkei->tki", x, gate_up[ids]).astype(jnp.float32)
    if "gate_up_bias" in params:
        wide = wide + params["gate_up_bias"][ids].astype(jnp.float32)
    inner = gated(*jnp.split(wide, 2, axis=-1), gate=gate).astype(x.dtype)
    out = jnp.einsum("tki,tkie->tke", inner, down[ids]).astype(jnp.float32)
    return jnp.sum(out * weights[..., None], axis=1)


def floor_seconds(case: Case) -> tuple[float, float]:
    """(of a call at the card's reading or multiplying rate, bytes of the experts it touches)."""
    model = MODELS[case.model]
    touched = np.mean([len(np.unique(ids)) for _, ids, _ in routed(case.model, case.tokens)])
    num_bytes = float(touched) * model.expert_bytes
    flops = case.tokens * model.top_k * model.expert_bytes  # 2 an element of 2 bytes
    return max(num_bytes / READ_TB_S, flops / MATRIX_TFLOP_S) / 1e12, num_bytes


def sorted_pairs(case: Case) -> list[tuple[jax.Array, dict[str, jax.Array]]]:
    """(x, what ExpertBlocks holds) of every call, for the products alone."""
    model = MODELS[case.model]
    tile_m = planned(model, case.tokens).tile_m

    @jax.jit
    def deal(ids: jax.Array) -> dict[str, jax.Array]:
        blocks = blocks_of(ids, num_experts=model.num_experts, tile_m=tile_m)
        names = (field.name for field in fields(blocks))
        return {name: getattr(blocks, name) for name in names if name != "tile_m"}

    return [(x, deal(ids)) for x, ids, _ in routed(case.model, case.tokens)]


def compiled(case: Case) -> Callable[..., list[jax.Array]]:
    """All calls as one program of (every call's arguments, the weights)."""
    one = jax.jit(case.products if case.name == ALONE else case.one)

    def all_calls(calls: list[tuple[Any, ...]], params: Any) -> list[jax.Array]:
        return [one(*call, params) for call in calls]

    calls = routed(case.model, case.tokens)
    given = sorted_pairs(case) if case.name == ALONE else calls
    return jax.jit(all_calls).lower(given, parameters(case.model)).compile()


def largest_error(case: Case, found: jax.Array) -> float:
    """Of the last call's first tokens, as a share of the largest value."""
    x, ids, weights = (part[:CHECKED] for part in routed(case.model, case.tokens)[-1])
    gate = MODELS[case.model].gate
    right = one_by_one(x, ids, weights, parameters(case.model), gate=gate)
    wrong = jnp.abs(found[:CHECKED].astype(jnp.float32) - right)
    return float(jnp.max(wrong) / jnp.max(jnp.abs(right)))


def measure(
    case: Case, program: Callable[[], Callable[..., list[jax.Array]]], *, samples: int = 7
) -> dict[str, Any]:
    """What is reported of one case: its error before its time."""
    row: dict[str, Any] = {"model": case.model, "tokens": case.tokens, "name": case.name}
    if case.tuning is not None:
        row["tuning"] = asdict(case.tuning)
    try:
        run, params = program(), parameters(case.model)
        if case.name == ALONE:
            arguments: tuple[Any, ...] = (sorted_pairs(case), params)
        else:
            arguments = (routed(case.model, case.tokens), params)
            row["largest_error"] = largest_error(case, run(*arguments)[-1])
            if not row["largest_error"] < WORST:
                return row | {"error": f"wrong: {row['largest_error']:.3g} of the largest value"}
        seconds = seconds_per_call(run, arguments, CALLS, samples=samples)
    except Exception as failure:  # any candidate may fail in any way; the rest must go on
        return row | {"error": f"{type(failure).__name__}: {str(failure)[:300]}"}
    least, num_bytes = floor_seconds(case)
    return row | {
        "microseconds": seconds * 1e6,
        "floor_microseconds": least * 1e6,
        "of_floor": least / seconds,
        "megabytes_touched": num_bytes / 1e6,
    }


def work(arguments: argparse.Namespace) -> None:
    """The worker: every case, in order, until the time is up."""
    by_key = {case.key: case for case in cases(arguments.models, arguments.tokens)}
    for name in arguments.models:
        jax.block_until_ready(parameters(name))
    measured_rows(
        [(key, partial(compiled, case)) for key, case in by_key.items()],
        lambda key, program: measure(by_key[key], program),
        done=arguments.worker,
        deadline=time.monotonic() + arguments.seconds,
        wave=12,
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per model and tokens: XLA's time, the plan's, the best candidate's, the floor."""
    found: dict[str, Any] = {}
    for row in rows:
        if "microseconds" not in row:
            continue
        entry = found.setdefault(f"{row['model']} {row['tokens']}", {})
        entry["floor"] = row["floor_microseconds"]
        if row["name"] in (XLA, PLANNED, ALONE, UNPACKED):
            entry[row["name"]] = row["microseconds"]
        is_kernel = row["name"] not in (XLA, ALONE, UNPACKED)
        if is_kernel and row["microseconds"] < entry.get("best", float("inf")):
            entry |= {"best": row["microseconds"], "best_name": row["name"]}
    return found


def report(rows: list[dict[str, Any]], best: dict[str, Any]) -> None:
    """The table, then one line per model and number of tokens."""
    print(f"{'model':14} {'T':>5} {'program':16} {'us':>9} {'floor':>8} {'share':>6}")
    for row in sorted(rows, key=lambda row: (row.get("model", ""), row.get("tokens", 0))):
        if "microseconds" not in row:
            print(f"      {row['key']}: {row.get('error')}")
            continue
        print(
            f"{row['model']:14} {row['tokens']:>5} {row['name']:16} {row['microseconds']:9.1f} "
            f"{row['floor_microseconds']:8.1f} {row['of_floor']:6.1%}"
        )
    for name, entry in best.items():
        times = {key: round(value, 1) for key, value in entry.items() if key != "best_name"}
        print(f"BEST {name}: {entry.get('best_name')}, microseconds {times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS][:2])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    passed = ["--models", *arguments.models, "--tokens", *map(str, arguments.tokens)]
    rows = watched("benchmarks.experts_gpu", passed, seconds=arguments.seconds)
    best = summary(rows)
    report(rows, best)
    write_result(arguments.out, {"rows": rows, "best": best})


if __name__ == "__main__":
    main()
