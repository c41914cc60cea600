"""Products with fp8 experts (device/fp8.py) inside a Triton kernel: codes become the activations'
dtype, exactly, and sums of 128 inputs are multiplied by their block's scale in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from jspec.device.fp8 import BLOCK, FP8Weight
from jspec.device.pytree import pytree
from jspec.device.weights import Weight


@pytree
class ColumnMajor:
    """A stack of fp8 weights [X, K, N] with codes as on a device; fields are arrays or references
    to them."""

    codes: Any  # e4m3[X, N, K]
    scales: Any  # f32[X, N], or f32[X, ceil(K / 128), ceil(N / 128)]

    @property
    def has_blocks(self) -> bool:
        return len(self.scales.shape) == 3

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, width, length = self.codes.shape
        return num_experts, length, width


def operand(weight: Weight) -> Any:
    """Return a kernel's operand for experts' weights of any format."""
    if not isinstance(weight, FP8Weight):
        return weight
    codes = jnp.swapaxes(weight.codes, 1, 2)  # no copy: codes are column-major
    return ColumnMajor(codes=codes, scales=weight.scales)


def fp8_products(
    rows_ref: Any,
    row: jax.Array,
    is_pair: jax.Array,
    weights_ref: ColumnMajor,
    expert: jax.Array,
    columns: tuple[jax.Array, ...],
    *,
    tile_k: int,
) -> tuple[jax.Array, ...]:
    """Compute gpu.tile_products. tile_k divides 128, and each of `columns` is in one block."""
    codes_ref, scales_ref = weights_ref.codes, weights_ref.scales
    rounds = rows_ref.shape[1] // tile_k
    step = jnp.arange(tile_k, dtype=jnp.int32)

    def parts_of(k: jax.Array) -> list[jax.Array]:
        at = k * tile_k + step
        left = plt.load(rows_ref.at[row[:, None], at[None]], mask=is_pair[:, None], other=0.0)
        codes = [plt.load(codes_ref.at[expert, c[None], at[:, None]]) for c in columns]
        return [
            jnp.dot(left, tile.astype(left.dtype), preferred_element_type=jnp.float32)
            for tile in codes
        ]

    zeros = tuple(jnp.zeros((row.shape[0], c.shape[0]), jnp.float32) for c in columns)
    if not weights_ref.has_blocks:

        def add(k: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(total + part for total, part in zip(sums, parts_of(k), strict=True))

        sums: tuple[jax.Array, ...] = lax.fori_loop(0, rounds, add, zeros)
        scales = [plt.load(scales_ref.at[expert, c]) for c in columns]
        return tuple(total * scale[None] for total, scale in zip(sums, scales, strict=True))

    strips = [jnp.min(c) // BLOCK for c in columns]

    def scales_at(k: jax.Array) -> tuple[jax.Array, ...]:
        block = jnp.minimum(k, rounds - 1) * tile_k // BLOCK
        return tuple(plt.load(scales_ref.at[expert, block, strip]) for strip in strips)

    def add_scaled(k: jax.Array, carry: Any) -> Any:
        sums, scales = carry
        following = scales_at(k + 1)  # early, to hide the latency of a small load
        each = zip(sums, parts_of(k), scales, strict=True)
        return tuple(total + part * scale for total, part, scale in each), following

    sums, _ = lax.fori_loop(0, rounds, add_scaled, (zeros, scales_at(expert * 0)))
    return sums
