"""Served weights under their checkpoint names, and tensors that replace parts of served weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jspec.device.fp8 import BLOCK
from jspec.device.weights import W8A8Weight, dense
from jspec.errors import CheckpointError
from jspec.models.files.array_tensors import LazyTensor, dtype_name
from jspec.models.files.stored.param_reads import ParamRead, param_reads
from jspec.models.files.stored.tensors import pieces, put_piece
from jspec.models.files.tensor_files import HostArray, lazy_tensors
from jspec.models.params import ParamPath, ParamSpec, ParamTable, Part, shard_columns
from jspec.spec.weight_format import W8A8, Shape

ServedArray = Callable[[ParamPath], Any]  # the served array of a weight, over all shards
Layout = tuple[Part, ...]
Stored = tuple[tuple[ParamSpec, Layout], ...]  # the weights that have parts in a tensor


def unsharded(spec: ParamSpec, served: HostArray, *, shards: int) -> HostArray:
    """Return the unsharded weight. served: the weight over `shards` shards, repeats included."""
    shards = spec.column_shards(shards)
    if not spec.layouts or shards == 1:
        return served
    parts = spec.layouts[0]
    starts = np.cumsum([0, *(part.size for part in parts)])
    out = np.empty(spec.shape, served.dtype)
    column = 0
    for i, first, count in shard_columns(parts, shards):
        start = starts[i] + first
        out[..., start : start + count] = served[..., column : column + count]
        column += count
    return out


def layouts_by_name(table: ParamTable) -> dict[str, Stored]:
    """Return the weights and layouts of each tensor that may be stored unpacked, by name."""
    found: dict[str, dict[ParamPath, tuple[ParamSpec, Layout]]] = {}
    for spec in table:
        for layout in spec.readable:
            for part in layout if layout[0].format is None else ():
                for name in part.names:
                    found.setdefault(name, {}).setdefault(spec.path, (spec, layout))
    return {name: tuple(stored.values()) for name, stored in found.items()}


def published_tensor(
    stored: Stored,
    name: str,
    served: ServedArray,
    *,
    dtype: npt.DTypeLike,
    shards: int,
) -> HostArray:
    """Return one tensor as a checkpoint would store it unpacked, in the served dtype."""
    whole: HostArray | None = None
    for spec, layout in stored:
        weight = served(spec.path)
        part = next(part for part in layout if name in part.names)
        if part.stack and isinstance(weight, W8A8Weight):  # unpack no other
            entry = part.names.index(name)
            weight = jax.tree.map(itemgetter(spec.stored_entries.index(entry)), weight)
            spec, layout = _matrix(spec, layout, entry)
        host = unsharded(spec, np.asarray(dense(weight, dtype)), shards=shards)
        if spec.entries is not None:  # one copy of each expert
            host = host[[spec.entries.index(entry) for entry in sorted({*spec.entries})]]
        if spec.is_integer:  # a vocabulary map, which is stored as offsets
            host = host.astype(np.int64) - np.arange(len(host))
        for found, part, piece in pieces(layout, host):
            if found == name and piece.shape == part.shape:
                return np.ascontiguousarray(piece, dtype=host.dtype)
            if found == name:
                whole = np.empty(part.shape, host.dtype) if whole is None else whole
                put_piece(whole, part, piece)
    assert whole is not None
    return whole


def _matrix(spec: ParamSpec, layout: Layout, entry: int) -> tuple[ParamSpec, Layout]:
    """Return one matrix of a stack, by its stored index."""
    own = replace(spec, shape=spec.shape[1:], axes=spec.axes[1:], entries=None)
    return own, tuple(replace(part, name=part.name.format(entry), stack=0) for part in layout)


def changed_reads(
    where: str,
    given: Mapping[str, LazyTensor],
    table: ParamTable,
    served: ServedArray,
    *,
    dtype: npt.DTypeLike,
    shards: int,
) -> list[ParamRead]:
    """Return reads of the weights that `given` changes, with the served other parts of fused ones.
    where: the source, for errors. Raises CheckpointError."""
    known = layouts_by_name(table)
    tensors = lazy_tensors(Path(where), given)
    fixed = [name for name in given if any(spec.is_integer for spec, _ in known.get(name, ()))]
    if fixed:
        raise CheckpointError(
            f"{where}: {fixed[0]} determines which ids are drafted; expected it unchanged, or an "
            "update of the draft from disk"
        )
    shapes = {name: _shape(name, known[name]) for name in given if name in known}
    tensors.check({}, optional=shapes, is_stray=lambda _: False)
    layouts = _layouts(where, given, known)
    specs = tuple(spec for spec in table if spec.path in layouts or spec.tied_to in layouts)
    all_tensors = dict(given)
    for spec in specs:
        layout = layouts.get(spec.path, ())
        for name in (name for part in layout for name in part.names if name not in given):
            all_tensors[name] = _served_tensor(known[name], name, served, dtype, shards)
    reads = param_reads(lazy_tensors(Path(where), all_tensors), specs, dtype=dtype, shards=shards)
    return [
        _keeping(each, layouts[each.spec.path], given, served, shards)
        if isinstance(each.spec.format, W8A8)
        else each
        for each in reads
    ]


def _served_tensor(
    stored: Stored, name: str, served: ServedArray, dtype: npt.DTypeLike, shards: int
) -> LazyTensor:
    """Return a tensor that is not given: zeros if only W8A8 weights, which keep codes, need it."""
    weight, shape = served(stored[0][0].path), _shape(name, stored)
    own = np.dtype(dtype if isinstance(weight, W8A8Weight) else weight.dtype)
    fetch = partial(published_tensor, stored, name, served, dtype=own, shards=shards)
    if all(isinstance(spec.format, W8A8) for spec, _ in stored):
        fetch = partial(np.zeros, shape, own)
    return LazyTensor(shape, dtype_name(own), fetch)


def _keeping(
    each: ParamRead, layout: Layout, given: Collection[str], served: ServedArray, shards: int
) -> ParamRead:
    """Return a read that quantizes the given parts of a weight; the other parts keep their codes
    bit for bit."""
    spec, read_part = each.spec, each.read_part
    pieces = tuple(shard_columns(layout, spec.column_shards(shards)))

    def is_given(entry: int) -> np.ndarray:
        names = [part.names[entry if part.stack else 0] for part in layout]
        return np.concatenate([np.full(n, names[i] in given) for i, _, n in pieces])

    def kept(new: W8A8Weight, part: slice = slice(None)) -> W8A8Weight:
        old = served(spec.path)
        if len(spec.shape) == 2:
            changed = is_given(0)
        else:
            changed = np.stack([is_given(entry) for entry in spec.stored_entries[part]])
        of_scales = changed
        if new.block is not None:
            of_scales = changed[..., None, ::BLOCK]
        return replace(
            new,
            codes=np.where(changed[..., None, :], new.codes, np.asarray(old.codes)[part]),
            scales=np.where(of_scales, new.scales, np.asarray(old.scales)[part]),
        )

    def kept_part(part: range) -> W8A8Weight:
        assert read_part is not None
        return kept(read_part(part), slice(part.start, part.stop))

    return replace(
        each,
        read=lambda: kept(each.read()),
        read_part=None if read_part is None else kept_part,
    )


def _shape(name: str, stored: Stored) -> Shape:
    return next(part.shape for part in stored[0][1] if name in part.names)


def _layouts(
    where: str, given: Mapping[str, LazyTensor], known: dict[str, Stored]
) -> dict[ParamPath, Layout]:
    all_stored = [own for stored in known.values() for own in stored]
    by_path = {spec.path: layout for spec, layout in reversed(all_stored)}
    layouts: dict[ParamPath, Layout] = {}
    changed = [(name, *own) for name in given for own in known[name]]
    for name, spec, layout in sorted(changed, key=lambda each: each[1].tied_to is not None):
        if spec.tied_to is not None:
            layouts.setdefault(spec.tied_to, by_path[spec.tied_to])
            continue
        before = layouts.setdefault(spec.path, layout)
        if before != layout:
            raise CheckpointError(
                f"{where}: has {name} and {before[0].name}, which are stored forms of one weight; "
                "expected one of them"
            )
    return layouts
