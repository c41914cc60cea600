"""Products with packed experts (packed.py) inside of a Triton kernel.

A round takes one group: 32 rows of codes become four tiles of weights, and each tile's product is
multiplied by its row of scales. As the weights are 2 ** -126 of what they stand for, the inputs
are multiplied by 2 ** 60 first, and the scales by 2 ** 66: all powers of two, and exact, for
inputs below 2 ** 67. A round's scales are asked for while the round before is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from jspec.pallas_kernels.experts.packed import (
    BLOCK,
    CODES,
    GROUP,
    PARTS,
    SCALES,
    bits_of,
    numbers_of,
)

_INPUTS, _SCALES = 60, 66  # exponents: 126 together
# The bits of each of the four inputs, as packed.bits_of, for the two codes of a register. One
# program each: Pallas takes one result of an assembly program.
_BITS = (
    "and.b32 $0, $1, 0x81C081C0;",
    "shl.b32 $0, $1, 3; and.b32 $0, $0, 0x81C081C0;",
    "shl.b32 $0, $1, 6; and.b32 $0, $0, 0x81C081C0;",
    """{ .reg .b32 a, b;
    shl.b32 a, $1, 1; and.b32 a, a, 0x80008000;
    shr.u32 b, $1, 3; and.b32 b, b, 0x01800180; or.b32 a, a, b;
    shr.u32 b, $1, 7; and.b32 b, b, 0x00400040; or.b32 $0, a, b; }""",
)

Columns = tuple[jax.Array, ...]


def packed_products(
    rows_ref: Any,
    row: jax.Array,
    is_pair: jax.Array,
    weights_ref: Mapping[str, Any],
    expert: jax.Array,
    columns: Columns,
    *,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """In a kernel: rows[row] @ weights[expert, :, c] for each c of `columns`, f32.

    Rows of no pair count as 0. interpret: by what jax can run anywhere.
    """
    codes_ref, scales_ref = weights_ref[CODES], weights_ref[SCALES]
    length, dtype = rows_ref.shape[1], rows_ref.dtype
    num_groups = codes_ref.shape[1] // BLOCK
    step = jnp.arange(BLOCK, dtype=jnp.int32)
    raise_by = 0 if interpret else _INPUTS

    def scales_at(group: jax.Array) -> list[list[jax.Array]]:
        return [
            [plt.load(scales_ref.at[expert, group * PARTS + part, c]) for part in range(PARTS)]
            for c in columns
        ]

    def add(group: jax.Array, carry: Any) -> Any:
        sums, scales = carry
        following = scales_at(jnp.minimum(group + 1, num_groups - 1))
        lefts = []
        for part in range(PARTS):
            at = group * GROUP + part * BLOCK + step
            inside = is_pair[:, None] & (at < length)[None]
            left = plt.load(rows_ref.at[row[:, None], at[None]], mask=inside, other=0.0)
            lefts.append((left * 2.0**raise_by).astype(dtype))
        code = group * BLOCK + step
        out = []
        for c, total, own in zip(columns, sums, scales, strict=True):
            tiles = _tiles(
                plt.load(codes_ref.at[expert, code[:, None], c[None]]), dtype, interpret=interpret
            )
            for left, tile, scale in zip(lefts, tiles, own, strict=True):
                product = jnp.dot(left, tile, preferred_element_type=jnp.float32)
                total = total + product * _power(scale, interpret=interpret)[None]
            out.append(total)
        return tuple(out), following

    zeros = tuple(jnp.zeros((row.shape[0], c.shape[0]), jnp.float32) for c in columns)
    sums, _ = lax.fori_loop(0, num_groups, add, (zeros, scales_at(jnp.int32(0) * expert)))
    whole: tuple[jax.Array, ...] = sums
    return whole


def _tiles(codes: jax.Array, dtype: Any, *, interpret: bool) -> list[jax.Array]:
    """The four tiles of weights, times 2 ** -126 unless they are interpreted."""
    if interpret:
        return [numbers_of(bits).astype(dtype) for bits in bits_of(codes)]
    like = jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)
    return [
        plt.elementwise_inline_asm(
            program, args=[codes], constraints="=r,r", pack=2, result_shape_dtypes=[like]
        )[0]
        for program in _BITS
    ]


def _power(scale: jax.Array, *, interpret: bool) -> jax.Array:
    """2 ** (scale - 127), times 2 ** 66 unless it is interpreted; f32."""
    if interpret:
        return jnp.ldexp(1.0, scale.astype(jnp.int32) - 127)
    exponent = scale.astype(jnp.int32) + _SCALES
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)
