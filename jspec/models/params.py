"""The parameter table: every weight of a model, declared once, as host data.

Reading, writing, dummy weights, placement and training all derive from the table. Products are [in,
out]; projections of the same input are fused along `out`. With several shards a fused weight has,
shard by shard, each part's share (`shard_columns`). For H = 4 heads and G = 2 kv heads:

    1 shard    q0 q1 q2 q3 k0 k1 v0 v1
    2 shards   q0 q1 k0 v0 | q2 q3 k1 v1
    4 shards   q0 k0 v0 | q1 k0 v0 | q2 k1 v1 | q3 k1 v1        kv heads are repeated
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from jspec.config.expert_placement import ExpertMap
from jspec.errors import ConfigError
from jspec.spec.axes import EXPERT, MODEL, TENSOR, Axes, MeshAxis, mesh_axis
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.weight_format import MXFP4, Dense, Formats, Op, Shape, WeightFormat

ParamPath = tuple[str | int, ...]
INTEGERS, FLOAT32 = Dense("int32"), Dense("float32")


class Form(enum.Enum):
    """How a stored tensor is laid out, relative to the params."""

    OUT_IN = "a projection [.., out, in], transposed in the params"
    AS_IS = "as in the params: a vector, a table, or [.., in, out]"


class Order(enum.Enum):
    """How a weight [in, out] is stored on a device."""

    ROWS = "row-major"
    COLUMNS = "column-major, as [out, in]"
    BACKENDS = "column-major for backends whose kernels read it so (`Ops.column_major`)"


class Init(enum.Enum):
    FAN_IN = "normal, with a deviation of in ** -0.5"
    TABLE = "normal, with a deviation of 1"
    ONES = "ones"
    ZEROS = "zeros"
    IDS = "target ids that ascend evenly over the vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a weight: entries first, first + step, ... of a stored tensor's output axis. It has
    `num_blocks` equal blocks (such as heads), which are never split over shards."""

    name: str  # may contain "{}", the index in the stack; with a format, a prefix of names
    shape: Shape  # of the stored tensor; with a format, of the unpacked one
    size: int  # number of entries
    num_blocks: int = 1
    repeats: bool = False  # allow fewer blocks than shards, each repeated on several shards
    pads: bool = False  # allow any number of blocks: the last shards have columns of zeros
    first: int = 0
    step: int = 1
    stride: int = 0  # distance between the first entries of two blocks; 0: contiguous
    form: Form = Form.OUT_IN
    stack: int = 0  # number of tensors of this shape, one per expert; 0: a single tensor
    # The packing of a stack [X, out, in]: NAME_blocks u8[.., in / 32, 16] and NAME_scales
    # u8[.., in / 32]. Packed layouts are read, never written.
    format: MXFP4 | None = None
    plus: float = 0.0  # to add to the stored values of an AS_IS vector

    @property
    def tensors(self) -> dict[str, Shape]:
        if self.format is None:
            return dict.fromkeys(self.names, self.shape)
        blocks = (*self.shape[:-1], self.shape[-1] // self.format.group)
        return {f"{self.name}_blocks": (*blocks, 16), f"{self.name}_scales": blocks}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.name.format(i) for i in range(self.stack)) if self.stack else (self.name,)

    @property
    def rows(self) -> slice | list[int]:
        if self.stride:
            begins = range(self.first, self.first + self.num_blocks * self.stride, self.stride)
            return [begin + row for begin in begins for row in range(self.size // self.num_blocks)]
        return slice(self.first, self.first + self.size * self.step, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One weight. Its first layout that a checkpoint has is read; the first of all is written."""

    path: ParamPath
    shape: Shape  # unsharded
    layouts: tuple[tuple[Part, ...], ...] = ()  # parts in order; empty: loaded elsewhere
    axes: Axes = ()  # of each dimension; empty: all replicated
    init: Init = Init.FAN_IN
    tied_to: ParamPath | None = None  # without a stored tensor, the weight is this one, transposed
    order: Order = Order.ROWS
    optional: bool = False  # zeros without a stored tensor; ones if `init` is ONES
    op: Op | None = None  # the product that reads it
    format: WeightFormat | None = None  # None: dense, in the model's dtype
    # The stored expert of each physical one; None: all stored experts, in order.
    entries: tuple[int, ...] | None = None
    num_parts: int = 1  # parts of an expert dimension (the first); each device holds one
    expert_shards: int = 1  # shards of "experts" in one data rank

    @property
    def is_integer(self) -> bool:
        return self.format == INTEGERS

    @property
    def stored_entries(self) -> Sequence[int]:
        """The stored index of each entry of a stack (the first dimension)."""
        return range(self.shape[0]) if self.entries is None else self.entries

    @property
    def readable(self) -> tuple[tuple[Part, ...], ...]:
        """The layouts that it can be read from; packed weights are not made from unpacked ones."""
        if isinstance(self.format, MXFP4):
            return tuple(layout for layout in self.layouts if layout[0].format == self.format)
        return self.layouts

    def format_in(self, dtype: npt.DTypeLike) -> WeightFormat:
        return self.format or Dense(np.dtype(dtype).name)

    def shards_of(self, dimension: int, shards: int) -> int:
        degrees: dict[MeshAxis | None, int] = {
            EXPERT: self.expert_shards,
            TENSOR: shards // self.expert_shards,
            MODEL: shards,
        }
        return degrees.get(mesh_axis(self.axes[dimension]) if self.axes else None, 1)

    def column_shards(self, shards: int) -> int:
        """Return the number of shards of the last dimension, each with its share of every part."""
        return self.shards_of(-1, shards)

    def physical_shape(self, shards: int) -> Shape:
        """Return the shape over all shards of the model, repeated blocks included."""
        if not self.layouts:
            return self.shape
        shards = self.column_shards(shards)
        columns = sum(n for _, _, n in shard_columns(self.layouts[0], shards))
        if any(part.pads for part in self.layouts[0]):
            columns = padded(columns, shards)
        return (*self.shape[:-1], columns)


ParamTable = tuple[ParamSpec, ...]


def padded(size: int, shards: int) -> int:
    return -(-size // shards) * shards


def with_formats(table: ParamTable, formats: Formats) -> ParamTable:
    found = dict(formats)

    def own(spec: ParamSpec) -> ParamSpec:
        of_product = None if spec.op is None else found.get(spec.op)
        return replace(spec, format=found.get(spec.path, of_product) or spec.format)

    return tuple(map(own, table))


def with_expert_map(table: ParamTable, experts: ExpertMap) -> ParamTable:
    def own(spec: ParamSpec) -> ParamSpec:
        if spec.entries is None or not experts:
            return spec
        return replace(spec, entries=experts[int(spec.path[1])])

    return tuple(map(own, table))


def of_experts(table: Iterable[ParamSpec], spec: MoESpec) -> ParamTable:
    """Shard an MoE's weights by physical expert; placed ones start in the model's order."""

    def split(own: ParamSpec) -> ParamSpec:
        if own.axes[:1] != ("experts",):
            return own
        axes = own.axes if spec.data_shards == 1 else ("experts_of_ranks", *own.axes[1:])
        in_rank = spec.shards // spec.data_shards
        own = replace(own, axes=axes, num_parts=spec.shards, expert_shards=in_rank)
        if spec.num_placed is None:
            return own
        entries = tuple(i % spec.num_experts for i in range(spec.num_placed))
        return replace(own, shape=(spec.num_placed, *own.shape[1:]), entries=entries)

    return tuple(map(split, table))


def shard_columns(parts: tuple[Part, ...], shards: int) -> Iterator[tuple[int, int, int]]:
    """Yield (part, first entry, number of entries) for the columns, shard by shard. Raises
    ConfigError for blocks that neither divide among nor repeat over the shards."""
    for part in parts:
        if part.pads:
            continue
        if part.num_blocks % shards and not (part.repeats and shards % part.num_blocks == 0):
            raise ConfigError(
                f"tp_size is {shards}; expected a divisor{' or a multiple' * part.repeats} of "
                f"{part.num_blocks}, the blocks of {part.name}"
            )
    for shard in range(shards):
        for i, part in enumerate(parts):
            size = part.size // part.num_blocks
            if part.pads:  # of the only part
                each = padded(part.num_blocks, shards) // shards
                first = min(shard * each, part.num_blocks)
                yield i, first * size, min(each, part.num_blocks - first) * size
                continue
            count = max(part.num_blocks // shards, 1)
            yield i, shard * part.num_blocks // shards * size, count * size


def prefixed(table: Iterable[ParamSpec], *, path: ParamPath, stored: str) -> ParamTable:
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


def or_nested(table: Iterable[ParamSpec], *places: Mapping[str, str]) -> ParamTable:
    """Let a text model's tensors also be stored inside a model that reads images."""

    def own(spec: ParamSpec) -> ParamSpec:
        nested = tuple(
            tuple(replace(part, name=inside + part.name.removeprefix(plain)) for part in layout)
            for place in places
            for plain, inside in place.items()
            for layout in spec.layouts
            if layout[0].name.startswith(plain)
        )
        return replace(spec, layouts=spec.layouts + nested)

    return tuple(map(own, table))


def or_fused(table: Iterable[ParamSpec], fused: Mapping[str, str]) -> ParamTable:
    """Let some weights also be stored as one fused tensor each, part after part.

    In:  qkv of layers.0.self_attn.{q,k,v}_proj.weight, {"qkv": "qkv_proj"}
    Out: or of layers.0.self_attn.qkv_proj.weight: the output channels of q, then k, then v
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
