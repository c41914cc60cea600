"""Tensors of torch.save files (.bin, .pt), read without torch and without executing them.

Such a zip archive has a pickle that describes the contents, and raw bytes per storage. A pickle
with other names than torch.save writes for tensors is refused.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.errors import CheckpointError, shown
from jspec.files.json_files import MIB, check_regular
from jspec.models.files.array_tensors import DTYPES

MAX_PICKLE_BYTES = 64 * MIB
# safetensors' name of the dtype by torch's name of a storage.
STORAGES: Mapping[str, str] = {
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str  # a key of STORAGES
    member: str
    size: int


@dataclass(frozen=True, slots=True)
class TorchTensor:
    path: Path
    kind: str
    shape: tuple[int, ...]
    first: int  # its first byte in the file

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.get_dtype()].itemsize

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return STORAGES[self.kind]

    def read(self) -> npt.NDArray[Any]:
        with self.path.open("rb") as file:
            file.seek(self.first)
            data = file.read(self.num_bytes)
        if len(data) != self.num_bytes:
            raise CheckpointError(
                f"{self.path}: ends {self.num_bytes - len(data)} bytes early; expected a whole file"
            )
        return np.frombuffer(data, DTYPES[self.get_dtype()]).reshape(self.shape)


class TorchFile:
    """The tensors of a file by name, with the interface of safetensors' handle."""

    def __init__(self, tensors: Mapping[str, TorchTensor]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterator[str]:
        return iter(self._tensors)

    def get_slice(self, name: str) -> TorchTensor:
        return self._tensors[name]

    def get_tensor(self, name: str) -> npt.NDArray[Any]:
        return self._tensors[name].read()

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        return {
            name: (tensor.first, tensor.first + tensor.num_bytes)
            for name, tensor in self._tensors.items()
        }


def open_torch_file(path: Path) -> TorchFile:
    """Return the tensors of a state dict, or of one under "state_dict". Raises CheckpointError."""
    found = _load(path)
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds {type(found).__name__}; expected tensors by name")
    tensors = {name: value for name, value in found.items() if isinstance(value, TorchTensor)}
    if not tensors or not all(isinstance(name, str) for name in tensors):
        raise CheckpointError(f"{path}: holds no tensors by name; expected a model's weights")
    return TorchFile(tensors)


def read_torch_tensor(path: Path) -> npt.NDArray[Any]:
    """Return the one tensor of a file, or its list of integers. Raises CheckpointError."""
    found = _load(path)
    if isinstance(found, TorchTensor):
        return found.read()
    if isinstance(found, list) and found and all(type(item) is int for item in found):
        try:
            return np.asarray(found, np.int64)
        except OverflowError as error:
            raise CheckpointError(f"{path}: holds {shown(found)}; expected ids") from error
    raise CheckpointError(f"{path}: holds {type(found).__name__}; expected one tensor")


def _load(path: Path) -> Any:
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in members if name.endswith("/data.pkl")]
            if len(pickles) != 1 or members[pickles[0]].file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(
                    f"{path}: has {len(pickles)} pickles; expected one of at most "
                    f"{MAX_PICKLE_BYTES} bytes, as torch.save writes"
                )
            root = pickles[0].removesuffix("data.pkl")
            order = f"{root}byteorder"
            if order in members and archive.read(order) != b"little":
                raise CheckpointError(f"{path}: is big-endian; expected little")
            return _Reader(path, root, members, archive.read(pickles[0])).load()
    except CheckpointError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error}; expected torch.save's zip format (torch 1.6 or "
            "later), whole"
        ) from error
    except Exception as error:  # a corrupt pickle can raise anything
        raise CheckpointError(f"{path}: cannot be read: {error!r}") from error


class _Reader(pickle.Unpickler):
    """An unpickler that accepts tensors and containers and refuses every other name."""

    def __init__(
        self, path: Path, root: str, members: Mapping[str, zipfile.ZipInfo], data: bytes
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._path, self._root, self._members = path, root, members

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return name
        allowed = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
        }
        if (module, name) not in allowed:
            raise CheckpointError(
                f"{self._path}: its pickle names {shown(f'{module}.{name}')}; expected tensors, "
                "lists and dictionaries alone (nothing else in such a file is executed)"
            )
        return allowed[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, size = pid
        if kind not in STORAGES:
            raise CheckpointError(f"{self._path}: a storage is {shown(kind)}; expected a known one")
        return _Storage(kind, f"{self._root}data/{key}", size)

    def _tensor(
        self, storage: _Storage, offset: int, shape: Any, stride: Any, *_: Any
    ) -> TorchTensor:
        """Replace torch._utils._rebuild_tensor_v2: offset, shape and stride count elements."""
        shape, expected, step = tuple(shape), [], 1
        for size in reversed(shape):
            expected.append(step)
            step *= size
        in_rows = all(
            size == 1 or found == wanted
            for size, found, wanted in zip(shape, stride, reversed(expected), strict=True)
        )
        item = DTYPES[STORAGES[storage.kind]].itemsize
        info = self._members.get(storage.member)
        if info is None or info.compress_type != zipfile.ZIP_STORED or not in_rows:
            raise CheckpointError(
                f"{self._path}: a tensor of shape {shape} has strides {tuple(stride)} in "
                f"{storage.member}; expected an uncompressed member, row after row"
            )
        if offset < 0 or (offset + step) * item > info.file_size:
            raise CheckpointError(
                f"{self._path}: a tensor of shape {shape} ends after {storage.member}, of "
                f"{info.file_size} bytes; expected all of it"
            )
        return TorchTensor(
            self._path, storage.kind, shape, _data_start(self._path, info) + offset * item
        )


def _data_start(path: Path, info: zipfile.ZipInfo) -> int:
    with path.open("rb") as file:
        file.seek(info.header_offset)
        signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise CheckpointError(f"{path}: {info.filename} has no local header; expected a whole file")
    return int(info.header_offset + _LOCAL_HEADER.size + name + extra)
