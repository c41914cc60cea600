"""The scheduled program of a step as libtpu prints it: computations, cycles, bytes, flops.

A matrix unit's work and the memory that an operation touches are read off the instructions.
libtpu writes into each instruction `bundle_analysis_data`, the cycles of its scheduled bundles by
its evaluator (with --xla_jf_dump_static_llo_profile_to), and `window_config`, the estimate of XLA's
cost model, by which it chose the tiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tests.engine.compiled_text import ArrayType, Instruction, instructions

STUB = "stub_"  # the names of empty kernels begin so (dump_step)
COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    "collective-broadcast",
)
_ITEM_BYTES = {
    **{"pred": 1.0, "s4": 0.5, "u4": 0.5, "s8": 1.0, "u8": 1.0, "bf16": 2.0, "f16": 2.0},
    **{"s16": 2.0, "u16": 2.0, "f32": 4.0, "s32": 4.0, "u32": 4.0, "s64": 8.0, "u64": 8.0},
    **{"f8e4m3fn": 1.0, "f8e5m2": 1.0},
}
_CALLED = re.compile(
    r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:called_computations|branch_computations)=\{([^}]*)\}"
)
_SAME = {"bitcast", "reshape", "copy", "convert"}  # a value under another name
_SLICES = {"dynamic-slice", "gather", "slice"}


def padded_bytes(array: ArrayType) -> float:
    """Return the bytes of an array in its layout, with what fills its tiles."""
    dims = list(array.shape)
    order = [int(n) for n in array.layout.split(",") if n]
    # The last number of a tile is along the minor dimension.
    for axis, tile in zip(order, reversed(array.tile), strict=False):
        dims[axis] = -(-dims[axis] // tile) * tile
    return math.prod(dims) * _ITEM_BYTES.get(array.dtype, 0.0)


def is_in_hbm(array: ArrayType) -> bool:
    return array.space == 0


def cycles(op: Instruction, *, by_cost_model: bool = False) -> int | None:
    """Return the evaluator's cycles of an instruction, or those of XLA's cost model."""
    part = "window_config" if by_cost_model else "bundle_analysis_data"
    found = re.search(rf'"{part}":\{{.*?"estimated_cycles":"(\d+)"', op.line)
    return int(found[1]) if found else None


def called(op: Instruction) -> list[str]:
    found = [one or many for one, many in _CALLED.findall(op.line)]
    return [name.strip().lstrip("%") for names in found for name in names.split(",")]


def trip_count(op: Instruction) -> int | None:
    found = re.search(r'known_trip_count":\{"n":"(\d+)"', op.line)
    return int(found[1]) if found else None


def collective_kind(op: Instruction) -> str | None:
    """Return the kind of a collective, synchronous or started, if the instruction is one."""
    name = op.opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def is_kernel(op: Instruction) -> bool:
    return op.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in op.line


def kernel_name(op: Instruction) -> str:
    """`%stub_paged_attention_rows_4.2 = ...`: paged_attention_rows_4."""
    return op.name.removeprefix(STUB).partition(".")[0]


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    text: str

    @cached_property
    def computations(self) -> Mapping[str, Sequence[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for op in instructions(self.text):
            found.setdefault(op.computation, []).append(op)
        return found

    @cached_property
    def entry(self) -> Sequence[Instruction]:
        return next(ops for ops in self.computations.values() if ops[0].in_entry)

    @cached_property
    def _frames(self) -> Mapping[str, tuple[str, str]]:
        """Stack frame: (the line of jspec, or nothing; the frame that called it)."""
        tables = {
            name: dict(line.split(" ", 1) for line in found[1].splitlines())
            for name in ("FileNames", "FileLocations", "StackFrames")
            if (found := re.search(rf"^{name}\n((?:\d+ .*\n)+)", self.text, re.MULTILINE))
        }
        frames = {}
        for key, line in tables.get("StackFrames", {}).items():
            frame = dict(re.findall(r"(\w+)=(\d+)", line))
            location = tables["FileLocations"].get(frame.get("file_location_id", ""), "")
            place = dict(re.findall(r"(\w+)=(\d+)", location))
            file = tables["FileNames"].get(place.get("file_name_id", ""), "").strip('"')
            _, package, inside = file.rpartition("/jspec/")
            line = f"{inside}:{place.get('line', '?')}" if package else ""
            frames[key] = (line, frame.get("parent_frame_id", ""))
        return frames

    def source(self, op: Instruction) -> str:
        """Return the innermost line of jspec that made an instruction, or nothing."""
        found = re.search(r"stack_frame_id=(\d+)", op.line)
        key, left = (found[1] if found else ""), 200
        while key in self._frames and left:
            line, parent = self._frames[key]
            if line:
                return line
            key, left = parent, left - 1
        return ""

    def flops(self, op: Instruction) -> float:
        """Return the floating-point operations of an instruction's products."""
        if op.opcode in ("convolution", "dot"):
            return self._product(op)
        if op.opcode == "fusion":
            return sum(self.flops(x) for name in called(op) for x in self.computations[name])
        return 0.0

    def _product(self, op: Instruction) -> float:
        types = {x.name: x.types[0] for x in self.computations[op.computation] if x.types}
        out = math.prod(op.types[0].shape)
        labels = re.search(r"dim_labels=\w+_(\w+)->", op.line)
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.line)
        if labels and op.operands[1] in types:
            shape = types[op.operands[1]].shape
            inner = [n for label, n in zip(labels[1], shape, strict=True) if label != "o"]
        elif contracted and op.operands[0] in types:
            inner = [types[op.operands[0]].shape[int(n)] for n in contracted[1].split(",")]
        else:
            return 0.0
        return 2.0 * out * math.prod(inner)

    def hbm_bytes(self, op: Instruction) -> float:
        """Return what an instruction reads and writes in HBM; of a gather or slice, its rows."""
        known = {x.name: x for x in self.computations[op.computation]}
        total = 0.0
        for index, name in enumerate(op.operands):
            source = known.get(name)
            if source is None or len(source.types) != 1 or not is_in_hbm(source.types[0]):
                continue
            whole = padded_bytes(source.types[0])
            part: float | None = None
            if op.opcode == "fusion":
                part = self._touched(called(op)[0], index)
            elif op.opcode in _SLICES and index == 0:
                part = padded_bytes(op.types[0])
            total += whole if part is None else min(part, whole)
        in_place = op.opcode in ("custom-call", "dynamic-update-slice", "scatter")
        if op.opcode == "fusion":
            roots = [x for x in self.computations[called(op)[0]] if x.is_root]
            in_place = roots[0].opcode in ("dynamic-update-slice", "scatter")
        if not in_place:  # an update in place is counted by what it touches
            total += sum(padded_bytes(x) for x in op.types if is_in_hbm(x))
        return total

    def _touched(self, computation: str, index: int) -> float | None:
        """Return the bytes of a computation's parameter that it reads; None: all of them."""
        body = self.computations[computation]
        parameter = re.compile(rf" parameter\({index}\)")
        work = [x.name for x in body if x.opcode == "parameter" and parameter.search(x.line)]
        known = {x.name: x for x in body}
        total = 0.0
        while work:
            name = work.pop()
            for user in (x for x in body if name in x.operands):
                if user.is_root and user.opcode in _SAME:
                    return None
                if user.opcode in _SAME or self._is_view(user):
                    work.append(user.name)
                    continue
                part = self._touched_by(user, user.operands.index(name), known)
                if part is None:
                    return None
                total += part
        return total

    def _is_view(self, op: Instruction) -> bool:
        """Return True if a fusion gives its operand another name or shape and does nothing else."""
        return op.opcode == "fusion" and all(
            x.opcode == "parameter" or x.opcode in _SAME for x in self.computations[called(op)[0]]
        )

    def _touched_by(
        self, user: Instruction, place: int, known: Mapping[str, Instruction]
    ) -> float | None:
        if user.opcode == "fusion":
            return self._touched(called(user)[0], place)
        if user.opcode in _SLICES:
            return padded_bytes(user.types[0]) if place == 0 else None
        if user.opcode in ("dynamic-update-slice", "scatter") and place == 0:
            update = user.operands[1 if user.opcode == "dynamic-update-slice" else -1]
            times = 1 if user.opcode == "dynamic-update-slice" else 2  # a scatter reads, too
            return times * padded_bytes(known[update].types[0]) if update in known else None
        return None

    def parameters(self, op: Instruction) -> set[str]:
        """Return which arguments of the step an entry instruction's operands are, by their paths
        (`params['target']['embed']['table']`), through bitcasts, prefetches and slices."""
        found: set[str] = set()
        work, seen = list(op.operands), set()
        known = self._by_name
        while work:
            name = work.pop()
            source = known.get(name)
            if source is None or name in seen:
                continue
            seen.add(name)
            if source.opcode == "parameter":
                path = re.search(r'op_name="([^"]*)"', source.line)
                found |= {path[1].replace("\\'", "'")} if path else set()
            elif (
                source.opcode in _SAME
                or source.opcode == "get-tuple-element"
                or source.opcode.endswith(("-start", "-done"))
                or "ConcatBitcast" in source.line
            ):
                work += source.operands
        return found

    @cached_property
    def _by_name(self) -> Mapping[str, Instruction]:
        return {x.name: x for x in self.entry}
