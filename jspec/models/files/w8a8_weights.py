"""Weights in fp8 and int8 that stay packed: their form in a checkpoint, and reading their codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jspec.device.weights import W8A8Weight, w8a8_weight
from jspec.models.files.tensor_files import Tensors
from jspec.models.files.w8a8 import Form, Scaled
from jspec.models.params import Form as Layout
from jspec.models.params import ParamSpec, Part, shard_columns
from jspec.spec.weight_format import FP8, W8A8

FormOf = Callable[[str], Form | None]  # by tensor name; None: not in 8 bits


@dataclass(frozen=True, slots=True)
class StoredW8A8:
    format: W8A8
    problem: str | None = None  # the reason why the weight must be unpacked


def forms_in(tensors: Tensors) -> FormOf:
    def form_of(name: str) -> Form | None:
        file = tensors.sources[name][0] if name in tensors else None
        return file.form if isinstance(file, Scaled) else None

    return form_of


def stored_w8a8(
    spec: ParamSpec, layout: tuple[Part, ...], form_of: FormOf, *, shards: int
) -> StoredW8A8 | None:
    """Return the form in which a weight is stored; None if no part of it is in 8 bits."""
    forms = {form_of(name) for part in layout for name in part.names}
    if forms == {None}:
        return None
    if len(forms) > 1:
        known = (form for form in forms if isinstance(form, W8A8))
        return StoredW8A8(next(known, FP8()), "its parts are stored in several forms")
    (form,) = forms
    if not isinstance(form, W8A8):
        return StoredW8A8(FP8(), str(form))
    if any(part.form is not Layout.OUT_IN for part in layout):
        return StoredW8A8(form, "it is not stored as [out, in]")
    if form.has_blocks and _are_cut(spec, layout, shards=shards):
        return StoredW8A8(form, "a block of 128 x 128 would be cut between parts or shards")
    return StoredW8A8(form)


def _are_cut(spec: ParamSpec, layout: tuple[Part, ...], *, shards: int) -> bool:
    column_shards = spec.column_shards(shards)
    row_shards = spec.shards_of(-2, shards) if len(spec.axes) > 1 else 1
    if row_shards > 1 and spec.shape[-2] % (row_shards * FP8.size):
        return True
    blocks: list[tuple[str, int]] = []  # the stored block of each column
    for i, first, count in shard_columns(layout, column_shards):
        part = layout[i]
        blocks += [(part.name, int(row) // FP8.size) for row in _rows(part, first, count)]
    if column_shards > 1 and len(blocks) % (column_shards * FP8.size):
        return True
    starts = range(0, len(blocks), FP8.size)
    return any(len(set(blocks[start : start + FP8.size])) > 1 for start in starts)


def _rows(part: Part, first: int, count: int) -> np.ndarray:
    chosen: np.ndarray = np.arange(part.shape[-2])[part.rows][first : first + count]
    return chosen


def read_codes(
    tensors: Tensors, spec: ParamSpec, layout: tuple[Part, ...], format: W8A8, *, shards: int
) -> W8A8Weight:
    """Read a weight over all shards in its stored form (`stored_w8a8`), without unpacking it."""
    shape = *stack, length, width = spec.physical_shape(shards)
    # Files and devices both have [.., out, in].
    codes = np.empty((*stack, width, length), format.arrays(shape)["codes"].dtype)
    counts = -(-length // FP8.size) if format.has_blocks else 1
    scales = np.empty((*stack, width, counts), np.float32)
    pieces = tuple(shard_columns(layout, spec.column_shards(shards)))
    for matrix, entry in enumerate(spec.stored_entries if stack else (0,)):
        column = 0
        for i, first, count in pieces:
            part, place = layout[i], slice(column, column + count)
            name = part.name.format(entry) if part.stack else part.name
            before = entry * part.shape[-2] if len(part.shape) > 2 else 0
            source = tensors.sources[name][0]
            assert isinstance(source, Scaled)
            at = (matrix, place) if stack else place
            codes[at], scales[at] = source.rows(before + _rows(part, first, count))
            column += count
    own = scales[..., :: FP8.size, :].swapaxes(-1, -2) if format.has_blocks else scales[..., 0]
    return w8a8_weight(format, codes=codes.swapaxes(-1, -2), scales=np.ascontiguousarray(own))
