"""A reader of compiled HLO text: its instructions, and which instruction produced each operand.

It reads only what the searches for copies need; it is not a full HLO parser.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = re.compile(r"^(ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\](\{(?P<layout>[^}]*)\})?")


@dataclass(frozen=True)
class ArrayType:
    """An array in a program. layout: minor to major, as text; space: 0 is main memory.

    tile: of the minor dimensions, the minor one last.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    space: int
    tile: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Instruction:
    """One line. types: the result, or the parts of a tuple; in_fusion: it writes no memory."""

    name: str
    opcode: str
    types: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    is_root: bool
    in_entry: bool
    in_fusion: bool
    computation: str
    line: str


def instructions(text: str) -> Iterator[Instruction]:
    """Yield every instruction of every computation.

    In:  `  %copy.1 = bf16[8,4]{0,1:T(8,128)(2,1)S(1)} copy(%param.2), metadata={...}`
    Out: copy.1, copy, (bf16, (8, 4), "0,1", 1), (param.2,)
    """
    fused = set(re.findall(r" fusion\(.*? calls=%?([\w.\-]+)", text))
    in_entry = in_fusion = False
    computation = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            computation = header["name"]
            in_entry, in_fusion = header[1] is not None, computation in fused
            continue
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        result, rest = _split_type(found["rest"])
        opcode, _, arguments = rest.partition("(")
        yield Instruction(
            name=found["name"],
            opcode=opcode.strip(),
            types=tuple(_array_type(x) for x in _ARRAY.finditer(result)),
            operands=tuple(re.findall(r"%([\w.\-]+)", arguments.partition(")")[0])),
            is_root=found[1] is not None,
            in_entry=in_entry,
            in_fusion=in_fusion,
            computation=computation,
            line=line,
        )


def _split_type(rest: str) -> tuple[str, str]:
    """Return (the result's type, the rest); a tuple's type ends at its closing parenthesis."""
    depth = 0
    for i, letter in enumerate(rest):
        depth += letter in "({"
        depth -= letter in ")}"
        if letter == " " and depth == 0:
            return rest[:i], rest[i + 1 :]
    return rest, ""


def _array_type(found: re.Match[str]) -> ArrayType:
    layout = found["layout"] or ""
    space, tile = re.search(r"S\((\d+)\)", layout), re.search(r"T\(([\d,]+)\)", layout)
    return ArrayType(
        dtype=found["dtype"],
        shape=tuple(int(n) for n in found["dims"].split(",") if n),
        layout=layout.partition(":")[0],
        space=int(space[1]) if space else 0,
        tile=tuple(int(n) for n in tile[1].split(",")) if tile else (),
    )
