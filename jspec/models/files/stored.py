"""Weights between a checkpoint's tensors and the arrays that a table declares, on the host.

Everything here is numpy. A weight is read block by block into the array that it becomes. Who reads
them, in how many threads and to where is the caller's choice (`Place`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.errors import CheckpointError
from jspec.models.files import mxfp4
from jspec.models.files.tensor_files import BLOCK_BYTES, HostArray, Tensors, transpose_into
from jspec.models.params import Codec, Form, ParamSpec, ParamTable, Part, Path, Shape, Split, deal


def chosen_layout(tensors: Tensors, spec: ParamSpec) -> tuple[Part, ...]:
    """The first layout of which the checkpoint has a tensor, or the first of all."""
    for layout in spec.layouts:
        if any(name in tensors for part in layout for name in part.tensors):
            return layout
    return spec.layouts[0]


def check_names(
    tensors: Tensors,
    table: ParamTable,
    *,
    optional: Mapping[str, Shape] | None = None,
    is_stray: Callable[[str], bool],
    integers: Collection[str] = (),
) -> None:
    """CheckpointError unless the checkpoint holds exactly what the table declares.

    optional: names beside the table's that may be there; so may tied weights and those that are
    zeros where there is none. integers: names that are no weights.
    """
    required: dict[str, Shape] = {}
    allowed = dict(optional or {})
    packed: set[str] = set()
    for spec in table:
        if not spec.layouts:
            continue
        names = allowed if spec.tied_to or spec.optional else required
        for part in chosen_layout(tensors, spec):
            names |= part.tensors
            packed |= part.tensors.keys() if part.codec else set()
    tensors.check(required, optional=allowed, is_stray=is_stray, integers=integers, packed=packed)


def packed_bytes(tensors: Tensors, table: ParamTable, *, dtype: npt.DTypeLike) -> tuple[int, int]:
    """(bytes of the checkpoint's packed tensors, bytes of the weights that they become)."""
    packed: dict[str, Shape] = {}
    unpacked = 0
    for spec in table:
        parts = chosen_layout(tensors, spec) if spec.layouts else ()
        coded = [part for part in parts if part.codec is not None]
        for part in coded:
            packed |= part.tensors
        unpacked += math.prod(spec.shape) * np.dtype(dtype).itemsize if coded else 0
    return sum(map(math.prod, packed.values())), unpacked


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRead:
    """A declared weight that waits to be read, by any thread.

    host_bytes: at most what `read` holds at once, its result included. read: a new array, as all
    shards hold it, which the caller owns; raises CheckpointError naming the tensor. tied: the
    weight that is this one, transposed, where there is one: a view of the same array.
    """

    spec: ParamSpec
    host_bytes: int
    read: Callable[[], HostArray]
    tied: ParamSpec | None = None


Place = Callable[[Sequence[ParamRead]], Mapping[Path, Any]]  # reads weights, puts them somewhere


def param_reads(
    tensors: Tensors, table: ParamTable, *, dtype: npt.DTypeLike, shards: int
) -> list[ParamRead]:
    """Each declared weight in `dtype`, dealt to `shards` shards; those without a layout are not.

    A tied weight comes with the other; one that is stored as well must be equal, else reading
    raises CheckpointError. Raises ConfigError where the shards cannot divide a weight.
    """
    tied = {spec.tied_to: spec for spec in table if spec.tied_to is not None}
    return [
        ParamRead(
            spec=spec,
            tied=tied.get(spec.path),
            host_bytes=_host_bytes(tensors, spec, dtype=_dtype_of(spec, dtype), shards=shards),
            read=partial(
                _read,
                tensors,
                spec,
                tied.get(spec.path),
                dtype=_dtype_of(spec, dtype),
                shards=shards,
            ),
        )
        for spec in table
        if spec.layouts and spec.tied_to is None
    ]


def _dtype_of(spec: ParamSpec, dtype: npt.DTypeLike) -> np.dtype[Any]:
    if spec.num_bits:
        return np.dtype(f"u{spec.num_bits // 8}")
    return np.dtype(np.float32 if spec.is_float32 else dtype)


def on_host(reads: Sequence[ParamRead]) -> dict[Path, HostArray]:
    """Reads one weight after the other, and keeps them as numpy arrays."""
    values: dict[Path, HostArray] = {}
    for each in reads:
        values[each.spec.path] = value = each.read()
        if each.tied is not None:
            values[each.tied.path] = value.T
    return values


def _read(
    tensors: Tensors,
    spec: ParamSpec,
    tied: ParamSpec | None,
    *,
    dtype: np.dtype[Any],
    shards: int,
) -> HostArray:
    if spec.optional and all(part.names[0] not in tensors for part in spec.layouts[0]):
        return np.zeros(spec.physical_shape(shards), dtype)
    value = read_param(tensors, spec, dtype=dtype, shards=shards)
    name = tied.layouts[0][0].name if tied is not None else ""
    if name in tensors:
        for first, block in tensors.row_blocks(name, range(len(value))):
            if not np.array_equal(block.astype(dtype), value[first : first + len(block)]):
                raise CheckpointError(
                    f"{tensors.path}: {name} differs from {spec.layouts[0][0].name}; expected "
                    "the same, since config.json ties them"
                )
    return value


def _host_bytes(tensors: Tensors, spec: ParamSpec, *, dtype: np.dtype[Any], shards: int) -> int:
    """Of the weight, and of the most that is read beside it at once."""
    own = math.prod(spec.physical_shape(shards)) * dtype.itemsize
    beside = 2 * BLOCK_BYTES
    for part in chosen_layout(tensors, spec):
        if part.codec is not None:  # one matrix unpacked, in float32 at most
            beside = max(beside, 4 * math.prod(spec.shape[1:]))
        elif part.names[0] in tensors and not _is_by_rows(part):
            stored = tensors.weight_dtype(part.names[0])
            if not _is_whole(part, spec) or stored != dtype:
                beside = max(beside, math.prod(part.shape) * stored.itemsize)
    return own + beside


def _is_by_rows(part: Part) -> bool:
    """Whether its rows of the stored tensor are read block by block."""
    is_together = part.step == 1 and not part.stride
    return part.form is Form.OUT_IN and is_together and part.codec is None


def _is_whole(part: Part, spec: ParamSpec) -> bool:
    """Whether the stored tensor is the weight."""
    return part.form is Form.AS_HELD and not part.stack and part.shape == spec.shape


def read_param(
    tensors: Tensors, spec: ParamSpec, *, dtype: npt.DTypeLike, shards: int
) -> HostArray:
    """One weight, its parts dealt to `shards` shards."""
    layout = chosen_layout(tensors, spec)
    part = layout[0]
    if len(layout) == 1 and _is_whole(part, spec):
        whole = tensors.weight(part.name)
        if part.plus:
            whole = whole.astype(np.float32) + np.float32(part.plus)
        return whole.astype(dtype, copy=False)
    out = np.empty(spec.physical_shape(shards), dtype)
    pieces: dict[int, list[tuple[range, slice]]] = {i: [] for i in range(len(layout))}
    column = 0
    for i, first, count in deal(layout, shards if spec.split is Split.OUT else 1):
        pieces[i].append((range(first, first + count), slice(column, column + count)))
        column += count
    for i, part in enumerate(layout):
        if _is_by_rows(part):
            for index, name in enumerate(part.names):
                held = out[index] if part.stack else out
                _place_by_rows(held, tensors, name, part, pieces[i])
            continue
        for held, stored in _stored_rows(tensors, part, out):
            for rows, columns in pieces[i]:
                _place(held[..., columns], stored, slice(rows.start, rows.stop), part.form)
    return out


def _place_by_rows(
    held: HostArray,
    tensors: Tensors,
    name: str,
    part: Part,
    pieces: Sequence[tuple[range, slice]],
) -> None:
    """A projection [out, in], or a stack of them, without a second copy of it."""
    stack = held if held.ndim > 2 else held[None]
    for index, one in enumerate(stack):
        start = index * part.shape[-2] + part.first
        for rows, columns in pieces:
            wanted = range(start + rows.start, start + rows.stop)
            for first, block in tensors.row_blocks(name, wanted):
                column = columns.start + first - wanted.start
                transpose_into(one[:, column : column + len(block)], block)


def _stored_rows(
    tensors: Tensors, part: Part, out: HostArray
) -> Iterator[tuple[HostArray, HostArray]]:
    """(where in `out` it belongs, the part's rows of the output axis) of each of its tensors.

    What is packed is unpacked matrix by matrix, so that never more than one is held unpacked.
    """
    if part.codec is Codec.MXFP4:
        table = mxfp4.pair_table(out.dtype)
        names = tuple(part.tensors)
        for index, held in enumerate(out):
            blocks, scales = (tensors.packed(name, index)[part.rows] for name in names)
            name = f"{tensors.path}: {names[1]}"
            yield held, mxfp4.unpack(blocks, scales, table, name=name)
        return
    if part.codec is not None:
        (name,) = part.tensors
        is_codes = part.codec is Codec.MXFP4_CODES
        hold = mxfp4.codes_of if is_codes else mxfp4.scales_of
        for index, held in enumerate(out):
            stored = tensors.packed(name, index)[part.rows]
            yield held, hold(stored, name=f"{tensors.path}: {name}")
        return
    for index, name in enumerate(part.names):
        yield out[index] if part.stack else out, _output_rows(tensors.weight(name), part)


def _output_rows(stored: HostArray, part: Part) -> HostArray:
    """The part's rows of the output axis: the last but one of OUT_IN, else the last."""
    if part.form is Form.OUT_IN:
        return stored[..., part.rows, :]
    return stored[..., part.rows]


def _place(out: HostArray, stored: HostArray, rows: slice, form: Form) -> None:
    if form is Form.AS_HELD:
        out[...] = stored[..., rows]
        return
    source = stored[..., rows, :]
    if source.ndim == 2:
        transpose_into(out, source)
        return
    for one, part in zip(out, source, strict=True):
        transpose_into(one, part)


def stored_tensors(
    table: ParamTable, params: Mapping[str, Any], *, dtype: npt.DTypeLike
) -> dict[str, HostArray]:
    """The checkpoint's tensors of unsharded params, in each weight's first layout.

    Raises CheckpointError for a weight that has not the table's shape (params of several shards
    hold repeats, which are not written), or a tied weight that differs from its other.
    """
    tensors: dict[str, HostArray] = {}
    for spec in table:
        if not spec.layouts:
            continue
        host = np.asarray(value_at(params, spec.path))
        if host.shape != spec.shape:
            raise CheckpointError(
                f"params give {'.'.join(map(str, spec.path))} the shape {host.shape}; expected "
                f"{spec.shape} (only unsharded params can be saved)"
            )
        if spec.tied_to is not None:
            if not np.array_equal(host, np.asarray(value_at(params, spec.tied_to)).T):
                raise CheckpointError(
                    f"tie_word_embeddings is true but {'.'.join(map(str, spec.path))} differs "
                    "from the embedding table; expected them equal, since only the table is written"
                )
            continue
        _store(tensors, spec, host, dtype=dtype)
    return tensors


def _store(
    tensors: dict[str, HostArray], spec: ParamSpec, host: HostArray, *, dtype: npt.DTypeLike
) -> None:
    for name, part, piece in pieces(spec.layouts[0], host):
        if name not in tensors and piece.shape == part.shape:
            tensors[name] = np.ascontiguousarray(piece, dtype=dtype)
            continue
        whole = tensors.setdefault(name, np.empty(part.shape, dtype))
        whole[in_stored(part)] = piece


def pieces(layout: tuple[Part, ...], host: HostArray) -> Iterator[tuple[str, Part, HostArray]]:
    """(name, part, what of an unsharded weight is stored there); views, but where it lies with
    a constant added."""
    column = 0
    for part in layout:
        columns = host[..., column : column + part.size]
        column += part.size
        turned = columns if part.form is Form.AS_HELD else np.swapaxes(columns, -1, -2)
        for index, name in enumerate(part.names):
            piece = turned[index] if part.stack else turned
            yield name, part, piece - np.float32(part.plus) if part.plus else piece


def in_stored(part: Part) -> tuple[Any, ...]:
    """Index of a part in the whole stored tensor."""
    return (..., part.rows) if part.form is Form.AS_HELD else (..., part.rows, slice(None))


def value_at(params: Mapping[str, Any], path: Path) -> Any:
    value: Any = params
    for key in path:
        value = value[key]
    return value
