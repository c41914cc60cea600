"""Weights in int8 with a float32 scale per output channel.

A value is its code times its scale. Codes are stored column-major like those of fp8 (`fp8.py`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from jspec.device.pytree import pytree
from jspec.spec.axes import MeshAxis

LARGEST = 127.0
# A constant factor instead of a division, as in fp8.py.
_PER_LARGEST = 1.0 / LARGEST
# The least magnitude: below it a scale could be 0, and 0 / 0 is NaN.
_SMALLEST = 2.0**-100


@pytree
class INT8Weight:
    """A weight [.., K, N]; fields are arrays, or what places them."""

    codes: Any  # i8[.., K, N]
    scales: Any  # f32[.., N]

    block: ClassVar[None] = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def dense(self, dtype: Any) -> Float[Array, "*x K N"]:
        return (self.codes.astype(jnp.float32) * self.scales[..., None, :]).astype(dtype)


def largest_of(
    x: Float[Array, "M N"], *, axis: int, shards: MeshAxis | None = None
) -> Float[Array, "m n"]:
    """Return the largest magnitude along an axis, which stays, over all `shards`; NaN if one is.

    Bits are compared, of which a NaN has the largest: platforms may drop one from a maximum of
    floats, and a code cannot be NaN.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    most = jnp.max(bits, axis=axis, keepdims=True)
    most = most if shards is None else jax.lax.pmax(most, shards)
    return jax.lax.bitcast_convert_type(most, jnp.float32)


def scales_of(most: Float[Array, "*x"]) -> Float[Array, "*x"]:
    return jnp.where(most < _SMALLEST, _SMALLEST, most) * _PER_LARGEST


def codes_of(x: Float[Array, "*x"], scales: Float[Array, "*x"]) -> Int8[Array, "*x"]:
    """Round to the nearest code, ties to even."""
    return jnp.clip(jnp.round(x / scales), -LARGEST, LARGEST).astype(jnp.int8)


@jax.jit
def quantized_weight(weight: Float[Array, "K N"]) -> INT8Weight:
    """Quantize a weight. A scale is the largest magnitude of its channel / 127."""
    numbers = weight.astype(jnp.float32)
    scales = scales_of(largest_of(numbers, axis=0))
    return INT8Weight(codes=codes_of(numbers, scales), scales=scales[0])
