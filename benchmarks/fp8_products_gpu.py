"""A dense layer's products with weights in fp8, as XLA compiles them, beside those in bfloat16.

    python -m benchmarks.fp8_products_gpu [--tokens 1 64 256] [--seconds 230]

Llama-3.1-8B's four products, weights [in, out] and [out, in] in memory, so many copies in turn that
the L2 cache serves none. Kinds:

    bf16     bfloat16
    rows     fp8 weights, made bfloat16 by the product, a scale an output after it
    blocks   fp8 weights times a scale a block of 128 x 128, then as bfloat16
    w8a8     fp8 weights and fp8 tokens, a scale a token and one an output: other numbers

Writes benchmarks/results/fp8_products_gpu.json: microseconds of one product with all that belongs
to it (decision 37).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

if __package__ in (None, ""):  # started as a file: find `benchmarks` and `jspec` beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environment import write_result
from benchmarks.gpu_timing import num_copies, seconds_per_call

SHAPES = {
    "qkv": (4096, 6144),
    "out": (4096, 4096),
    "gate_up": (4096, 28672),
    "down": (14336, 4096),
}
BLOCK, LARGEST = 128, 448.0
FP8 = jnp.float8_e4m3fn
LAYOUTS = {"in, out": False, "out, in": True}
OPTIONS = {"xla_disable_hlo_passes": "dot-strength-reduction"}  # as decode steps have it
RESULT = Path(__file__).parent / "results" / "fp8_products_gpu.json"


def bf16(x: jax.Array, w: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    del row, block
    return x @ w


def rows(x: jax.Array, w: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    del block
    found = jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32)
    return (found * row).astype(x.dtype)


def blocks(x: jax.Array, w: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    del row
    size, width = w.shape
    pieces = w.astype(x.dtype).reshape(size // BLOCK, BLOCK, width // BLOCK, BLOCK)
    pieces = pieces * block.astype(x.dtype)[:, None, :, None]
    return x @ pieces.reshape(size, width)


def w8a8(x: jax.Array, w: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    del block
    own = jnp.max(jnp.abs(x), axis=1, keepdims=True).astype(jnp.float32) / LARGEST
    found = jnp.matmul((x / own).astype(FP8), w, preferred_element_type=jnp.float32)
    return (found * own * row).astype(x.dtype)


KINDS: dict[str, Callable[..., jax.Array]] = {
    "bf16": bf16,
    "rows": rows,
    "blocks": blocks,
    "w8a8": w8a8,
}


def in_turn(product: Callable[..., jax.Array], x: jax.Array, weights: Any, turned: bool) -> Any:
    """One product after the other, each of which waits for the one before."""
    for w, row, block in weights:
        found = product(x, w.T if turned else w, row, block)
        x = x + found.reshape(-1)[0] * jnp.asarray(1e-9, x.dtype)
    return x


def build(tokens: int, shape: str, kind: str, turned: bool) -> tuple[Any, Any]:
    """(compiled, shapes of its arguments)."""
    size, width = SHAPES[shape]
    dtype = jnp.bfloat16 if kind == "bf16" else FP8
    copies = num_copies(size * width * jnp.dtype(dtype).itemsize, total=2**29)
    of = jax.ShapeDtypeStruct
    weight = of((width, size) if turned else (size, width), dtype)
    row, block = of((width,), jnp.float32), of((size // BLOCK, width // BLOCK), jnp.float32)
    arguments = (of((tokens, size), jnp.bfloat16), [(weight, row, block)] * copies)
    run = partial(in_turn, KINDS[kind])
    compiled = jax.jit(run, static_argnums=2).lower(*arguments, turned)
    return compiled.compile(compiler_options=OPTIONS), arguments


def some(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Numbers whose sums stay finite."""
    if like.dtype != FP8:
        return jnp.full(like.shape, 2.0**-7, like.dtype)
    codes = jax.random.randint(jax.random.key(0), like.shape, 1, 100, jnp.int8)
    return jax.lax.bitcast_convert_type(codes, FP8)


def measured(compiled: Any, arguments: Any) -> float:
    """Microseconds of one product."""
    x, weights = arguments
    made = [tuple(some(each) for each in one) for one in weights]
    seconds = seconds_per_call(compiled, (some(x), made), len(weights), samples=5)
    return round(seconds * 1e6, 2)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--seconds", type=float, default=230.0, help="nothing begins later")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    found: dict[str, float | str] = {}
    jobs = list(itertools.product(options.tokens, SHAPES, KINDS, LAYOUTS))
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 4) - 2)) as pool:
        built = [pool.submit(build, *job[:3], LAYOUTS[job[3]]) for job in jobs]
        # Compiling also times candidates on the device: nothing is measured beside that.
        for job, future in zip(jobs, built, strict=True):
            key = " ".join(map(str, job[:3])) + f" [{job[3]}]"
            try:
                future.result()
            except Exception as error:  # of one candidate; the others are measured
                found[key] = repr(error)[:200]
        for job, future in zip(jobs, built, strict=True):
            key = " ".join(map(str, job[:3])) + f" [{job[3]}]"
            if key in found or time.monotonic() > deadline:
                continue
            found[key] = measured(*future.result())
            print(key, found[key], flush=True)
            write_result(options.out, {"microseconds": found})


if __name__ == "__main__":
    main()
