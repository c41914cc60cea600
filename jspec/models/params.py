"""The parameter table: every weight of a model declared once. Host data; no arrays, no jax.

A ParamSpec says where a weight stands in the params tree, its shape, how it is split over tensor
shards, under which names checkpoints store it, and what a random one looks like. Reading, writing,
dummy weights, placing and training all derive from the table.

Products are held as [in, out]; projections that read the same input are fused along `out`. With
several shards a fused weight holds, shard by shard, each part's share (`deal`): for H = 4 heads,
G = 2 kv heads

    1 shard    q0 q1 q2 q3 k0 k1 v0 v1
    2 shards   q0 q1 k0 v0 | q2 q3 k1 v1
    4 shards   q0 k0 v0 | q1 k0 v0 | q2 k1 v1 | q3 k1 v1        kv heads are repeated
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jspec.errors import ConfigError

Path = tuple[str | int, ...]
Shape = tuple[int, ...]


class Form(enum.Enum):
    """How a stored tensor lies, beside how it is held."""

    OUT_IN = "a projection [.., out, in], held as [.., in, out]"
    AS_HELD = "as it is held: a vector, a table, or [.., in, out]"


class Codec(enum.Enum):
    """How a stored tensor is packed. Packed layouts are read, never written."""

    MXFP4 = "NAME_blocks u8[.., in / 32, 16] and NAME_scales u8[.., in / 32] for a NAME [.., in]"
    MXFP4_CODES = "NAME_blocks, held packed: the codes of pallas_kernels.experts.packed"
    MXFP4_SCALES = "NAME_scales, held as they are"


class Init(enum.Enum):
    """What a random weight is drawn from."""

    FAN_IN = "normal, with a deviation of in ** -0.5"
    TABLE = "normal, with a deviation of 1"
    ONES = "ones"
    ZEROS = "zeros"
    IDS = "target ids that ascend evenly over the vocabulary"
    BITS = "random bits"
    SCALES = "2 ** -7, as an exponent: with random bits, numbers whose deviation is 0.023"


class Split(enum.Enum):
    """How a weight is divided over tensor shards."""

    NONE = "every shard holds all of it"
    OUT = "the last axis, part by part (column-parallel)"
    IN = "the axis before the last (row-parallel): the product is summed over the shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows `first`, `first + step`, ... of a stored tensor's output axis: a part of a weight.

    shape: of the stored tensor. name: may hold "{}", the index in a stack of `stack` tensors of
    this shape (one an expert). codec: how a stack [X, out, in] is packed; `name` is then what its
    tensors' names begin with, `shape` the unpacked one's. units: equal blocks of the output axis
    that are dealt to shards, whole. repeats: fewer units than shards may be dealt too, each to
    several shards. stride: stored rows from the begin of one unit to that of the next, where they
    do not lie together; `first` is then of the first unit. plus: what is held is the stored
    number and this, of a vector AS_HELD.
    """

    name: str
    shape: Shape
    size: int
    units: int = 1
    repeats: bool = False
    first: int = 0
    step: int = 1
    stride: int = 0
    form: Form = Form.OUT_IN
    stack: int = 0
    codec: Codec | None = None
    plus: float = 0.0

    @property
    def tensors(self) -> dict[str, Shape]:
        """The tensors of a checkpoint, and their shapes."""
        if self.codec is None:
            return dict.fromkeys(self.names, self.shape)
        blocks = (*self.shape[:-1], self.shape[-1] // 32)
        of_blocks, of_scales = (
            {f"{self.name}_blocks": (*blocks, 16)},
            {f"{self.name}_scales": blocks},
        )
        if self.codec is Codec.MXFP4:
            return of_blocks | of_scales
        return of_blocks if self.codec is Codec.MXFP4_CODES else of_scales

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.name.format(i) for i in range(self.stack)) if self.stack else (self.name,)

    @property
    def rows(self) -> slice | list[int]:
        """Of the stored output axis, all units."""
        if self.stride:
            begins = range(self.first, self.first + self.units * self.stride, self.stride)
            return [begin + row for begin in begins for row in range(self.size // self.units)]
        return slice(self.first, self.first + self.size * self.step, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One weight. shape: unsharded. layouts: each the parts that make it, in order; the first one
    that a checkpoint has is read, the first is written. No layout: its owner reads it.

    tied_to: where the checkpoint has no tensor for it, it is this weight, transposed.
    optional: zeros where the checkpoint has no tensor for it.
    is_float32: held so whatever the others' dtype is. num_bits: 8 or 16 for unsigned integers.
    by_columns: a backend that reads weights along their inputs lays it out as [out, in] in memory.
    """

    path: Path
    shape: Shape
    layouts: tuple[tuple[Part, ...], ...] = ()
    split: Split = Split.NONE
    init: Init = Init.FAN_IN
    tied_to: Path | None = None
    by_columns: bool = False
    is_integer: bool = False
    is_float32: bool = False
    optional: bool = False
    num_bits: int = 0

    def physical_shape(self, shards: int) -> Shape:
        """With the repeats of what has fewer units than there are shards."""
        if self.split is not Split.OUT or not self.layouts:
            return self.shape
        columns = sum(count for _, _, count in deal(self.layouts[0], shards))
        return (*self.shape[:-1], columns)


ParamTable = tuple[ParamSpec, ...]


def deal(parts: tuple[Part, ...], shards: int) -> Iterator[tuple[int, int, int]]:
    """(index of a part, first of its rows, how many): what the columns hold, in order.

    Raises ConfigError where a part's units can be neither divided among nor repeated over shards.
    """
    for part in parts:
        if part.units % shards and not (part.repeats and shards % part.units == 0):
            raise ConfigError(
                f"tp_size is {shards}; expected a divisor{' or a multiple' * part.repeats} of "
                f"{part.units}, the blocks of {part.name}"
            )
    for shard in range(shards):
        for i, part in enumerate(parts):
            unit = part.size // part.units
            count = max(part.units // shards, 1)
            yield i, shard * part.units // shards * unit, count * unit


def prefixed(table: Iterable[ParamSpec], *, path: Path, stored: str) -> ParamTable:
    """The table with `path` in front of every path and `stored` in front of every stored name."""
    return tuple(
        replace(
            spec,
            path=(*path, *spec.path),
            layouts=tuple(
                tuple(replace(part, name=stored + part.name) for part in layout)
                for layout in spec.layouts
            ),
        )
        for spec in table
    )


def or_fused(table: Iterable[ParamSpec], fused: Mapping[str, str]) -> ParamTable:
    """The table, some of whose weights may also be stored as one tensor each, part after part.

    fused: by the name of the product (the last key but one of its path), that tensor's, which
    stands where the parts' stand.

    In:  qkv of layers.0.self_attn.{q,k,v}_proj.weight, {"qkv": "qkv_proj"}
    Out: or of layers.0.self_attn.qkv_proj.weight, whose rows are q's, then k's, then v's
    """
    return tuple(_or_fused(spec, fused) for spec in table)


def _or_fused(spec: ParamSpec, fused: Mapping[str, str]) -> ParamSpec:
    name = fused.get(str(spec.path[-2])) if len(spec.path) > 1 else None
    if name is None or not spec.layouts:
        return spec
    separate, whole, first = spec.layouts[0], [], 0
    total = sum(part.size for part in separate)
    for part in separate:
        before, _, kind = part.name.rsplit(".", 2)
        stored = f"{before}.{name}.{kind}"
        shape = (total, *part.shape[1:])
        whole.append(replace(part, name=stored, shape=shape, first=first))
        first += part.size
    return replace(spec, layouts=(*spec.layouts, tuple(whole)))
