"""Tokens in fp8, and their product with few fp8 weights' columns a program, on a GPU (Triton).

The time of few tokens is that of reading the weights once. One token uses no tensor cores and is
quantised in each program, while its weights arrive: all loads of weights come first. Several
tokens are padded to the lanes of a tensor core product. Rounding is that of reference.fp8_product,
and of gated_mlp for a gated product.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16

from jspec.device.fp8 import FP8Weight
from jspec.device.pytree import pytree, static
from jspec.pallas_kernels.fp8_product.reference import E4M3, LARGEST
from jspec.pallas_kernels.fp8_product.tuning import DEPTH, PADDED_TOKENS, FewTuning
from jspec.pallas_kernels.gated_mlp.reference import gated

_PER_LARGEST = 1.0 / LARGEST
_SMALLEST = 2.0**-100


@pytree
class QuantisedTokens:
    """Tokens in fp8. What lies past the first `num` of them is arbitrary."""

    codes: Any  # e4m3[8 m, K]
    scales: Any  # f32[S, 128 m]: S is 1, or the blocks of 128 inputs
    num: int = static()


def quantise(
    x: BFloat16[Array, "M K"], *, by_blocks: bool, interpret: bool = False
) -> QuantisedTokens:
    """Return the tokens as reference.quantise has them, laid out for a kernel's copies."""
    num, k = x.shape
    blocks = -(-k // DEPTH)
    padded = -(-num // PADDED_TOKENS) * PADDED_TOKENS
    codes, scales = pl.pallas_call(
        partial(_quantise, by_blocks=by_blocks),
        grid=(num,),
        out_shape=(
            jax.ShapeDtypeStruct((-(-num // 8) * 8, k), E4M3),
            jax.ShapeDtypeStruct((blocks if by_blocks else 1, padded), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=8 if k > 2048 else 4),
        interpret=interpret,
        name="quantise_tokens",
    )(x)
    return QuantisedTokens(codes=codes, scales=scales, num=num)


def _quantise(x_ref: Any, codes_ref: Any, scales_ref: Any, *, by_blocks: bool) -> None:
    token, k = pl.program_id(0), x_ref.shape[1]
    block = jnp.arange(pl.next_power_of_2(-(-k // DEPTH)), dtype=jnp.int32)
    at = block[:, None] * DEPTH + jnp.arange(DEPTH, dtype=jnp.int32)[None]
    x = plt.load(x_ref.at[token, at], mask=at < k, other=0.0).astype(jnp.float32)
    most = jnp.max(jnp.abs(x), axis=1)
    if by_blocks:
        scale = _scale(most)
        plt.store(scales_ref.at[block, token], scale, mask=block < -(-k // DEPTH))
        codes = _codes(x, scale[:, None])
    else:
        scale = _scale(jnp.max(most))
        plt.store(scales_ref.at[token * 0, token], scale)
        codes = _codes(x, scale)
    plt.store(codes_ref.at[token, at], codes, mask=at < k)


def _scale(most: jax.Array) -> jax.Array:
    return jnp.maximum(most, _SMALLEST) * _PER_LARGEST


def _codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.clip(x / scale, -LARGEST, LARGEST).astype(E4M3)


def few_product(
    x: BFloat16[Array, "M K"] | QuantisedTokens,
    weight: FP8Weight,
    *,
    tuning: FewTuning,
    is_gated: bool = False,
    interpret: bool = False,
) -> BFloat16[Array, "M N"]:
    """Return x @ weight; is_gated: silu(x @ gate) * (x @ up), of the weight's two halves.

    Tokens in bf16 are quantised in each program. Raises ValueError if `tuning` does not fit.
    weight: read as codes.T, which is free if it is stored so.
    """
    num = x.num if isinstance(x, QuantisedTokens) else x.shape[0]
    (k, columns), halves, by_blocks = weight.shape, 2 if is_gated else 1, weight.block is not None
    if problem := tuning.problem(num, k, columns, halves=halves, by_blocks=by_blocks):
        raise ValueError(f"[{num}, {k}] @ [{k}, {columns}]: {problem}")
    if tuning.by_lanes and isinstance(x, QuantisedTokens):
        raise ValueError("x is quantised; expected bfloat16 for one token by lanes")
    width = columns // halves
    tokens = [x.codes, x.scales] if isinstance(x, QuantisedTokens) else [x]
    of_weight = [weight.codes.T.reshape(halves, width, k), weight.scales]
    out: jax.Array = pl.pallas_call(
        partial(
            _one_token if tuning.by_lanes else _few_tokens,
            tuning=tuning,
            halves=halves,
            by_blocks=by_blocks,
            num=num,
        ),
        grid=(width // tuning.tile_n,),
        out_shape=jax.ShapeDtypeStruct((num, width), jnp.bfloat16),
        compiler_params=plt.CompilerParams(
            num_warps=tuning.num_warps, num_stages=tuning.num_stages
        ),
        interpret=interpret,
        name="few_fp8_product",
    )(*of_weight, *tokens)
    return out


def _one_token(
    w_ref: Any,
    w_scales_ref: Any,
    x_ref: Any,
    out_ref: Any,
    *,
    tuning: FewTuning,
    halves: int,
    by_blocks: bool,
    num: int,
) -> None:
    """Compute tile_n columns of the result, by each lane's own sums."""
    del num
    program, width = pl.program_id(0), out_ref.shape[1]
    only = program * 0  # the token; jax 0.10 cannot interpret a store at a constant index
    column = program * tuning.tile_n + jnp.arange(tuning.tile_n, dtype=jnp.int32)
    lane = jnp.arange(tuning.tile_k, dtype=jnp.int32)
    steps = [only + step * tuning.tile_k for step in range(x_ref.shape[1] // tuning.tile_k)]
    tokens = [plt.load(x_ref.at[only, at + lane]).astype(jnp.float32) for at in steps]
    codes = [
        [plt.load(w_ref.at[half, column[:, None], (at + lane)[None]]) for half in range(halves)]
        for at in steps
    ]
    scale = only.astype(jnp.float32)
    if not by_blocks:
        most = tokens[0] * 0.0
        for x in tokens:
            most = jnp.maximum(most, jnp.abs(x))
        scale = _scale(jnp.max(most))
    sums = [jnp.zeros((tuning.tile_n, tuning.tile_k), jnp.float32)] * halves
    for at, x, of_halves in zip(steps, tokens, codes, strict=True):
        for half, w in enumerate(of_halves):
            if by_blocks:
                blocks = x.reshape(tuning.tile_k // DEPTH, DEPTH)
                own = _scale(jnp.max(jnp.abs(blocks), axis=1))
                block = at // DEPTH + jnp.arange(tuning.tile_k // DEPTH, dtype=jnp.int32)
                first = half * width + program * tuning.tile_n
                of_weights = plt.load(w_scales_ref.at[block, first // DEPTH])
                number = _codes(blocks, own[:, None]).astype(jnp.float32)
                number = (number * (own * of_weights)[:, None]).reshape(tuning.tile_k)
            else:
                number = _codes(x, scale).astype(jnp.float32)
            sums[half] = sums[half] + w.astype(jnp.float32) * number[None]
    totals = [jnp.sum(total, axis=1) for total in sums]
    if not by_blocks:
        totals = [
            total * scale * plt.load(w_scales_ref.at[half * width + column])
            for half, total in enumerate(totals)
        ]
    plt.store(out_ref.at[only, column], _result(totals, out_ref.dtype))


def _few_tokens(
    w_ref: Any,
    w_scales_ref: Any,
    x_ref: Any,
    *scales_and_out: Any,
    tuning: FewTuning,
    halves: int,
    by_blocks: bool,
    num: int,
) -> None:
    """Compute tile_n columns for all tokens, with weights as the left operand, as stored."""
    *x_scales_ref, out_ref = scales_and_out
    program, (size, width) = pl.program_id(0), (x_ref.shape[1], out_ref.shape[1])
    column = program * tuning.tile_n + jnp.arange(tuning.tile_n, dtype=jnp.int32)
    token = jnp.arange(tuning.num_lanes, dtype=jnp.int32)
    exists = token < num
    depth = DEPTH if by_blocks else tuning.tile_k

    def load(at: jax.Array) -> jax.Array:
        zero = jnp.zeros((), x_ref.dtype)
        return plt.load(x_ref.at[token[None], at[:, None]], mask=exists[None], other=zero)

    scale = _scale_of_tokens(load, size, tuning) if not (by_blocks or x_scales_ref) else None

    def add_part(at: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        inputs = at + jnp.arange(depth, dtype=jnp.int32)
        x, own = load(inputs), scale
        weights = [
            plt.load(w_ref.at[half, column[:, None], inputs[None]]) for half in range(halves)
        ]
        if not x_scales_ref:
            wide = x.astype(jnp.float32)
            own = _scale(jnp.max(jnp.abs(wide), axis=0)) if scale is None else scale
            x = _codes(wide, own[None])
        elif by_blocks:
            own = plt.load(x_scales_ref[0].at[at // DEPTH, token], mask=exists, other=0.0)
        parts = [jnp.dot(w, x, preferred_element_type=jnp.float32) for w in weights]
        if by_blocks and own is not None:
            firsts = [half * width + program * tuning.tile_n for half in range(halves)]
            factors = [plt.load(w_scales_ref.at[at // DEPTH, first // DEPTH]) for first in firsts]
            parts = [part * (own * f)[None] for part, f in zip(parts, factors, strict=True)]
        return tuple(total + part for total, part in zip(sums, parts, strict=True))

    def add(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for part in range(tuning.tile_k // depth):
            sums = add_part(step * tuning.tile_k + part * depth, sums)
        return sums

    zeros = jnp.zeros((tuning.tile_n, tuning.num_lanes), jnp.float32)
    sums = lax.fori_loop(0, size // tuning.tile_k, add, (zeros,) * halves)
    if not by_blocks:
        of_tokens: Any = scale
        if x_scales_ref:
            of_tokens = plt.load(x_scales_ref[0].at[program * 0, token], mask=exists, other=0.0)
        sums = [
            total * of_tokens[None] * plt.load(w_scales_ref.at[half * width + column])[:, None]
            for half, total in enumerate(sums)
        ]
    result = _result(list(sums), out_ref.dtype)
    plt.store(out_ref.at[token[None], column[:, None]], result, mask=exists[None])


def _scale_of_tokens(load: Any, size: int, tuning: FewTuning) -> jax.Array:
    lane = jnp.arange(tuning.tile_k, dtype=jnp.int32)

    def largest(step: jax.Array, most: jax.Array) -> jax.Array:
        x = jnp.abs(load(step * tuning.tile_k + lane).astype(jnp.float32))
        return jnp.maximum(most, jnp.max(x, axis=0))

    most = jnp.zeros((tuning.num_lanes,), jnp.float32)
    return _scale(lax.fori_loop(0, size // tuning.tile_k, largest, most))


def _result(sums: list[jax.Array], dtype: Any) -> jax.Array:
    rounded = [total.astype(dtype) for total in sums]
    if len(rounded) == 1:
        return rounded[0]
    gate, up = (half.astype(jnp.float32) for half in rounded)
    return gated(gate, up).astype(dtype)
