"""The product of activations and fp8 weights (W8A8), in XLA: the specification of the kernels.

Activations are quantized per token, so a row's result depends on that row and the weights alone:

    weights' scales    activations' scales       sums in float32
    per channel        one per token             (q(x) @ codes) * scale of x * scale of w
    per 128 x 128      one per token and 128     sum over the blocks of inputs of the above
                       inputs

Only the result is rounded to the output's dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec.device.fp8 import FP8Weight, codes_of, scales_of


def quantize(
    x: Float[Array, "*b K"], block: int | None
) -> tuple[Float[Array, "*b K"], Float[Array, "*b S"]]:
    """Return (codes e4m3, scales f32): a scale per `block` inputs; None: one per token. A scale is
    the largest magnitude / 448; a NaN makes its whole group NaN."""
    length = x.shape[-1]
    size = length if block is None else block
    groups = _padded(x.astype(jnp.float32), size, axis=-1)
    groups = groups.reshape(*x.shape[:-1], -1, size)
    scales = scales_of(jnp.max(jnp.abs(groups), axis=-1, keepdims=True))
    codes = codes_of(groups, scales)
    return codes.reshape(*x.shape[:-1], -1)[..., :length], scales[..., 0]


def fp8_product(
    x: Float[Array, "*b K"], weight: FP8Weight, *, out_dtype: DTypeLike
) -> Float[Array, "*b N"]:
    """Return x @ weight with quantized activations."""
    codes, scales = quantize(x.reshape(-1, x.shape[-1]), weight.block)
    if weight.block is None:
        # XLA compiles this to cublasLt's fp8 product where it exists.
        out = _product(codes, weight.codes) * scales * weight.scales
    else:
        out = _sum_of_blocks(codes, scales, weight, size=weight.block)
    return out.astype(out_dtype).reshape(*x.shape[:-1], -1)


def _sum_of_blocks(
    codes: Float[Array, "M K"], scales: Float[Array, "M S"], weight: FP8Weight, *, size: int
) -> Float[Array, "M N"]:
    """Add one block of inputs at a time, since all at once would need [S, M, N]."""
    width = weight.shape[-1]
    of_inputs = _padded(codes, size, axis=-1).reshape(codes.shape[0], -1, size).swapaxes(0, 1)
    of_weights = _padded(weight.codes, size, axis=-2).reshape(-1, size, width)

    def part(i: jax.Array | int) -> jax.Array:
        of_columns = weight.scales[i].repeat(size)[:width]
        return _product(of_inputs[i], of_weights[i]) * scales.T[i][:, None] * of_columns

    return jax.lax.fori_loop(1, scales.shape[-1], lambda i, out: out + part(i), part(0))


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.dot(x, y, preferred_element_type=jnp.float32)


def _padded(x: jax.Array, size: int, *, axis: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths) if widths[axis][1] else x
