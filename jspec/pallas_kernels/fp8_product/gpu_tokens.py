"""Tokens in fp8, laid out for the copies of gpu.py's kernel, on a GPU (Triton)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16

from jspec.device.fp8 import E4M3, codes_of, scales_of
from jspec.pallas_kernels.fp8_product.api import PADDED_TOKENS, QuantizedTokens, Scaled
from jspec.pallas_kernels.fp8_product.tuning import DEPTH


def quantize(
    x: BFloat16[Array, "M K"] | Scaled, *, by_blocks: bool, interpret: bool = False
) -> QuantizedTokens:
    """Return the tokens as reference.quantize has them, laid out for a kernel's copies."""
    given = (x.of, x.factor) if isinstance(x, Scaled) else (x,)
    num, k = given[0].shape
    codes, scales = pl.pallas_call(
        partial(_quantize, by_blocks=by_blocks, dtype=x.dtype),
        grid=(num,),
        out_shape=shapes_of(num, k, by_blocks=by_blocks),
        compiler_params=plt.CompilerParams(num_warps=8 if k > 2048 else 4),
        interpret=interpret,
        name="quantize_tokens",
    )(*given)
    return QuantizedTokens(codes=codes, scales=scales, num=num)


def shapes_of(num: int, k: int, *, by_blocks: bool) -> tuple[Any, Any]:
    padded = -(-num // PADDED_TOKENS) * PADDED_TOKENS
    return (
        jax.ShapeDtypeStruct((-(-num // 8) * 8, k), E4M3),
        jax.ShapeDtypeStruct((-(-k // DEPTH) if by_blocks else 1, padded), jnp.float32),
    )


def _quantize(x_ref: Any, *refs: Any, by_blocks: bool, dtype: Any) -> None:
    *factor, codes_ref, scales_ref = refs
    token, k = pl.program_id(0), x_ref.shape[1]
    block = jnp.arange(pl.next_power_of_2(-(-k // DEPTH)), dtype=jnp.int32)
    at = block[:, None] * DEPTH + jnp.arange(DEPTH, dtype=jnp.int32)[None]
    x = plt.load(x_ref.at[token, at], mask=at < k, other=0.0).astype(jnp.float32)
    for factor_ref in factor:
        x = (x * plt.load(factor_ref.at[token * 0])).astype(dtype).astype(jnp.float32)
    most = jnp.max(jnp.abs(x), axis=1)
    if by_blocks:
        scale = scales_of(most)
        plt.store(scales_ref.at[block, token], scale, mask=block < -(-k // DEPTH))
        codes = codes_of(x, scale[:, None])
    else:
        scale = scales_of(jnp.max(most))
        plt.store(scales_ref.at[token * 0, token], scale)
        codes = codes_of(x, scale)
    plt.store(codes_ref.at[token, at], codes, mask=at < k)
