"""The target's features of every row on disk: written in one pass, read in every epoch.

FOLDER/hidden.npy       [R, T, E], after the final norm; bfloat16 as its bits (u16)
FOLDER/aux.npy          [R, T, A], the captures that the head reads; absent if A is 0
FOLDER/manifest.json    their key; written last: a folder without it is written again
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.format import open_memmap

from jspec.errors import ConfigError, OutputError
from jspec.files.json_files import read_object
from jspec.files.output_files import remove, whole_file, write_text, writing
from jspec.training.data.examples import RowTable
from jspec.training.heads.draft_head import TargetFeatures

MANIFEST = "manifest.json"
BLOCKS, BLOCK_BYTES = 64, 4096  # per file, in the fingerprint
Key = Mapping[str, Any]  # the inputs that determine the features, as JSON


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureStore:
    hidden: np.ndarray
    aux: np.ndarray | None
    dtype: np.dtype[Any]

    def batch(self, rows: np.ndarray | slice) -> dict[str, np.ndarray]:
        hidden = np.asarray(self.hidden[rows]).view(self.dtype)
        aux = hidden[..., :0] if self.aux is None else np.asarray(self.aux[rows]).view(self.dtype)
        return {"hidden": hidden, "aux": aux}


def key_of(
    target_path: Path, table: RowTable, *, aux_layer_ids: tuple[int, ...], dtype: Any
) -> Key:
    return {
        "target": fingerprint(target_path),
        "rows": hashlib.sha256(table.ids.tobytes()).hexdigest(),
        "shape": list(table.ids.shape),
        "aux_layer_ids": list(aux_layer_ids),
        "dtype": np.dtype(dtype).name,
    }


def fingerprint(target_path: Path) -> str:
    """Return SHA-256 of config.json and of name, size and sampled blocks of each weights file."""
    digest = hashlib.sha256((target_path / "config.json").read_bytes())
    flat = (file for suffix in ("safetensors", "bin") for file in target_path.glob(f"*.{suffix}"))
    for file in sorted((*flat, *(target_path / "orbax").rglob("*"))):
        if not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.relative_to(target_path)} {size}\n".encode())
        with file.open("rb") as opened:
            for i in range(BLOCKS):
                opened.seek(size * i // BLOCKS)
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()


def open_features(folder: Path, key: Key) -> FeatureStore | None:
    """Return a finished pass's features, or None. Raises ConfigError if their key differs."""
    if not (folder / MANIFEST).is_file():
        return None
    found = read_object(folder / MANIFEST)
    for name, value in key.items():
        if found.get(name) != value:
            raise ConfigError(
                f"{folder} has features whose {name} is {found.get(name)!r}; expected {value!r}: "
                "take another folder, or remove it"
            )
    dtype = np.dtype(getattr(ml_dtypes, key["dtype"], key["dtype"]))
    aux = folder / "aux.npy"
    return FeatureStore(
        hidden=np.load(folder / "hidden.npy", mmap_mode="r"),
        aux=np.load(aux, mmap_mode="r") if aux.exists() else None,
        dtype=dtype,
    )


def write_features(
    folder: Path,
    table: RowTable,
    key: Key,
    features: Callable[[dict[str, np.ndarray]], TargetFeatures],
    *,
    batch_size: int,
    progress: Callable[[int, int], None],
) -> None:
    """Run `features` over all rows. Raises OutputError early if the disk is too small."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    num_rows = len(table.ids)
    for start in range(0, num_rows, batch_size):
        wanted = np.minimum(np.arange(start, start + batch_size), num_rows - 1)
        found = features(table.batch(wanted))
        stop = min(start + batch_size, num_rows)
        for name, value in (("hidden", found.hidden), ("aux", found.aux)):
            host = _as_bits(np.asarray(value))
            if not host.size:
                continue
            if name not in arrays:
                shape = (num_rows, *host.shape[1:])
                try:
                    arrays[name] = _reserved(folder / f"{name}.npy", shape, host.dtype)
                except OutputError:
                    for other in arrays:
                        remove(folder / f"{other}.npy")
                    raise
            arrays[name][start:stop] = host[: stop - start]
        progress(stop, num_rows)
    for array in arrays.values():
        array.flush()  # type: ignore[attr-defined]
    write_text(folder / MANIFEST, json.dumps(key, indent=1) + "\n")


def _reserved(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array in a fully allocated file; otherwise a full disk would end the process."""
    with whole_file(path) as part:
        open_memmap(part, mode="w+", dtype=dtype, shape=shape)
        with part.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, part.stat().st_size)
    return open_memmap(path, mode="r+")


def _as_bits(value: np.ndarray) -> np.ndarray:
    return value.view(np.uint16) if value.dtype == ml_dtypes.bfloat16 else value
