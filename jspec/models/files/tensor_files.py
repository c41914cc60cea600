"""Checkpoints on the host: reading a directory's tensors by name, and writing a new one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jspec.errors import CheckpointError, OutputError, shown
from jspec.files.json_files import MIB, check_regular, exists, read_object
from jspec.files.output_files import write_text, writing
from jspec.models.files.array_tensors import DTYPES, LazyFile, LazyHeader, LazyTensor
from jspec.models.files.array_tensors import FP8 as FP8
from jspec.models.files.array_tensors import INT8 as INT8
from jspec.models.files.array_tensors import HostArray as HostArray
from jspec.models.files.torch_files import open_torch_file
from jspec.spec.weight_format import Shape as Shape

WEIGHT_DTYPES = {name: DTYPES[name] for name in ("F16", "BF16", "F32", "F64")}
PACKED_DTYPE = "U8"
LISTED = 20  # tensors per kind that an error names
# A single file or the index of several; safetensors before torch's.
FILES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
ORBAX = "orbax"  # an orbax directory, written by `jspec convert`
NAMES = (*(name for names in FILES for name in names), ORBAX)
MAX_INDEX_BYTES = 128 * MIB  # the largest published have about 15
BLOCK_BYTES = MIB  # of a block of rows: it stays in a CPU's cache
_SYSTEM_ERROR = re.compile(r"I/O error: (.+) \(os error \d+\)")
_TRANSPOSED = 32  # rows transposed at once: a cache line of 16-bit values in the destination


class TensorFile(Protocol):
    """A thread-safe source of tensors."""

    @property
    def path(self) -> Path: ...

    @property
    def header(self) -> Any:
        """Like safetensors' handle: get_tensor(name), get_slice(name).get_shape(), .get_dtype()."""
        ...

    def read_into(self, out: HostArray, name: str, *, offset: int = 0) -> None:
        """Fill `out` (contiguous) from `offset` bytes into the tensor."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An open weights file, read without safetensors' memory map: plain reads release the GIL, and
    a truncated file is an error instead of a signal."""

    path: Path
    header: Any  # safetensors' handle, or a TorchFile
    file: BinaryIO
    spans: Mapping[str, tuple[int, int]]  # [start, end) of each tensor, in bytes

    def read_into(self, out: HostArray, name: str, *, offset: int = 0) -> None:
        """Fill `out` from `offset` bytes into the tensor. Raises CheckpointError if it is
        shorter."""
        data = out.reshape(-1).view(np.uint8).data
        first, end = self.spans[name]
        at = first + offset
        if at + len(data) > end:
            raise CheckpointError(
                f"{self.path}: {name} has {end - first} bytes; expected at least "
                f"{offset + len(data)}"
            )
        while data:  # a system call returns at most 2 GiB
            try:
                count = os.preadv(self.file.fileno(), [data], at)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot read {name}: {error}") from error
            if not count:
                raise CheckpointError(
                    f"{self.path}: cannot read {name}: the file ends at byte {at}; expected "
                    f"{len(data)} more"
                )
            data, at = data[count:], at + count


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of an open checkpoint by canonical name. Reads copy and are thread-safe."""

    path: Path
    sources: Mapping[str, tuple[TensorFile, str]]  # name: (open file, the name in that file)

    def __contains__(self, name: str) -> bool:
        return name in self.sources

    def file_of(self, name: str) -> Path:
        return self.sources[name][0].path

    def shape(self, name: str) -> Shape:
        file, stored = self.sources[name]
        return tuple(file.header.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        file, stored = self.sources[name]
        return str(file.header.get_slice(stored).get_dtype())

    def read(self, name: str) -> HostArray:
        file, stored = self.sources[name]
        if self.dtype(name) == FP8:  # safetensors cannot read it into numpy
            out = np.empty(self.shape(name), DTYPES[FP8])
            file.read_into(out, stored)
            return out
        try:
            return np.asarray(file.header.get_tensor(stored))
        except (SafetensorError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: cannot read {name}: {error}") from error

    def weight_dtype(self, name: str) -> np.dtype[Any]:
        """Return the numpy dtype. Raises CheckpointError unless it is floating-point."""
        dtype = self.dtype(name)
        if dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{self.path}: {name} has dtype {dtype}; expected one of "
                f"{', '.join(WEIGHT_DTYPES)} (quantized weights are not served)"
            )
        return WEIGHT_DTYPES[dtype]

    def weight(self, name: str) -> HostArray:
        out = np.empty(self.shape(name), self.weight_dtype(name))
        file, stored = self.sources[name]
        file.read_into(out, stored)
        return out

    def entry(self, name: str, index: int) -> HostArray:
        """Return entry `index` of the first axis of a weight, reading only that entry."""
        out = np.empty(self.shape(name)[1:], self.weight_dtype(name))
        file, stored = self.sources[name]
        file.read_into(out, stored, offset=index * out.nbytes)
        return out

    def row_blocks(
        self, name: str, rows: range, columns: range | None = None
    ) -> Iterator[tuple[int, HostArray]]:
        """Yield (first row, block of 1 MiB or one row) for `rows` of a weight [.., in] seen as
        [rows, in]. The next block overwrites it. columns: the range of `in` to read."""
        width = self.shape(name)[-1]
        columns = range(width) if columns is None else columns
        dtype = self.weight_dtype(name)
        per_block = max(BLOCK_BYTES // max(len(columns) * dtype.itemsize, 1), 1)
        buffer = np.empty((min(per_block, len(rows)), len(columns)), dtype)
        file, stored = self.sources[name]
        for first in range(rows.start, rows.stop, per_block):
            block = buffer[: rows.stop - first]
            together = (block,) if len(columns) == width else block
            for row, read in enumerate(together, first):
                at = row * width + columns.start
                file.read_into(read, stored, offset=at * dtype.itemsize)
            yield first, block

    def packed(self, name: str, index: int) -> HostArray:
        file, stored = self.sources[name]
        if self.dtype(name) != PACKED_DTYPE:
            raise CheckpointError(
                f"{self.path}: {name} has dtype {self.dtype(name)}; expected {PACKED_DTYPE}"
            )
        try:
            return np.asarray(file.header.get_slice(stored)[index])
        except (SafetensorError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: cannot read {name}: {error}") from error

    def check(
        self,
        expected: Mapping[str, Shape],
        *,
        optional: Mapping[str, Shape],
        is_stray: Callable[[str], bool],
        integers: Collection[str] = (),
        packed: Collection[str] = (),
    ) -> None:
        """Raise one CheckpointError for all tensors that are missing, not allowed, or do not fit.
        Weights are floating-point, except those in `integers` or in `packed` (bytes)."""
        known = {**expected, **optional}
        found = [name for name in self.sources if name in known or not is_stray(name)]
        shapes = {name: self.shape(name) for name in found}
        types = {name: self.dtype(name) for name in found if name in known}
        served = ", ".join(WEIGHT_DTYPES)
        is_divided = len({file.path for file, _ in self.sources.values()}) > 1

        def place(name: str) -> str:
            return f", in {self.file_of(name).name}" if is_divided else ""

        kinds = {
            "missing": [
                f"no tensor {name}; expected shape {shape}"
                for name, shape in expected.items()
                if name not in self
            ],
            "unknown": [
                f"unknown tensor {name} of shape {shape}; expected only names of this architecture"
                f"{place(name)}"
                for name, shape in shapes.items()
                if name not in known
            ],
            "of another shape": [
                f"{name} has shape {shape}; expected {known[name]}{place(name)}"
                for name, shape in shapes.items()
                if name in known and shape != known[name]
            ],
            "of another type": [
                f"{name} has dtype {dtype}; expected one of {served} (quantized weights are not "
                f"served){place(name)}"
                for name, dtype in types.items()
                if dtype not in WEIGHT_DTYPES and name not in integers and name not in packed
            ]
            + [
                f"{name} has dtype {dtype}; expected {PACKED_DTYPE} (packed weights){place(name)}"
                for name, dtype in types.items()
                if dtype != PACKED_DTYPE and name in packed
            ],
        }
        if any(kinds.values()):
            raise CheckpointError(f"{self.path}: {listed(kinds)}")


def listed(kinds: Mapping[str, Sequence[str]], *, what: str = "tensors do not fit") -> str:
    """Join the lines of all kinds: the first 20 of each, and the number of others."""
    total = sum(map(len, kinds.values()))
    lines = [f"{total} {what}"] if total > 1 else []
    for kind, found in kinds.items():
        lines += found[:LISTED]
        if len(found) > LISTED:
            lines.append(f"{len(found) - LISTED} more are {kind}, {len(found)} in all")
    return "\n  ".join(lines)


def lazy_tensors(path: Path, tensors: Mapping[str, LazyTensor]) -> Tensors:
    file = LazyFile(path, LazyHeader(tensors))
    return Tensors(path, {name: (file, name) for name in tensors})


def has_tensors(path: Path) -> bool:
    return any(exists(path / name) for name in NAMES)


@contextmanager
def open_tensors(
    path: Path, *, canonical: Callable[[str], str] = lambda name: name
) -> Iterator[Tensors]:
    """Open a directory's weights, the first of these that exists. Raises CheckpointError.

    model.safetensors or the files of model.safetensors.index.json; pytorch_model.bin or its index
    (files.torch_files); the directory orbax (files.orbax_files). canonical: renames stored names.
    """
    with ExitStack() as stack:
        sources: dict[str, tuple[TensorFile, str]] = {}
        for file_path, (file, stored_names) in _open_all(stack, _files(path)).items():
            for stored in sorted(stored_names):
                name = canonical(stored)
                if name in sources:
                    raise CheckpointError(f"{file_path}: {stored} is a second {name}")
                sources[name] = (file, stored)
        yield Tensors(path, sources)


@contextmanager
def open_file(path: Path) -> Iterator[Tensors]:
    """Open one file of tensors, .safetensors or torch's .bin. Raises CheckpointError."""
    with ExitStack() as stack:
        file = _open(stack, path)
        yield Tensors(path, {name: (file, name) for name in file.header.keys()})  # noqa: SIM118


