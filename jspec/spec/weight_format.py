"""Weight formats, as data: the arrays that store a weight of logical shape [.., in, out]. No
jax."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jspec.spec.axes import Axes

Shape = tuple[int, ...]


class Op(enum.Enum):
    LINEAR = "linear"
    LOGITS = "logits"
    GATED = "gated"
    EXPERTS = "experts"


class ArraySpec(NamedTuple):
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Dense:
    name: ClassVar[str] = "dense"
    dtype: str

    def arrays(self, shape: Shape) -> Mapping[str, ArraySpec]:
        return {"values": ArraySpec(shape, self.dtype)}


@dataclass(frozen=True, slots=True)
class MXFP4:
    """4-bit floats (e2m1) with a power of two for each `group` inputs (e8m0). A code has `parts`
    inputs, each of another group; device/mxfp4.py has the order."""

    name: ClassVar[str] = "mxfp4"
    group: ClassVar[int] = 32
    parts: ClassVar[int] = 4
    groups: ClassVar[int] = 2

    def arrays(self, shape: Shape) -> Mapping[str, ArraySpec]:
        *stack, length, width = shape
        steps = -(-length // (self.groups * self.parts * self.group))
        return {
            "codes": ArraySpec((*stack, steps, width, self.groups * self.group), "uint16"),
            "scales": ArraySpec((*stack, steps, self.groups * width), "uint32"),
        }


@dataclass(frozen=True, slots=True)
class FP8:
    """8-bit floats (e4m3) with a float32 scale per output channel, or per block of 128 x 128."""

    name: ClassVar[str] = "fp8"
    size: ClassVar[int] = 128
    has_blocks: bool = False

    def scale_axes(self, axes: Axes) -> Axes:
        """Return the axes of the scales of a weight with these axes; each shard has its own."""
        return axes if self.has_blocks else (*axes[:-2], *axes[-1:])

    def arrays(self, shape: Shape) -> Mapping[str, ArraySpec]:
        *stack, length, width = shape
        counts = (-(-length // self.size), -(-width // self.size)) if self.has_blocks else (width,)
        return {
            "codes": ArraySpec(shape, "float8_e4m3fn"),
            "scales": ArraySpec((*stack, *counts), "float32"),
        }


@dataclass(frozen=True, slots=True)
class INT8:
    """8-bit integers from -127 to 127 with a float32 scale per output channel."""

    name: ClassVar[str] = "int8"
    has_blocks: ClassVar[bool] = False

    def scale_axes(self, axes: Axes) -> Axes:
        return (*axes[:-2], *axes[-1:])

    def arrays(self, shape: Shape) -> Mapping[str, ArraySpec]:
        *stack, _, width = shape
        return {
            "codes": ArraySpec(shape, "int8"),
            "scales": ArraySpec((*stack, width), "float32"),
        }


W8A8 = FP8 | INT8  # products quantize activations to the weight's kind of codes
# The values of --quantization that quantize a checkpoint, with the format that each makes.
QUANTIZATIONS: Mapping[str, W8A8] = {"fp8": FP8(), "w8a8_int8": INT8()}
WeightFormat = Dense | MXFP4 | FP8 | INT8
FORMATS: tuple[type[WeightFormat], ...] = (Dense, MXFP4, FP8, INT8)
# The formats of some weights: all of a product, or one by its path. All others are dense.
Formats = tuple[tuple[Op | tuple[str | int, ...], WeightFormat], ...]


def num_bytes(format: WeightFormat, shape: Shape) -> int:
    return sum(math.prod(x.shape) * itemsize(x.dtype) for x in format.arrays(shape).values())


def itemsize(dtype: str) -> int:
    """Return the bytes of a number by its dtype's name, whose first digits are its bits."""
    bits = re.search(r"\d+", dtype)
    if bits is None:
        raise ValueError(f"dtype is {dtype!r}; expected a name with its bits, such as bfloat16")
    return int(bits[0]) // 8
