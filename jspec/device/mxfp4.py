"""The memory layout of mxfp4 weights: 4-bit floats (e2m1), a scale per block of 32 inputs.

A stack of weights [X, K, N] is stored as

    codes   u16[X, S, N, 64]    S steps of two groups of 128 inputs, the last ones zero-padded
    scales  u32[X, S, 2 * N]    for 32 outputs those of one group, then those of the other; byte p
                                is for a group's p-th block of 32 inputs, s means 2 ** (s - 127)

Code 32 g + r of a step has the inputs r, 32 + r, 64 + r and 96 + r of its group g, one of each
block, so 32 codes of each output are four tiles of weights, each with a scale for each output. A
few shifts and masks turn each into a bfloat16 (`bits_of`), exactly the value times 2 ** -126, also
for 0 and 0.5:

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
GROUPS = MXFP4.groups  # that a kernel reads at once
MOST_SCALE = 128  # 2 ** 126 times a larger one exceeds bfloat16


@pytree
class MXFP4Weight:
    """A stack of weights [X, K, N]; fields are arrays, or a kernel's references to them."""

    codes: Any  # u16[X, S, N, 64]
    scales: Any  # u32[X, S, 2 * N]
    length: int = static()  # K, without padding

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-3], self.length, self.codes.shape[-2])

    def dense(self, dtype: Any) -> Float[Array, "X K N"]:
        num_experts, steps, width, _ = self.codes.shape
        # [X, S, group, part, input, N]
        codes = self.codes.reshape(num_experts, steps, width, GROUPS, BLOCK).transpose(
            0, 1, 3, 4, 2
        )
        blocks = jnp.stack([decoded(bits) for bits in bits_of(codes)], axis=3)
        scales = self.scales.reshape(num_experts, steps, width // BLOCK, GROUPS, BLOCK)
        scales = scales.swapaxes(2, 3).reshape(num_experts, steps, GROUPS, width)
        power = jnp.stack(powers_of(scales), axis=3)[:, :, :, :, None]
        whole = jnp.ldexp(blocks, power).reshape(num_experts, -1, width)
        return whole[:, : self.length].astype(dtype)


def powers_of(scales: Any) -> list[Any]:
    """Return the exponents i32 of a group's blocks, from -127. scales: u32, any shape"""
    each = (scales >> np.uint32(8 * part) & np.uint32(255) for part in range(PARTS))
    return [scale.astype(jnp.int32) - 127 for scale in each]


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
    """Pack nibbles u8[N, K] (sign, exponent, mantissa) into codes u16[S, N, 64], on the host."""
    width, length = nibbles.shape
    steps = -(-length // (GROUPS * GROUP))
    padded = np.zeros((width, steps * GROUPS * GROUP), np.uint16)
    padded[:, :length] = nibbles
    parts = padded.reshape(width, steps * GROUPS, PARTS, BLOCK)
    sign, magnitude = np.moveaxis(parts >> 3, 2, 0), np.moveaxis(parts & 7, 2, 0)
    codes = sign[3] << 14 | (magnitude[3] >> 1) << 10 | (magnitude[3] & 1) << 13
    for part, (high, low) in enumerate(((15, 6), (12, 3), (9, 0))):
        codes |= sign[part] << high | magnitude[part] << low
    return codes.reshape(width, steps, GROUPS * BLOCK).swapaxes(0, 1)


def pack_scales(scales: np.ndarray) -> np.ndarray:
    """Arrange scales u8[N, K / 32] as u32[S, 2 N], on the host. N: whole blocks."""
    width, count = scales.shape
    steps = -(-count // (GROUPS * PARTS))
    held = np.zeros((width, steps * GROUPS * PARTS), np.uint8)
    held[:, :count] = scales
    words = held.view("<u4").astype(np.uint32).reshape(width // BLOCK, BLOCK, steps, GROUPS)
    return words.transpose(2, 0, 3, 1).reshape(steps, GROUPS * width)