def _open_all(
    stack: ExitStack, files: Mapping[Path, set[str]]
) -> dict[Path, tuple[TensorFile, set[str]]]:
    """Open the files and check the index's tensors. Raises one CheckpointError for all missing."""
    opened: dict[Path, tuple[TensorFile, set[str]]] = {}
    unreadable: list[str] = []
    missing: list[str] = []
    for path, promised in files.items():
        try:
            file = _open(stack, path)
        except CheckpointError as error:
            unreadable.append(str(error))
            continue
        names = set(file.header.keys())
        opened[path] = file, names
        missing += [
            f"{path}: no tensor {name}, which the index names" for name in sorted(promised - names)
        ]
    if unreadable or missing:
        kinds = {"unreadable": unreadable, "not in their files": missing}
        raise CheckpointError(listed(kinds, what="faults in the files that the index names"))
    return opened


def _open(stack: ExitStack, path: Path) -> TensorFile:
    """Open one file until `stack` closes. safetensors validates the header and so the spans."""
    if path.name == ORBAX:
        from jspec.models.files.orbax_files import (
            open_orbax,  # its imports take seconds
        )

        return open_orbax(path)
    check_regular(path)
    if path.suffix == ".bin":
        torch_file = open_torch_file(path)
        opened = stack.enter_context(path.open("rb", buffering=0))
        return StoredFile(path, torch_file, opened, torch_file.spans)
    try:
        header = stack.enter_context(safe_open(path, framework="np"))
        file = stack.enter_context(path.open("rb", buffering=0))
        size = int.from_bytes(file.read(8), "little")
        fields = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    spans: dict[str, tuple[int, int]] = {}
    for name in header.keys():  # noqa: SIM118  (a handle, no dict)
        first, end = fields[name]["data_offsets"]
        spans[name] = (8 + size + first, 8 + size + end)
    return StoredFile(path, header, file, spans)


