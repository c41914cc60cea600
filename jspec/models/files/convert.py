"""Conversion of a checkpoint directory: safetensors or torch files to orbax, and back."""

from __future__ import annotations

import enum
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jspec.errors import ConfigError, NoCheckpointError
from jspec.files.json_files import read_object
from jspec.files.output_files import remove, write_text, writing
from jspec.models.files.tensor_files import (
    FILES,
    NAMES,
    ORBAX,
    HostArray,
    Tensors,
    open_tensors,
    write_tensors,
)
from jspec.models.files.w8a8_export import products_of, quantization_config, with_codes
from jspec.spec.weight_format import W8A8

MAX_FILE_BYTES = 4 * 2**30  # of one safetensors file, which is built in host memory
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
SINGLE, INDEX = FILES[0]


class Format(enum.Enum):
    SAFETENSORS = "safetensors"
    ORBAX = "orbax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    num_tensors: int
    num_bytes: int
    num_files: int


def convert(
    source: Path,
    out: Path,
    to: Format,
    *,
    quantize: W8A8 | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Converted:
    """Write the checkpoint of `source` to `out`, which must be empty or not exist.

    quantize: the format for the products of a target's layers (w8a8_export.py). For orbax the host
    holds all tensors at once. Raises ConfigError, OutputError or CheckpointError; `out` is then
    unchanged.
    """
    if not source.is_dir():
        raise NoCheckpointError(f"{source} is no directory; expected one with a checkpoint")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; expected a new or an empty directory")
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise ConfigError(f"{out} is inside {source}; expected a directory elsewhere")
    is_new = not out.exists()
    with open_tensors(source) as opened:
        products = set() if quantize is None else products_of(source, opened, quantize)
        tensors = opened if quantize is None else with_codes(opened, products, quantize)
        try:
            with writing(out):
                out.mkdir(parents=True, exist_ok=True)
            _copy_rest(source, out)
            if quantize is not None:
                config = read_object(source / "config.json")
                config["quantization_config"] = quantization_config(opened, products, quantize)
                _write_json(out / "config.json", config)
            groups = _groups(tensors, max_file_bytes if to is Format.SAFETENSORS else None)
            if to is Format.ORBAX:
                from jspec.models.files.orbax_files import save_orbax

                save_orbax(out / ORBAX, _read(tensors, tuple(tensors.sources)))
            else:
                _write_safetensors(out, tensors, groups)
        except BaseException:
            remove(out)
            if not is_new:
                out.mkdir()
            raise
        sizes = [_num_bytes(tensors, name) for name in tensors.sources]
    return Converted(num_tensors=len(sizes), num_bytes=sum(sizes), num_files=len(groups))


def _read(tensors: Tensors, names: tuple[str, ...]) -> dict[str, HostArray]:
    return {name: np.asarray(tensors.read(name), order="C") for name in names}


def _num_bytes(tensors: Tensors, name: str) -> int:
    bits = int("".join(c for c in tensors.dtype(name).split("_")[0] if c.isdigit()) or 8)
    return int(np.prod(tensors.shape(name), dtype=np.int64)) * bits // 8


def _groups(tensors: Tensors, max_bytes: int | None) -> list[tuple[str, ...]]:
    """Return the tensors of each file, sorted by name; one above the limit has its own file."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors.sources):
        num_bytes = _num_bytes(tensors, name)
        if max_bytes is not None and groups[-1] and size + num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    return [tuple(group) for group in groups]


def _write_safetensors(out: Path, tensors: Tensors, groups: list[tuple[str, ...]]) -> None:
    weight_map: dict[str, str] = {}
    for i, names in enumerate(groups):
        file = SINGLE
        if len(groups) > 1:
            file = f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
        write_tensors(out / file, _read(tensors, names))
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = sum(_num_bytes(tensors, name) for name in weight_map)
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def _copy_rest(source: Path, out: Path) -> None:
    for path in _rest(source):
        with writing(out / path.name):
            shutil.copyfile(path, out / path.name)


def _rest(source: Path) -> Iterator[Path]:
    for path in sorted(source.iterdir()):
        if path.name in NAMES or path.suffix in WEIGHT_SUFFIXES or not path.is_file():
            continue
        yield path
