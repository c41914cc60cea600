"""Parts of gpu_mxfp4 that Pallas cannot express: on registers of a warp group, in MLIR and PTX.

A thread has two rows of a matrix [64, n] in wgmma's layout, r and r + 8, and two neighbouring
columns of either in a register.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.device.mxfp4 import PARTS

ROW_AXIS = 4  # of the registers' array: r and r + 8
# The four inputs of a code as in mxfp4.bits_of, times 2 ** -126, for two codes in a register.
_BITS = (
    "and.b32 a, $1, 0x81C081C0;",
    "shl.b32 a, $1, 3; and.b32 a, a, 0x81C081C0;",
    "shl.b32 a, $1, 6; and.b32 a, a, 0x81C081C0;",
    "shl.b32 a, $1, 1; and.b32 a, a, 0x80008000;"
    " shr.u32 b, $1, 3; and.b32 b, b, 0x01800180; or.b32 a, a, b;"
    " shr.u32 b, $1, 7; and.b32 b, b, 0x00400040; or.b32 a, a, b;",
)
_NUMBER = "{{ .reg .b32 a, b; {bits} mul.rn.bf16x2 $0, a, $2; }}"
# Two bfloat16 of 2 ** (s - 1), which bring numbers times 2 ** -126 to their size, of a byte s.
_FACTOR = "{{ .reg .b32 a; bfe.u32 a, $1, {start}, 8; mad.lo.u32 $0, a, 0x00800080, 0x3F003F00; }}"


def unpacked(codes: jax.Array, scales: jax.Array, *, layouts: tuple[Any, Any]) -> jax.Array:
    """Return the bf16 numbers [64, 128] of u16 codes [64, 32] and u32 scales [64] (device/mxfp4.py)
    with scales of up to 2 ** 1. layouts: of matrices, and of a vector of their rows."""
    rows, width = codes.shape
    like: Any = plgpu.ShapeDtypeStruct((rows, PARTS * width), jnp.bfloat16, layout=layouts[0])
    found: jax.Array = _inline(layouts, like)(_unpack)(codes, scales)
    return found


def store_turned(values: jax.Array, target: Any, bias: Sequence[Any], *, layout: Any) -> None:
    """Store values [halves * C, N] to shared memory [halves, N, C].

    bias: of each half [C], in global memory, added in float32; or none. layout: of the values
    """
    types = (layout, *(plgpu.RefType() for _ in (target, *bias)))
    _inline(types, None)(_store_turned)(values, target, *bias)


def _inline(arg_types: Any, return_type: Any) -> Any:
    inline: Any = getattr(plgpu, "inline_mgpu")  # noqa: B009  # mypy reads another version of jax
    return inline(arg_types=arg_types, return_type=return_type)


def _mlir(*names: str) -> list[Any]:
    return [importlib.import_module(f"jaxlib.mlir.{name}") for name in names]


def _unpack(_: Any, codes: Any, scales: Any) -> Any:
    ir, llvm, vector = _mlir("ir", "dialects.llvm", "dialects.vector")
    word = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def run(text: str, *given: Any) -> Any:
        constraints = ",".join(["=r", *("r" for _ in given)])
        return llvm.inline_asm(word, given, text, constraints, asm_dialect=0)

    of_rows = [
        vector.extract(register, dynamic_position=[], static_position=[0])
        for register in scales.registers.flat
    ]
    parts = []
    for part, bits in enumerate(_BITS):
        factors = [run(_FACTOR.format(start=8 * part), scale) for scale in of_rows]
        numbers = np.empty(codes.registers.shape, object)
        for index in np.ndindex(numbers.shape):
            given = llvm.bitcast(word, codes.registers[index]), factors[index[ROW_AXIS]]
            numbers[index] = llvm.bitcast(pair, run(_NUMBER.format(bits=bits), *given))
        parts.append(numbers)
    registers = np.concatenate(parts, axis=1)
    return type(codes)(_registers=registers, _layout=codes.layout, _is_signed=None)


def _store_turned(_: Any, values: Any, target: Any, *bias: Any) -> None:
    ir, arith, memref = _mlir("ir", "dialects.arith", "dialects.memref")
    index, wide = ir.IndexType.get(), ir.F32Type.get()
    halves, _, columns = ir.MemRefType(target.type).shape
    per_half, zero = arith.constant(index, columns), arith.constant(index, 0)

    def with_bias(value: Any, half: Any, column: Any) -> Any:
        added = [arith.extf(wide, memref.load(each, [column])) for each in bias]
        if not added:
            return value
        is_first = arith.cmpi(arith.CmpIPredicate.eq, half, zero)
        own = added[0] if halves == 1 else arith.select(is_first, *added)
        return arith.truncf(value.type, arith.addf(arith.extf(wide, value), own))

    def store(value: Any, place: tuple[Any, ...]) -> None:
        row, token = place
        half, column = arith.divui(row, per_half), arith.remui(row, per_half)
        memref.store(with_bias(value, half, column), target, [half, token, column])

    values.foreach(store)