def _files(path: Path) -> dict[Path, set[str]]:
    found = [path / name for name in NAMES if exists(path / name)]
    if not found:
        single, parted = FILES[0]
        raise CheckpointError(f"{path}: expected {single} or {parted}, {FILES[1][0]}, or {ORBAX}/")
    index = found[0]
    if index.suffix != ".json":
        return {index: set()}
    weight_map = read_object(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"{index}: weight_map is {shown(weight_map)}; expected an object of tensor and file"
        )
    files: dict[Path, set[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name in ("", "..") or "\0" in file_name:
            raise CheckpointError(
                f"{index}: weight_map has {shown(file_name)} for {name}; expected a file's name"
            )
        if Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index}: weight_map has {shown(file_name)} for {name}, outside this directory; "
                "expected a file's name"
            )
        files.setdefault(path / file_name, set()).add(name)
    return files


def write_checkpoint(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, HostArray]
) -> None:
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    write_tensors(path / "model.safetensors", tensors)
    write_text(path / "config.json", json.dumps(config, indent=2) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, HostArray]) -> None:
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:  # the former for a full disk, too
        found = _SYSTEM_ERROR.search(str(error))
        reason = found[1] if found else str(error)
        raise OutputError(f"{path}: cannot be written: {reason}") from error


def transpose_into(out: HostArray, source: HostArray) -> None:
    """Set out[...] = source.T, cast. 16-bit floats move as integers, several times faster."""
    moved = out.view(np.uint16) if out.dtype.itemsize == 2 else out
    for start in range(0, source.shape[0], _TRANSPOSED):
        rows = source[start : start + _TRANSPOSED].astype(out.dtype, copy=False)
        moved[:, start : start + _TRANSPOSED] = rows.view(moved.dtype).T
