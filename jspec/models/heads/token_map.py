"""FR-Spec's map of frequent ids (Zhao et al., 2025, arXiv:2502.14856), the target ids that may be
drafted: .json (a list), .npy, .safetensors (its only tensor) or torch's .pt, integers of one
axis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jspec.errors import CheckpointError
from jspec.files.json_files import MIB, check_regular, read_text
from jspec.models.files.tensor_files import HostArray
from jspec.models.files.torch_files import read_torch_tensor

MAX_BYTES = 256 * MIB


def read_token_map(path: Path, *, vocab_size: int) -> HostArray:
    """Return i32[U], ascending distinct ids in [0, vocab_size). Raises CheckpointError."""
    if path.suffix not in READERS:
        raise CheckpointError(
            f"{path}: a token map's name ends in {path.suffix!r}; expected one of "
            f"{', '.join(READERS)}"
        )
    if check_regular(path) > MAX_BYTES:
        raise CheckpointError(f"{path}: is larger than {MAX_BYTES} bytes; expected at most that")
    ids = np.asarray(READERS[path.suffix](path))
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise CheckpointError(
            f"{path}: has {ids.dtype} of shape {ids.shape}; expected integers of one axis, at "
            "least one"
        )
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise CheckpointError(
            f"{path}: has the id {outside[0]}; expected ids from 0 to {vocab_size - 1}, the "
            "target's vocabulary"
        )
    distinct, counts = np.unique(ids, return_counts=True)
    if distinct.size != ids.size:
        raise CheckpointError(
            f"{path}: has the id {distinct[counts > 1][0]} {counts.max()} times; expected each once"
        )
    return distinct.astype(np.int32)


def _read_json(path: Path) -> Any:
    try:
        values = json.loads(read_text(path, max_bytes=MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON: {error}") from error
    if not isinstance(values, list):
        raise CheckpointError(f"{path}: holds {type(values).__name__}; expected a list of ids")
    for value in values:
        if type(value) is not int or abs(value) >= 2**31:
            raise CheckpointError(f"{path}: holds {str(value)[:50]!r}; expected a list of ids")
    return np.asarray(values, np.int64)


def _read_npy(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _read_safetensors(path: Path) -> Any:
    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            if len(names) != 1:
                raise CheckpointError(
                    f"{path}: has {len(names)} tensors; expected one, the list of ids"
                )
            return file.get_tensor(names[0])
    except (SafetensorError, OSError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


READERS = {
    ".json": _read_json,
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
    ".pt": read_torch_tensor,
}
