"""Weights in fp8 (e4m3) with float32 scales: a scale per output channel, or per 128 x 128 block.

A number is its code times its scale. On a device the codes are stored column-major, [out, in] in
memory, because matrix units for fp8 read both operands along the inputs: `codes.T` is free.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.device.pytree import pytree
from jspec.spec.weight_format import FP8

BLOCK = FP8.size


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
        """Return the inputs under one scale; None: all of a channel's."""
        return BLOCK if len(self.scales.shape) == len(self.codes.shape) else None

    def dense(self, dtype: Any) -> Float[Array, "*x K N"]:
        numbers = self.codes.astype(jnp.float32) * self.scale_of_each()
        return numbers.astype(dtype)

    def scale_of_each(self) -> Float[Array, "*x _ N"]:
        """Return the scales of all numbers: [.., K, N], or [.., 1, N] if channels have one each."""
        if self.block is None:
            return self.scales[..., None, :]
        *_, length, width = self.shape
        scales = self.scales.repeat(BLOCK, axis=-2).repeat(BLOCK, axis=-1)
        return scales[..., :length, :width]
