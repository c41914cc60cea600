"""Finding copies of a KV pool in compiled text."""

from __future__ import annotations

import math

from tests.engine.compiled_text import Instruction, instructions

# Operations with a result of a pool's size that write none: views, pass-through, updates in place.
# A fusion counts by its instructions.
_FREE = {
    "after-all",
    "async-done",
    "bitcast",
    "call",
    "conditional",
    "copy-done",
    "custom-call",
    "dynamic-update-slice",
    "fusion",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "scatter",
    "tuple",
    "while",
}


def pool_copies(text: str, shape: tuple[int, ...]) -> list[str]:
    """Return the lines of compiled text that write as many elements as a pool of `shape` has.

    These are copies and their equivalents: a reshape to another tiling, a transpose, a convert, and
    prefetching a small pool into fast memory. Choose `shape` so that no other result is as large.
    """
    return [x.line for x in instructions(text) if _writes(x, math.prod(shape), shape)]


def _writes(instruction: Instruction, size: int, shape: tuple[int, ...]) -> bool:
    if instruction.opcode in _FREE or not instruction.types:
        return False
    result = instruction.types[0]
    if instruction.in_fusion:
        # A fusion writes only its result, but a copy inside may come after the root.
        is_copy = instruction.opcode in {"copy", "transpose"} and result.shape == shape
        return is_copy or (instruction.is_root and result.size == size)
    return result.size == size
