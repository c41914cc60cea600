"""The product of activations and int8 weights (W8A8), in XLA on every platform.

Activations are quantized per token, so a row's result depends on that row and the weights alone:

    result = (q(x) @ codes) * scale of x * scale of w

Sums are in int32, which holds those of up to 133,000 inputs exactly. The result of a row with an
infinity or a NaN has no finite number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from jspec.device.int8 import INT8Weight, codes_of, largest_of, scales_of
from jspec.spec.axes import MeshAxis

# Tokens are padded to a multiple. Without matrix units, as XLA multiplies one token on GPUs, a
# plain step of an 8B model takes 52.5 ms on an H200; one of eight rows takes 3.3.
TOKENS = 8


def quantize(
    x: Float[Array, "M K"], *, axis: MeshAxis | None = None
) -> tuple[Int8[Array, "M K"], Float[Array, "M 1"]]:
    """Return (codes, scales f32): a scale is the largest magnitude of a row / 127.

    axis: the mesh axes whose shards each have some of a row's columns. They use one scale, so that
    the codes are the same with any number of shards.
    """
    numbers = x.astype(jnp.float32)
    scales = scales_of(largest_of(numbers, axis=-1, shards=axis))
    return codes_of(numbers, scales), scales


def int8_product(
    x: Float[Array, "*b K"],
    weight: INT8Weight,
    *,
    out_dtype: DTypeLike,
    axis: MeshAxis | None = None,
) -> Float[Array, "*b N"]:
    """Return x @ weight with quantized activations. axis: as in `quantize`; the result is the
    shard's summand."""
    codes, scales = quantize(x.reshape(-1, x.shape[-1]), axis=axis)
    num_tokens = codes.shape[0]
    codes = jnp.pad(codes, ((0, -num_tokens % TOKENS), (0, 0)))
    sums = jax.lax.dot(codes, weight.codes, preferred_element_type=jnp.int32)[:num_tokens]
    out = sums.astype(jnp.float32) * scales * weight.scales
    return out.astype(out_dtype).reshape(*x.shape[:-1], -1)
