"""The gated product of an MLP for at most 32 tokens with column-major weights on a GPU (Triton).

Several tokens are padded with 0 to the 16 or 32 columns of a tensor core product. One token's
products are accumulated per lane and reduced at the end. Rounding is that of
reference.gated_product.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16

from jspec.pallas_kernels.gated_mlp.reference import gated
from jspec.pallas_kernels.gated_mlp.tuning import FewTuning
from jspec.pallas_kernels.hopper import has_mosaic_gpu

# Measured on an H100 (benchmarks/results/gated_mlp_few_h100.json).
ONE = FewTuning(tile_n=4, tile_k=2048, num_warps=8, by_lanes=True)
SEVERAL = FewTuning(tile_n=64, tile_k=128, num_warps=4, num_stages=4)
MORE = replace(SEVERAL, num_lanes=32)
# For 32 tokens gpu.py alone is as fast, but a Mosaic launch is a CUDA graph of its own, which makes
# a step slower. For 64, tensor core throughput matters.
MOST_TOKENS = MORE.num_lanes


def choose_few_gated(
    m: int, k: int, columns: int, *, dtype: DTypeLike, column_major: bool
) -> FewTuning | None:
    """Return the tuning for [m, k] @ [k, columns] of a decode step, or None if not supported."""
    if not column_major or m > MOST_TOKENS or jnp.dtype(dtype) != jnp.bfloat16:
        return None
    if not has_mosaic_gpu():  # a jax version has all kernels of this product or none
        return None
    if ONE.problem(m, k, columns) is None and k % (2 * ONE.tile_k) == 0:
        return ONE
    several = SEVERAL if m <= SEVERAL.num_lanes else MORE
    fits = several.problem(m, k, columns) is None and several.fills_turns(columns)
    return several if fits else None


def few_gated_product(
    x: BFloat16[Array, "M K"],
    w: BFloat16[Array, "K N2"],
    *,
    tuning: FewTuning,
    interpret: bool = False,
) -> BFloat16[Array, "M N"]:
    """Return silu(x @ w[:, :N]) * (x @ w[:, N:]), reading w as w.T. Raises ValueError."""
    (m, k), columns = x.shape, w.shape[1]
    if problem := tuning.problem(m, k, columns):
        raise ValueError(f"[{m}, {k}] @ [{k}, {columns}]: {problem}")
    width = columns // 2
    out: jax.Array = pl.pallas_call(
        partial(_one_token if tuning.by_lanes else _few_tokens, tuning=tuning),
        grid=(width // tuning.tile_n,),
        out_shape=jax.ShapeDtypeStruct((m, width), x.dtype),
        compiler_params=plt.CompilerParams(
            num_warps=tuning.num_warps, num_stages=tuning.num_stages
        ),
        interpret=interpret,
        name="few_gated_product",
    )(x, w.T.reshape(2, width, k))
    return out


def _one_token(x_ref: Any, w_ref: Any, out_ref: Any, *, tuning: FewTuning) -> None:
    """Compute tile_n columns of the result; the loop is unrolled, so that loads come first."""
    block = pl.program_id(0)
    only = block * 0  # the token; jax 0.10 cannot interpret a store at a constant index
    column = block * tuning.tile_n + jnp.arange(tuning.tile_n, dtype=jnp.int32)
    sums = [jnp.zeros((tuning.tile_n, tuning.tile_k), jnp.float32)] * 2
    for step in range(x_ref.shape[1] // tuning.tile_k):
        at = step * tuning.tile_k + jnp.arange(tuning.tile_k, dtype=jnp.int32)
        x = plt.load(x_ref.at[only, at]).astype(jnp.float32)
        for half in range(2):
            w = plt.load(w_ref.at[half, column[:, None], at[None]])
            sums[half] = sums[half] + w.astype(jnp.float32) * x[None]
    gate, up = (jnp.sum(of_half, axis=1) for of_half in sums)
    plt.store(out_ref.at[only, column], _gated(gate, up, out_ref.dtype))


def _few_tokens(x_ref: Any, w_ref: Any, out_ref: Any, *, tuning: FewTuning) -> None:
    num_tokens, size = x_ref.shape
    column = pl.program_id(0) * tuning.tile_n + jnp.arange(tuning.tile_n, dtype=jnp.int32)
    token = jnp.arange(tuning.num_lanes, dtype=jnp.int32)
    exists = (token < num_tokens)[None]

    def add(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = step * tuning.tile_k + jnp.arange(tuning.tile_k, dtype=jnp.int32)
        x = plt.load(x_ref.at[token[None], at[:, None]], mask=exists, other=0.0)
        halves = (plt.load(w_ref.at[half, column[:, None], at[None]]) for half in range(2))
        parts = (jnp.dot(w, x, preferred_element_type=jnp.float32) for w in halves)
        return tuple(total + part for total, part in zip(sums, parts, strict=True))

    zeros = jnp.zeros((tuning.tile_n, tuning.num_lanes), jnp.float32)
    gate, up = lax.fori_loop(0, size // tuning.tile_k, add, (zeros, zeros))
    result = _gated(gate, up, out_ref.dtype)
    plt.store(out_ref.at[token[None], column[:, None]], result, mask=exists)


def _gated(gate: jax.Array, up: jax.Array, dtype: Any) -> jax.Array:
    gate, up = (half.astype(dtype).astype(jnp.float32) for half in (gate, up))
    return gated(gate, up).astype(dtype)
