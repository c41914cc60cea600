"""The memory layout of mxfp4 weights: 4-bit floats (e2m1), a scale per block of 32 inputs.

A stack of weights [X, K, N] is stored as

    codes   u16[X, 32 * G, N]   G groups of 128 inputs, the last one zero-padded
    scales  u8 [X, 4 * G, N]    of each block of 32 inputs; s means 2 ** (s - 127)

Row 32 g + r of the codes has the inputs r, 32 + r, 64 + r and 96 + r of group g, one of each block,
so a tile of 32 rows is four tiles of weights, each with one row of scales. A few shifts and masks
turn each into a bfloat16 (`bits_of`), exactly the value times 2 ** -126, also for 0 and 0.5:

    bit       15  14  13  12  11 10  9   8  7  6   5  4  3   2  1  0
    of input  s0  s3  m3  s1  e3 e3  s2  e0 e0 m0  e1 e1 m1  e2 e2 m2

The number format is from OCP Microscaling Formats, version 1.0; the order is specific to jspec.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jspec.device.pytree import pytree, static
from jspec.spec.weight_format import MXFP4

BLOCK = MXFP4.group  # inputs under one scale
PARTS = MXFP4.parts  # blocks per group, inputs per code
GROUP = BLOCK * PARTS


@pytree
class MXFP4Weight:
    """A stack of weights [X, K, N]; fields are arrays, or a kernel's references to them."""

    codes: Any  # u16[X, R, N]
    scales: Any  # u8[X, S, N]
    length: int = static()  # K, without padding

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-2], self.length, self.codes.shape[-1])

    def dense(self, dtype: Any) -> Float[Array, "X K N"]:
        num_experts, rows, width = self.codes.shape
        groups = rows // BLOCK
        parts = jnp.stack([decoded(bits) for bits in bits_of(self.codes)], axis=1)
        blocks = parts.reshape(num_experts, PARTS, groups, BLOCK, width).swapaxes(1, 2)
        power = self.scales.reshape(num_experts, groups, PARTS, 1, width).astype(jnp.int32) - 127
        whole = jnp.ldexp(blocks, power).reshape(num_experts, groups * GROUP, width)
        return whole[:, : self.length].astype(dtype)


def bits_of(codes: Any) -> tuple[Any, ...]:
    """Return the bfloat16 bits of each code's four inputs times 2 ** -126. codes: u16, any shape"""
    kept = codes.dtype.type(0x81C0)

    def bits(shift: int, mask: int) -> Any:
        moved = codes << shift if shift >= 0 else codes >> -shift
        return moved & codes.dtype.type(mask)

    return (
        codes & kept,
        bits(3, 0x81C0),
        bits(6, 0x81C0),
        bits(1, 0x8000) | bits(-3, 0x0180) | bits(-7, 0x0040),
    )


def decoded(bits: Any) -> Any:
    """Decode `bits_of` to f32 with integer operations: a CPU may flush subnormals to 0."""
    magnitude = (bits >> 6).astype(jnp.int32) & 7
    exponent, half = magnitude >> 1, 0.5 * (magnitude & 1).astype(jnp.float32)
    number = jnp.where(exponent == 0, half, jnp.ldexp(1 + half, jnp.maximum(exponent - 1, 0)))
    return jnp.where(bits >= 0x8000, -number, number)


def pack(nibbles: np.ndarray) -> np.ndarray:
    """Pack nibbles u8[N, K] (sign, exponent, mantissa) into codes u16[N, 32 G], on the host."""
    width, length = nibbles.shape
    groups = -(-length // GROUP)
    padded = np.zeros((width, groups * GROUP), np.uint16)
    padded[:, :length] = nibbles
    parts = padded.reshape(width, groups, PARTS, BLOCK)
    sign, magnitude = np.moveaxis(parts >> 3, 2, 0), np.moveaxis(parts & 7, 2, 0)
    codes = sign[3] << 14 | (magnitude[3] >> 1) << 10 | (magnitude[3] & 1) << 13
    for part, (high, low) in enumerate(((15, 6), (12, 3), (9, 0))):
        codes |= sign[part] << high | magnitude[part] << low
    return codes.reshape(width, groups * BLOCK)


def padded_scales(scales: np.ndarray) -> np.ndarray:
    """Pad scales u8[N, K / 32] to u8[N, 4 G], on the host."""
    width, count = scales.shape
    held = np.zeros((width, -(-count // PARTS) * PARTS), np.uint8)
    held[:, :count] = scales
    return held
