"""Rows of sampling parameters in a packed layout, encoded by SAMPLING_FIELDS."""

from __future__ import annotations

from typing import Any

import numpy as np

from jspec.messages.request import SAMPLING_FIELDS, Request
from jspec.messages.sampling_fields import Row

# Fields of a packed layout are named PREFIX + the row's name.
PREFIX = "sampling."
# By the name of SamplingBatch' field.
SAMPLING_ROWS: dict[str, Row] = {f.row.name or f.name: f.row for f in SAMPLING_FIELDS if f.row}


def packed_fields(num_rows: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((PREFIX + name, (num_rows, *row.shape)) for name, row in SAMPLING_ROWS.items())


def write_neutral(fields: dict[str, np.ndarray], *, vocab_size: int) -> None:
    """Make every row of the packed fields neutral: greedy, without stop ids."""
    for name, array in typed_fields(fields).items():
        array[:] = SAMPLING_ROWS[name].neutral_value(vocab_size)


def write_request(
    fields: dict[str, np.ndarray], r: int, request: Request, *, vocab_size: int
) -> None:
    arrays = typed_fields(fields)
    for parameter in SAMPLING_FIELDS:
        row = parameter.row
        if row is None:
            continue
        value = getattr(request.sampling, parameter.name)
        if row.encode is not None:
            value = row.encode(request, vocab_size)
        to = arrays[row.name or parameter.name]
        if row.shape:
            values = np.asarray(value, row.dtype).reshape(-1)
            to.reshape(len(to), -1)[r, : values.size] = values
        else:
            to[r] = value


def typed_fields(fields: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return views of the packed i32 fields by name, in the dtypes of SamplingBatch."""
    return {name: fields[PREFIX + name].view(row.dtype) for name, row in SAMPLING_ROWS.items()}
