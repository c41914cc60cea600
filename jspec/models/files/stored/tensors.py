"""Conversion of a model's arrays to a checkpoint's tensors, in numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.errors import CheckpointError
from jspec.models.files.tensor_files import HostArray
from jspec.models.params import Form, ParamPath, ParamSpec, ParamTable, Part


def stored_tensors(
    table: ParamTable, params: Mapping[str, Any], *, dtype: npt.DTypeLike
) -> dict[str, HostArray]:
    """Return the tensors of unsharded params, each in its first layout. Raises CheckpointError."""
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
        put_piece(whole, part, piece)


def pieces(layout: tuple[Part, ...], host: HostArray) -> Iterator[tuple[str, Part, HostArray]]:
    """Yield (name, part, stored array) of an unsharded weight; views unless `plus` is nonzero."""
    column = 0
    for part in layout:
        columns = host[..., column : column + part.size]
        column += part.size
        turned = columns if part.form is Form.AS_IS else np.swapaxes(columns, -1, -2)
        for index, name in enumerate(part.names):
            piece = turned[index] if part.stack else turned
            yield name, part, piece - np.float32(part.plus) if part.plus else piece


def put_piece(whole: HostArray, part: Part, piece: HostArray) -> None:
    """Write a part into its stored tensor; the part may lack axes of size one."""
    rows = whole if piece.ndim == whole.ndim else whole.reshape(-1, whole.shape[-1])
    index = (..., part.rows) if part.form is Form.AS_IS else (..., part.rows, slice(None))
    rows[index] = piece


def value_at(params: Mapping[str, Any], path: ParamPath) -> Any:
    value: Any = params
    for key in path:
        value = value[key]
    return value
