"""Weights in fp8 (e4m3) times float32 scales, per output channel or per 128 x 128 block.

On a device the codes are column-major, [.., out, in] in memory, as matrix units read them: swapping
the last two axes is free.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.device.pytree import pytree
from jspec.spec.weight_format import FP8

BLOCK = FP8.size
E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0
# A constant factor instead of a division, which XLA would rewrite to one, rounded differently.
_PER_LARGEST = 1.0 / LARGEST
# The least magnitude: below it a scale could be 0, and 0 / 0 is NaN.
_SMALLEST = 2.0**-100


@pytree
class FP8Weight:
    """A weight [.., K, N]; fields are arrays, or a kernel's references to them."""

    codes: Any  # e4m3[.., K, N]
    scales: Any  # f32[.., N], or f32[.., ceil(K / 128), ceil(N / 128)]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def block(self) -> int | None:
        return BLOCK if len(self.scales.shape) == len(self.codes.shape) else None

    def dense(self, dtype: Any) -> Float[Array, "*x K N"]:
        numbers = self.codes.astype(jnp.float32) * self.scale_of_each()
        return numbers.astype(dtype)

    def scale_of_each(self) -> Float[Array, "*x _ N"]:
        """Return the scales of all values, [.., K, N], or [.., 1, N] with a scale per channel."""
        if self.block is None:
            return self.scales[..., None, :]
        *_, length, width = self.shape
        scales = self.scales.repeat(BLOCK, axis=-2).repeat(BLOCK, axis=-1)
        return scales[..., :length, :width]


def scales_of(most: Float[Array, "*x"]) -> Float[Array, "*x"]:
    return jnp.maximum(most, _SMALLEST) * _PER_LARGEST


def codes_of(x: Float[Array, "*x"], scales: Float[Array, "*x"]) -> Float[Array, "*x"]:
    return jnp.clip(x / scales, -LARGEST, LARGEST).astype(E4M3)


@partial(jax.jit, static_argnames="has_blocks")
def quantized_weight(weight: Float[Array, "K N"], *, has_blocks: bool) -> FP8Weight:
    """Quantize a weight. A scale is the largest magnitude of its channel or block / 448."""
    numbers = weight.astype(jnp.float32)
    if not has_blocks:
        scales = scales_of(jnp.abs(numbers).max(axis=0))
        return FP8Weight(codes=codes_of(numbers, scales), scales=scales)
    whole = jnp.pad(numbers, [(0, -size % BLOCK) for size in weight.shape])
    blocks = whole.reshape(whole.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales = scales_of(jnp.abs(blocks).max(axis=(1, 3), keepdims=True))
    codes = codes_of(blocks, scales).reshape(whole.shape)
    return FP8Weight(codes=codes[: weight.shape[0], : weight.shape[1]], scales=scales[:, 0, :, 0])
