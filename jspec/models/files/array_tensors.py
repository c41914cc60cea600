"""Tensors in memory, or computed on read, with the interface of a checkpoint's file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors

from jspec.errors import CheckpointError
from jspec.spec.weight_format import Shape

HostArray = npt.NDArray[Any]
FP8, INT8 = "F8_E4M3", "I8"

# numpy's dtypes by safetensors' names; files are little-endian.
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        FP8: np.dtype(ml_dtypes.float8_e4m3fn),
        "F32": np.dtype("<f4"),
        "F64": np.dtype("<f8"),
        "BOOL": np.dtype("?"),
        **{
            f"{kind.upper()}{8 * n}": np.dtype(f"<{kind}{n}") for kind in "iu" for n in (1, 2, 4, 8)
        },
    }
)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: np.dtype[np.generic]) -> str:
    return _NAMES.get(dtype, str(dtype))


@dataclass(frozen=True, slots=True)
class LazyTensor:
    shape: Shape
    dtype: str  # safetensors' name
    fetch: Callable[[], HostArray]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: int) -> HostArray:
        return np.asarray(self.fetch()[index])


@dataclass(frozen=True, slots=True)
class LazyHeader:
    tensors: Mapping[str, LazyTensor]

    def keys(self) -> Iterable[str]:
        return self.tensors.keys()

    def get_slice(self, name: str) -> LazyTensor:
        return self.tensors[name]

    def get_tensor(self, name: str) -> HostArray:
        return self.tensors[name].fetch()


@dataclass(frozen=True, slots=True)
class LazyFile:
    """A TensorFile of lazy tensors that caches the last fetched ones, one per reading thread."""

    path: Path
    header: LazyHeader
    _kept: dict[str, HostArray] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    NUM_KEPT = 4

    def read_into(self, out: HostArray, name: str, *, offset: int = 0) -> None:
        with self._lock:
            found = self._kept.get(name)
        if found is None:
            found = np.ascontiguousarray(self.header.get_tensor(name))
            with self._lock:
                self._kept[name] = found
                while len(self._kept) > self.NUM_KEPT:
                    del self._kept[next(iter(self._kept))]
        data = found.reshape(-1).view(np.uint8)
        wanted = out.reshape(-1).view(np.uint8)
        if offset + wanted.size > data.size:
            raise CheckpointError(
                f"{self.path}: {name} has {data.size} bytes; expected at least "
                f"{offset + wanted.size}"
            )
        wanted[...] = data[offset : offset + wanted.size]


def in_memory(array: HostArray) -> LazyTensor:
    return LazyTensor(array.shape, dtype_name(array.dtype), lambda: array)


def arrays_of_safetensors(data: bytes) -> dict[str, HostArray]:
    """Return the tensors in a safetensors file's bytes. Raises CheckpointError."""
    arrays: dict[str, HostArray] = {}
    try:
        for name, tensor in safetensors.deserialize(data):  # type: ignore[no-untyped-call]
            if tensor["dtype"] not in DTYPES:
                raise CheckpointError(
                    f"{name} has dtype {tensor['dtype']}; expected one of {', '.join(DTYPES)}"
                )
            numbers = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]])
            arrays[name] = numbers.reshape(tensor["shape"])
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"is no safetensors file: {error}") from None
    return arrays
