"""Conversion of a checkpoint's tensors to the arrays that a table declares, in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jspec.device.mxfp4 import MXFP4Weight
from jspec.device.weights import W8A8Weight, Weight, quantized_weight, weight_of
from jspec.errors import CheckpointError
from jspec.models.files import mxfp4
from jspec.models.files.stored.layouts import chosen_layout
from jspec.models.files.tensor_files import BLOCK_BYTES, HostArray, Tensors, transpose_into
from jspec.models.files.w8a8_weights import StoredW8A8, forms_in, read_codes, stored_w8a8
from jspec.models.params import Form, Init, ParamPath, ParamSpec, ParamTable, Part, shard_columns
from jspec.spec.weight_format import W8A8, Dense, num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRead:
    spec: ParamSpec
    host_bytes: int  # peak host memory of `read`, or `read_part`, its result included
    # Returns a new weight over all shards, in the spec's format and owned by the caller;
    # CheckpointError names the tensor.
    read: Callable[[], Weight]
    # Reads the shards of one of several hosts; entries of others may be zeros. None: use `read`.
    read_own: Callable[[range], Weight] | None = None
    # Reads a part of a weight's first dimension; None: every device holds all of it.
    read_part: Callable[[range], Weight] | None = None
    tied: ParamSpec | None = None  # the weight that is a transposed view of this one
    tied_width: int = 0  # its columns, padding included

    def tied_value(self, value: Weight) -> Weight:
        missing = self.tied_width - len(value)
        return np.pad(value.T, ((0, 0), (0, missing))) if missing > 0 else value.T


Place = Callable[[Sequence[ParamRead]], Mapping[ParamPath, Any]]  # reads and places the weights


def param_reads(
    tensors: Tensors, table: ParamTable, *, dtype: npt.DTypeLike, shards: int
) -> list[ParamRead]:
    """Return a read of each weight that has a layout, of a model in `dtype` over `shards`.

    A tied weight comes with the one it is tied to; CheckpointError if both are stored and differ.
    Raises ConfigError if a weight cannot be sharded.
    """
    tied = {spec.tied_to: spec for spec in table if spec.tied_to is not None}
    how: dict[str, Any] = {"dtype": dtype, "shards": shards}
    return [
        ParamRead(
            spec=spec,
            tied=tied.get(spec.path),
            tied_width=tied[spec.path].physical_shape(shards)[-1] if spec.path in tied else 0,
            host_bytes=_host_bytes(tensors, _part_of(spec), dtype=dtype, shards=shards),
            read_part=partial(_read_part, tensors, spec, how) if spec.num_parts > 1 else None,
            read=(read := partial(_read, tensors, spec, tied.get(spec.path), how)),
            read_own=lambda own, read=read: read(own=own),  # type: ignore[misc]
        )
        for spec in table
        if spec.layouts and spec.tied_to is None
    ]


def on_host(reads: Sequence[ParamRead]) -> dict[ParamPath, Weight]:
    values: dict[ParamPath, Weight] = {}
    for each in reads:
        values[each.spec.path] = value = each.read()
        if each.tied is not None:
            values[each.tied.path] = each.tied_value(value)
    return values


def _part_of(spec: ParamSpec, part: range | None = None) -> ParamSpec:
    """Return a weight with only a part of the first dimension, by default the first device's."""
    if spec.num_parts == 1:
        return spec
    part = range(spec.shape[0] // spec.num_parts) if part is None else part
    entries = tuple(spec.stored_entries[part.start : part.stop])
    return replace(spec, shape=(len(entries), *spec.shape[1:]), entries=entries)


def _read_part(tensors: Tensors, spec: ParamSpec, how: Mapping[str, Any], part: range) -> Weight:
    return _read(tensors, _part_of(spec, part), None, how)


def _read(
    tensors: Tensors,
    spec: ParamSpec,
    tied: ParamSpec | None,
    how: Mapping[str, Any],
    *,
    own: range | None = None,
) -> Weight:
    if spec.optional and all(part.names[0] not in tensors for part in spec.layouts[0]):
        make = np.ones if spec.init is Init.ONES else np.zeros
        return _made(make, spec, **how)
    value = read_param(tensors, spec, own=own, **how)
    name = tied.layouts[0][0].name if tied is not None else ""
    if name in tensors:
        rows = _own_rows(spec, own, how["shards"]) or range(len(value))
        for first, block in tensors.row_blocks(name, rows):
            if not np.array_equal(block.astype(value.dtype), value[first : first + len(block)]):
                raise CheckpointError(
                    f"{tensors.path}: {name} differs from {spec.layouts[0][0].name}; expected "
                    "the same, since config.json ties them"
                )
    return value


def _made(
    make: Callable[..., HostArray], spec: ParamSpec, *, dtype: npt.DTypeLike, shards: int
) -> Weight:
    shape = spec.physical_shape(shards)
    return weight_of(spec.format_in(dtype), shape, lambda x: make(x.shape, x.dtype))


def _host_bytes(tensors: Tensors, spec: ParamSpec, *, dtype: npt.DTypeLike, shards: int) -> int:
    format, layout = spec.format_in(dtype), chosen_layout(tensors, spec)
    own = num_bytes(format, spec.physical_shape(shards))
    beside = 2 * BLOCK_BYTES
    if isinstance(format, W8A8):  # the largest part's codes, or all of it in float32
        is_kept = stored_w8a8(spec, layout, forms_in(tensors), shards=shards) == StoredW8A8(format)
        return own + beside + (own if is_kept else 8 * math.prod(spec.physical_shape(shards)))
    for part in layout:
        if part.format is not None:  # one unpacked matrix, in float32 at most
            beside = max(beside, 4 * math.prod(spec.shape[1:]))
        elif part.names[0] in tensors and not _is_by_rows(part):
            stored = tensors.weight_dtype(part.names[0])
            if not _is_whole(part, spec) or Dense(stored.name) != format:
                shape = part.shape if spec.entries is None or part.stack else part.shape[1:]
                beside = max(beside, math.prod(shape) * stored.itemsize)
    return own + beside


def _is_by_rows(part: Part) -> bool:
    is_together = part.step == 1 and not part.stride
    return part.form is Form.OUT_IN and is_together and part.format is None


def _is_whole(part: Part, spec: ParamSpec) -> bool:
    is_plain = part.form is Form.AS_IS and not part.stack and spec.entries is None
    return is_plain and part.shape == spec.shape


def _own_rows(spec: ParamSpec, own: range | None, shards: int) -> range | None:
    """Return the rows [.., rows, columns] of the shards in `own`; None: all."""
    if own is None or len(spec.axes) < 2 or spec.shards_of(-2, shards) != shards:
        return None
    share = spec.shape[-2] // shards
    return range(own.start * share, own.stop * share)


def read_param(
    tensors: Tensors,
    spec: ParamSpec,
    *,
    dtype: npt.DTypeLike,
    shards: int,
    own: range | None = None,
) -> Weight:
    """Read a weight over all shards. Entries of shards outside `own` may be zeros."""
    layout = chosen_layout(tensors, spec)
    if isinstance(spec.format, W8A8):
        if stored_w8a8(spec, layout, forms_in(tensors), shards=shards) == StoredW8A8(spec.format):
            return read_codes(tensors, spec, layout, spec.format, shards=shards)
        numbers = read_param(tensors, replace(spec, format=None), dtype=dtype, shards=shards)
        return _quantized(numbers, spec.format)
    part = layout[0]
    own_rows = _own_rows(spec, own, shards)
    if len(layout) == 1 and _is_whole(part, spec) and spec.physical_shape(shards) == spec.shape:
        if own_rows is not None and len(spec.shape) == 2 and not part.plus:
            table = _made(np.zeros, spec, dtype=dtype, shards=shards)
            for first, block in tensors.row_blocks(part.name, own_rows):
                table[first : first + len(block)] = block
            return table
        whole = tensors.weight(part.name)
        if part.plus:
            whole = whole.astype(np.float32) + np.float32(part.plus)
        (array,) = spec.format_in(dtype).arrays(spec.shape).values()
        return whole.astype(array.dtype, copy=False)
    out = _made(np.empty if own is None else np.zeros, spec, dtype=dtype, shards=shards)
    pieces: dict[int, list[tuple[range, slice]]] = {i: [] for i in range(len(layout))}
    column, column_shards = 0, spec.column_shards(shards)
    for number, (i, first, count) in enumerate(shard_columns(layout, column_shards)):
        if own is None or column_shards == 1 or number // len(layout) in own:
            pieces[i].append((range(first, first + count), slice(column, column + count)))
        column += count
    if column < spec.physical_shape(shards)[-1]:
        out[..., column:] = 0
    for i, part in enumerate(layout):
        if _is_by_rows(part):
            for dest, name, index in _matrices(part, spec, out):
                _place_by_rows(dest, tensors, name, part, pieces[i], index=index, own=own_rows)
            continue
        for dest, stored in _stored_rows(tensors, part, spec, out):
            for rows, columns in pieces[i]:
                if isinstance(dest, MXFP4Weight):
                    stored.put(dest, slice(rows.start, rows.stop), columns)
                else:
                    _place(dest[..., columns], stored, slice(rows.start, rows.stop), part.form)
    return out


def _quantized(numbers: HostArray, format: W8A8) -> W8A8Weight:
    if numbers.ndim == 2:
        found: W8A8Weight = jax.tree.map(np.array, quantized_weight(jnp.asarray(numbers), format))
        return found
    made: W8A8Weight = weight_of(format, numbers.shape, lambda x: np.empty(x.shape, x.dtype))
    for index, matrix in enumerate(numbers):
        one = quantized_weight(jnp.asarray(matrix), format)
        made.codes[index], made.scales[index] = np.asarray(one.codes), np.asarray(one.scales)
    return made


def _matrices(part: Part, spec: ParamSpec, out: HostArray) -> Iterator[tuple[HostArray, str, int]]:
    """Yield (destination, stored tensor, index in it) of each matrix of a projection or a stack."""
    if out.ndim == 2:
        yield out, part.name, 0
        return
    for dest, entry in zip(out, spec.stored_entries, strict=True):
        if part.stack:
            yield dest, part.name.format(entry), 0
        else:
            yield dest, part.name, entry


def _place_by_rows(
    dest: HostArray,
    tensors: Tensors,
    name: str,
    part: Part,
    pieces: Sequence[tuple[range, slice]],
    *,
    index: int,
    own: range | None = None,
) -> None:
    """Read a projection [out, in] without a second copy. own: the needed range of `in`."""
    start = index * part.shape[-2] + part.first if len(part.shape) > 2 else part.first
    for rows, columns in pieces:
        wanted = range(start + rows.start, start + rows.stop)
        for first, block in tensors.row_blocks(name, wanted, own):
            column = columns.start + first - wanted.start
            read = dest if own is None else dest[own.start : own.stop]
            transpose_into(read[:, column : column + len(block)], block)


def _stored_rows(
    tensors: Tensors, part: Part, spec: ParamSpec, out: Weight
) -> Iterator[tuple[Any, Any]]:
    """Yield (destination in `out`, stored entries) per tensor, unpacking one matrix at a time.
    Those of a packed weight are an MXFP4Weight and `mxfp4.Packed`."""
    if part.format is not None:
        names = tuple(part.tensors)
        table = None if isinstance(out, MXFP4Weight) else mxfp4.pair_table(out.dtype)
        for index, entry in enumerate(spec.stored_entries):
            blocks, scales = (tensors.packed(name, entry)[part.rows] for name in names)
            name = f"{tensors.path}: {names[1]}"
            if table is not None:
                yield out[index], mxfp4.unpack(blocks, scales, table, name=name)
            else:
                dest = MXFP4Weight(
                    codes=out.codes[index], scales=out.scales[index], length=out.length
                )
                yield dest, mxfp4.packed(blocks, scales, name=name)
        return
    if part.stack:
        for index, entry in enumerate(spec.stored_entries):
            yield out[index], _output_rows(tensors.weight(part.name.format(entry)), part)
    elif spec.entries is None:
        yield out, _output_rows(tensors.weight(part.name), part)
    else:
        for index, entry in enumerate(spec.entries):
            stored = tensors.entry(part.name, entry)
            yield out[index : index + 1], _output_rows(stored[None], part)


def _output_rows(stored: HostArray, part: Part) -> HostArray:
    if part.form is Form.OUT_IN:
        return stored[..., part.rows, :]
    return stored[..., part.rows]


def _place(out: HostArray, stored: HostArray, rows: slice, form: Form) -> None:
    if form is Form.AS_IS:
        out[...] = stored[..., rows]
        return
    source = stored[..., rows, :]
    if source.ndim == 2:
        transpose_into(out, source)
        return
    for one, part in zip(out, source, strict=True):
        transpose_into(one, part)
