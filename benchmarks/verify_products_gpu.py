"""A dense layer's products for the tokens of a verification on a Hopper GPU: XLA's and kernels'.

    python -m benchmarks.verify_products_gpu [--tokens 256] [--seconds 200]

Llama-3.1-8B's qkv, out, gate-and-up and down, bf16, each with the weights of LAYERS layers in turn,
so that none comes from the cache. First each product by itself: XLA's with the options that a step
has, and `large_product` in tiles, splits and clusters. Then all of a layer's, one after the other
with the norms between them, as a step has them but for its attention: what a choice is worth there.
Every program is checked before it is timed, and timed under lasting load. A candidate that fails,
faults or hangs is named and left behind. Writes benchmarks/results/verify_products_gpu.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Order
from jax.sharding import SingleDeviceSharding

from benchmarks.environment import write_result
from benchmarks.gpu_timing import measured_rows, sustained_seconds, watched
from jspec.pallas_kernels.add_norm.gpu import add_and_norm
from jspec.pallas_kernels.gated_mlp.gpu import DEFAULT, NARROW, gated_product, large_product
from jspec.pallas_kernels.gated_mlp.plan import GatedTuning, Layout

SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
LAYERS = 8
EPS = 1e-5
RESULT = Path(__file__).parent / "results" / "verify_products_gpu.json"
OPTIONS: dict[str, Any] = {
    "xla_gpu_experimental_force_split_k": 1,
    "xla_disable_hlo_passes": "rematerialization,dot-strength-reduction",
}

TALL = replace(DEFAULT, tile_m=256, tile_n=64, piece=16, overlaps=False)
SQUARE = replace(DEFAULT, tile_n=64, piece=32, num_stages=6, overlaps=False)
WIDE = replace(DEFAULT, tile_n=128, piece=32, overlaps=False)
FEW = replace(DEFAULT, tile_n=48, piece=16, num_stages=6, overlaps=False, layout=Layout.OUT_IN)
CANDIDATES: dict[str, dict[str, GatedTuning]] = {
    "down": {
        "wide, 4 splits, pairs": replace(WIDE, splits=4, cluster=(2, 1)),
        "wide, 4 splits, fours": replace(WIDE, splits=4, cluster=(2, 2)),
        "wide, 4 splits, alone": replace(WIDE, splits=4, cluster=(1, 1)),
        "square, 2 splits, pairs": replace(SQUARE, splits=2, cluster=(2, 1)),
        "square, 2 splits, fours": replace(SQUARE, splits=2, cluster=(2, 2)),
        "tall, 4 splits, pairs": replace(TALL, splits=4, cluster=(1, 2)),
        "tall, 4 splits, fours": replace(TALL, splits=4, cluster=(1, 4)),
        "wide, 4 splits, fours, by columns": replace(
            WIDE, splits=4, cluster=(2, 2), layout=Layout.OUT_IN
        ),
    },
    "out": {
        "square, 2 splits, pairs": replace(SQUARE, splits=2, cluster=(2, 1)),
        "square, 2 splits, fours": replace(SQUARE, splits=2, cluster=(2, 2)),
        "wide, 4 splits, pairs": replace(WIDE, splits=4, cluster=(2, 1)),
    },
    "qkv": {
        "square, pairs": replace(SQUARE, cluster=(2, 1)),
        "square, fours": replace(SQUARE, cluster=(2, 2)),
        "96 columns, pairs": replace(FEW, cluster=(2, 1)),
        "96 columns, fours": replace(FEW, cluster=(2, 2)),
    },
    "gate_up": {
        "narrow, pairs": NARROW,
        "narrow, fours": replace(NARROW, cluster=(2, 2)),
        "narrow, eights": replace(NARROW, cluster=(2, 4)),
    },
}
# Of a whole layer: which of these each product is, by its name; the others are XLA's.
SERVED = {"gate_up": "narrow, pairs"}
LAYER_CHOICES: dict[str, dict[str, str]] = {
    "served": SERVED,
    "down wide pairs": SERVED | {"down": "wide, 4 splits, pairs"},
    "down wide fours": SERVED | {"down": "wide, 4 splits, fours"},
    "down square fours": SERVED | {"down": "square, 2 splits, fours"},
    "down tall fours": SERVED | {"down": "tall, 4 splits, fours"},
    "gate_up fours": {"gate_up": "narrow, fours"},
    "qkv 96 fours": SERVED | {"qkv": "96 columns, fours"},
    "qkv square fours": SERVED | {"qkv": "square, fours"},
    "out square fours": SERVED | {"out": "square, 2 splits, fours"},
    "all": {
        "gate_up": "narrow, fours",
        "down": "wide, 4 splits, fours",
        "qkv": "96 columns, fours",
        "out": "square, 2 splits, fours",
    },
    "served, again": SERVED,
}


def product(shape: str, tuning: GatedTuning | None, x: jax.Array, w: jax.Array) -> jax.Array:
    """One of a layer's; [splits, M, N] in float32 where it is split."""
    if tuning is not None:
        return (gated_product if shape == "gate_up" else large_product)(x, w, tuning=tuning)
    y = x @ w
    if shape != "gate_up":
        return y
    gate, up = jnp.split(y, 2, axis=-1)
    return jax.nn.silu(gate) * up


