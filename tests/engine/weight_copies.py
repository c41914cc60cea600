"""A search for layout copies of weights in compiled text: a step should read weights as stored."""

from __future__ import annotations

from collections.abc import Iterable

from tests.engine.compiled_text import ArrayType, Instruction, instructions

# Through these, a value is still the array that it came from.
_VIEWS = {"bitcast", "copy-done", "get-tuple-element", "opt-barrier"}
_REWRITES = {"copy", "copy-start", "transpose", "reshape", "convert"}


def weight_copies(text: str, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Return the lines that rewrite an array with the shape of a weight's shard, or its transpose.

    shapes: the local shapes of the weights, matrices only. A copy into fast memory that keeps the
    layout is how a weight is streamed and does not count. Outside fusions, the rewritten array must
    come from an argument of the program; inside, a copy or transpose of such a shape is enough,
    unless it only divides the same order into other tiles, as products of 8 bits have them.
    """
    wanted = {tuple(sorted(shape)) for shape in shapes}
    known = list(instructions(text))
    entry = {x.name: x for x in known if x.in_entry}
    types = {(x.computation, x.name): x.types for x in known}
    return [x.line for x in known if _rewrites(x, entry, wanted) and not _is_retiled(x, types)]


def _is_retiled(
    instruction: Instruction, types: dict[tuple[str, str], tuple[ArrayType, ...]]
) -> bool:
    if instruction.opcode != "copy" or not instruction.in_fusion:
        return False
    sources = types.get((instruction.computation, instruction.operands[0]), ())
    result = instruction.types[0]
    return any(x.layout == result.layout and x.tile != result.tile for x in sources)


def _rewrites(
    instruction: Instruction, entry: dict[str, Instruction], wanted: set[tuple[int, ...]]
) -> bool:
    if instruction.opcode not in _REWRITES or not instruction.types:
        return False
    if instruction.in_fusion:
        turned = "dimensions={0,1}" not in instruction.line
        of_weight = tuple(sorted(instruction.types[0].shape)) in wanted
        return instruction.opcode in {"copy", "transpose"} and turned and of_weight
    source = _argument(instruction, entry) if instruction.in_entry else None
    if source is None or tuple(sorted(source.shape)) not in wanted:
        return False
    result = instruction.types[0]
    streamed = result.space != source.space and result.layout == source.layout
    return not (instruction.opcode in {"copy", "copy-start"} and streamed)


def _argument(instruction: Instruction, entry: dict[str, Instruction]) -> ArrayType | None:
    """Return the type of the program's argument that the first operand is, if it is one."""
    while instruction.operands:
        found = entry.get(instruction.operands[0])
        if found is None:
            return None
        if found.opcode == "parameter":
            return found.types[0]
        if found.opcode not in {*_VIEWS, "copy-start"}:
            return None
        instruction = found
    return None
