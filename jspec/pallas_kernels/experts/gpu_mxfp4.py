"""Products with mxfp4 experts (device/mxfp4.py) inside a Triton kernel, which loads the codes of
several groups and the next scales at once, to hide the latency of small loads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from jspec.device.mxfp4 import BLOCK, GROUP, PARTS, MXFP4Weight, bits_of, decoded

# The four inputs of a code as in mxfp4.bits_of, times 2 ** 126, for the two codes of a register.
# One assembly program each, since Pallas supports one result per program.
_BITS = (
    "and.b32 a, $1, 0x81C081C0;",
    "shl.b32 a, $1, 3; and.b32 a, a, 0x81C081C0;",
    "shl.b32 a, $1, 6; and.b32 a, a, 0x81C081C0;",
    "shl.b32 a, $1, 1; and.b32 a, a, 0x80008000;"
    " shr.u32 b, $1, 3; and.b32 b, b, 0x01800180; or.b32 a, a, b;"
    " shr.u32 b, $1, 7; and.b32 b, b, 0x00400040; or.b32 a, a, b;",
)
_NUMBER = "{{ .reg .b32 a, b; {bits} mov.b32 b, 0x7E807E80; mul.rn.bf16x2 $0, a, b; }}"

Columns = tuple[jax.Array, ...]


def packed_products(
    rows_ref: Any,
    row: jax.Array,
    is_pair: jax.Array,
    weights_ref: MXFP4Weight,
    expert: jax.Array,
    columns: Columns,
    *,
    tile_k: int,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Compute gpu.tile_products. tile_k: whole groups. interpret: avoid inline assembly."""
    codes_ref, scales_ref = weights_ref.codes, weights_ref.scales
    length, dtype = rows_ref.shape[1], rows_ref.dtype
    num_groups = codes_ref.shape[1] // BLOCK
    unrolled = tile_k // GROUP
    step = jnp.arange(BLOCK, dtype=jnp.int32)

    def scales_at(group: jax.Array) -> list[list[jax.Array]]:
        first = jnp.minimum(group, num_groups - 1) * PARTS
        return [
            [plt.load(scales_ref.at[expert, first + part, c]) for part in range(PARTS)]
            for c in columns
        ]

    def codes_at(group: jax.Array) -> list[jax.Array]:
        code = jnp.minimum(group, num_groups - 1) * BLOCK + step
        return [plt.load(codes_ref.at[expert, code[:, None], c[None]]) for c in columns]

    def add(index: jax.Array, carry: Any) -> Any:
        sums, scales = carry
        groups = [index * unrolled + i for i in range(unrolled)]
        codes = [codes_at(group) for group in groups]
        following = [scales_at(group + unrolled) for group in groups]
        for group, of_columns, own in zip(groups, codes, scales, strict=True):
            tiles = [_tiles(each, dtype, interpret=interpret) for each in of_columns]
            for part in range(PARTS):
                at = group * GROUP + part * BLOCK + step
                inside = is_pair[:, None] & (at < length)[None]
                left = plt.load(rows_ref.at[row[:, None], at[None]], mask=inside, other=0.0)
                sums = tuple(
                    total
                    + _scaled(
                        jnp.dot(left, tile[part], preferred_element_type=jnp.float32), scale[part]
                    )
                    for total, tile, scale in zip(sums, tiles, own, strict=True)
                )
        return sums, following

    zeros = tuple(jnp.zeros((row.shape[0], c.shape[0]), jnp.float32) for c in columns)
    first = [scales_at(expert * 0 + i) for i in range(unrolled)]
    rounds = -(-num_groups // unrolled)  # after the last group all inputs are masked
    sums, _ = lax.fori_loop(0, rounds, add, (zeros, first))
    whole: tuple[jax.Array, ...] = sums
    return whole


def _tiles(codes: jax.Array, dtype: Any, *, interpret: bool) -> list[jax.Array]:
    if interpret:
        return [decoded(bits).astype(dtype) for bits in bits_of(codes)]
    like = jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)
    return [
        plt.elementwise_inline_asm(
            _NUMBER.format(bits=bits),
            args=[codes],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[like],
        )[0]
        for bits in _BITS
    ]


def _scaled(product: jax.Array, scale: jax.Array) -> jax.Array:
    return product * lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)[None]