def place(tuning: GatedTuning | None) -> Format:
    """Of the weights: as the product reads them."""
    turned = tuning is not None and tuning.layout is Layout.OUT_IN
    device = SingleDeviceSharding(jax.devices()[0])
    return Format(Order(major_to_minor=(1, 0) if turned else (0, 1)), device)


@dataclass(frozen=True)
class Layer:
    """All products of a layer. tunings: by name; None: XLA's."""

    tunings: tuple[tuple[str, GatedTuning | None], ...]

    def __call__(self, x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
        chosen = dict(self.tunings)
        scale = jnp.ones((x.shape[1],), x.dtype)

        def run(shape: str, x: jax.Array) -> jax.Array:
            return product(shape, chosen.get(shape), x, ws[shape])

        qkv = run("qkv", (x * 0.5).astype(x.dtype))
        out = run("out", qkv[:, : x.shape[1]])
        x, normed = add_and_norm(x, out, scale, eps=EPS)
        down = run("down", run("gate_up", normed))
        return add_and_norm(x, down, scale, eps=EPS)[1]


@cache
def drawer(k: int, n: int, turned: bool) -> Any:
    """Draws [K, N] weights, by rows or by columns."""
    device = SingleDeviceSharding(jax.devices()[0])
    order = Format(Order(major_to_minor=(1, 0) if turned else (0, 1)), device)
    return jax.jit(partial(_drawn, k=k, n=n), out_shardings=order)


@cache
def weight(layer: int, shape: str, turned: bool) -> jax.Array:
    k, n = SHAPES[shape]
    found: jax.Array = drawer(k, n, turned)(jax.random.key(layer * 7 + k + n))
    return found


def weights(layout: tuple[tuple[str, bool], ...]) -> list[dict[str, jax.Array]]:
    """Of every layer; layout: which are by columns."""
    return [
        {shape: weight(layer, shape, turned) for shape, turned in layout} for layer in range(LAYERS)
    ]


def _drawn(key: jax.Array, *, k: int, n: int) -> jax.Array:
    return (jax.random.normal(key, (k, n), jnp.float32) * k**-0.5).astype(jnp.bfloat16)


@cache
def tokens(m: int, k: int) -> list[jax.Array]:
    draw = jax.jit(partial(jax.random.normal, shape=(m, k), dtype=jnp.bfloat16))
    return [draw(key) for key in jax.random.split(jax.random.key(m + k), LAYERS)]


def cases(m: int) -> list[tuple[str, Callable[[], Any]]]:
    found: list[tuple[str, Callable[[], Any]]] = []
    for shape, candidates in CANDIDATES.items():
        found.append((f"{m} {shape} | XLA", partial(alone, m, shape, None)))
        for name, tuning in candidates.items():
            found.append((f"{m} {shape} | {name}", partial(alone, m, shape, tuning)))
    for name, chosen in LAYER_CHOICES.items():
        tunings = {shape: CANDIDATES[shape][one] for shape, one in chosen.items()}
        found.append((f"{m} layer | {name}", partial(in_layer, m, tunings)))
    return found


def alone(m: int, shape: str, tuning: GatedTuning | None) -> tuple[Any, Any]:
    """(compiled program, its operands): LAYERS products."""
    k, n = SHAPES[shape]
    one = jax.jit(partial(product, shape, tuning))
    xs = [jax.ShapeDtypeStruct((m, k), jnp.bfloat16)] * LAYERS
    ws = [jax.ShapeDtypeStruct((k, n), jnp.bfloat16, sharding=place(tuning))] * LAYERS

    def all_calls(xs: list[jax.Array], ws: list[jax.Array]) -> list[jax.Array]:
        return [one(x, w) for x, w in zip(xs, ws, strict=True)]

    compiled = jax.jit(all_calls).lower(xs, ws).compile(compiler_options=OPTIONS)
    turned = tuning is not None and tuning.layout is Layout.OUT_IN

    def operands() -> Any:
        return tokens(m, k), [layer[shape] for layer in weights(((shape, turned),))]

    return compiled, operands


def in_layer(m: int, tunings: dict[str, GatedTuning]) -> tuple[Any, Any]:
    layer = Layer(tuple((shape, tunings.get(shape)) for shape in SHAPES))
    places = {shape: place(tunings.get(shape)) for shape in SHAPES}
    ws = [
        {s: jax.ShapeDtypeStruct(SHAPES[s], jnp.bfloat16, sharding=places[s]) for s in SHAPES}
    ] * LAYERS
    one = jax.jit(layer)

    def all_layers(x: jax.Array, ws: list[dict[str, jax.Array]]) -> jax.Array:
        for of_layer in ws:
            x = one(x, of_layer)
        return x

    x = jax.ShapeDtypeStruct((m, 4096), jnp.bfloat16)
    compiled = jax.jit(all_layers).lower(x, ws).compile(compiler_options=OPTIONS)

    def is_turned(shape: str) -> bool:
        return shape in tunings and tunings[shape].layout is Layout.OUT_IN

    def operands() -> Any:
        return tokens(m, 4096)[0], weights(tuple((s, is_turned(s)) for s in SHAPES))

    return compiled, operands


@cache
def wanted(key: str) -> jax.Array:
    """What the XLA program of the same kind gives, in float32: [M, N] of the last product."""
    m, what = key.split()
    plain = in_layer(int(m), {}) if what == "layer" else alone(int(m), what, None)
    out = plain[0](*plain[1]())
    return (out if what == "layer" else out[-1]).astype(jnp.float32)


def measure(key: str, made: Callable[[], Any]) -> dict[str, Any]:
    try:
        compiled, operands = made()
        arguments = operands()
        out = compiled(*arguments)
        out = out[-1] if isinstance(out, list) else out
        out = out.astype(jnp.float32)
        out = out.sum(0) if out.ndim == 3 else out
        expected = wanted(key.split(" |")[0])
        error = float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))
        seconds = sustained_seconds(lambda *args: compiled(*args), arguments, LAYERS)
        return (
            {"us": round(1e6 * seconds, 2), "error": error}
            if error < 0.03
            else {"error": f"off by {error}"}
        )
    except Exception as error:
        return {"error": repr(error)[:300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker")
    options = parser.parse_args()
    jobs = [
        job
        for m in options.tokens
        for job in cases(m)
        if any(part in job[0] for part in options.only)
    ]
    if options.worker:
        deadline = time.monotonic() + options.seconds
        measured_rows(jobs, measure, done=options.worker, deadline=deadline, wave=12)
        return
    arguments = ["--tokens", *map(str, options.tokens), "--only", *options.only]
    rows = watched("benchmarks.verify_products_gpu", arguments, seconds=options.seconds)
    write_result(options.out, {"rows": rows})
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
