"""The tensors of a checkpoint for a parameter table: their layouts, names and formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import numpy.typing as npt

from jspec.models.files.tensor_files import Tensors
from jspec.models.params import ParamSpec, ParamTable, Part
from jspec.spec.weight_format import Op, Shape, WeightFormat, num_bytes


def chosen_layout(tensors: Tensors, spec: ParamSpec) -> tuple[Part, ...]:
    """Return the first layout of which the checkpoint has a tensor, else the first of all."""
    for layout in spec.readable:
        if any(name in tensors for part in layout for name in part.tensors):
            return layout
    return spec.readable[0]


def check_names(
    tensors: Tensors,
    table: ParamTable,
    *,
    optional: Mapping[str, Shape] | None = None,
    is_stray: Callable[[str], bool],
    integers: Collection[str] = (),
) -> None:
    """Raise CheckpointError unless the checkpoint has exactly the tensors of the table."""
    required: dict[str, Shape] = {}
    allowed = dict(optional or {})
    packed: set[str] = set()
    for spec in table:
        if not spec.layouts:
            continue
        names = allowed if spec.tied_to or spec.optional else required
        for part in chosen_layout(tensors, spec):
            names |= part.tensors
            packed |= part.tensors.keys() if part.format else set()
    tensors.check(required, optional=allowed, is_stray=is_stray, integers=integers, packed=packed)


def stored_formats(
    table: ParamTable, layout_of: Callable[[ParamSpec], tuple[Part, ...]]
) -> dict[Op, WeightFormat]:
    """Return the formats of packed products. layout_of: gives the stored layout of a weight."""
    found: dict[Op, set[WeightFormat | None]] = {}
    for spec in table:
        if spec.op is not None and spec.layouts:
            found.setdefault(spec.op, set()).add(layout_of(spec)[0].format)
    return {op: each for op, (each, *others) in found.items() if each is not None and not others}


def packed_bytes(tensors: Tensors, table: ParamTable, *, dtype: npt.DTypeLike) -> tuple[int, int]:
    """Return (bytes of tensors that are unpacked on reading, bytes of these weights in `dtype`)."""
    packed: dict[str, Shape] = {}
    unpacked = 0
    for spec in (spec for spec in table if spec.layouts):
        layout = chosen_layout(tensors, spec)
        if layout[0].format is not None and layout[0].format != spec.format:
            for part in layout:
                packed |= part.tensors
            unpacked += num_bytes(spec.format_in(dtype), spec.shape)
    return sum(map(math.prod, packed.values())), unpacked
