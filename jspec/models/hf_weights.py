"""Safetensors checkpoints on the host, and where each projection sits in jspec's fused kernels.

Everything here is numpy: loaders return host arrays in the dtype that was asked for, and the
caller puts them on devices. Tensors are read one at a time into the kernel that they become part
of, so a load holds the model once and the largest single tensor beside it. Hugging Face stores a
projection as [out, in]; jspec multiplies by [in, out].

Knows no model; hf_llama and hf_eagle3 do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (importing it teaches numpy bfloat16, which safetensors asks for)
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jspec.core.config import TransformerConfig
from jspec.core.errors import CheckpointError, ConfigError

HostArray = npt.NDArray[Any]
Shape = tuple[int, ...]
Placement = tuple[slice, slice]  # (rows of a stored projection, columns of the fused kernel)

WEIGHT_DTYPES = ("F16", "BF16", "F32", "F64")  # in safetensors' spelling
_BLOCK = 256  # rows transposed at once: one block and its destination stay in a CPU's cache


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of an open checkpoint by canonical name; each read copies from the file."""

    path: Path
    sources: Mapping[str, tuple[Any, str]]  # name: (open file, the name in that file)

    def __contains__(self, name: str) -> bool:
        return name in self.sources

    def shape(self, name: str) -> Shape:
        file, stored = self.sources[name]
        return tuple(file.get_slice(stored).get_shape())

    def read(self, name: str) -> HostArray:
        file, stored = self.sources[name]
        try:
            return np.asarray(file.get_tensor(stored))
        except (SafetensorError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: cannot read {name}: {error}") from error

    def weight(self, name: str) -> HostArray:
        """`read`, for a tensor that must hold floating-point numbers."""
        file, stored_name = self.sources[name]
        dtype = file.get_slice(stored_name).get_dtype()
        if dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{self.path}: {name} has dtype {dtype}; expected one of "
                f"{', '.join(WEIGHT_DTYPES)} (quantized weights are not served)"
            )
        return self.read(name)

    def check(
        self,
        expected: Mapping[str, Shape],
        *,
        optional: Mapping[str, Shape],
        is_stray: Callable[[str], bool],
    ) -> None:
        """CheckpointError unless the file holds exactly `expected`, give or take the others."""
        for name, shape in expected.items():
            if name not in self:
                raise CheckpointError(f"{self.path}: no tensor {name}; expected shape {shape}")
        known = {**expected, **optional}
        for name in self.sources:
            if name not in known:
                if is_stray(name):
                    continue
                raise CheckpointError(
                    f"{self.path}: unknown tensor {name} of shape {self.shape(name)}; "
                    "expected only names of this architecture"
                )
            if self.shape(name) != known[name]:
                raise CheckpointError(
                    f"{self.path}: {name} has shape {self.shape(name)}; expected {known[name]}"
                )


@contextmanager
def open_tensors(
    path: Path, *, canonical: Callable[[str], str] = lambda name: name
) -> Iterator[Tensors]:
    """Opens `path`/model.safetensors, or the files of `path`/model.safetensors.index.json.

    `canonical` maps a stored name to the one that the caller uses.
    Raises CheckpointError, naming the file, where one is missing, truncated or corrupt.
    """
    with ExitStack() as stack:
        sources: dict[str, tuple[Any, str]] = {}
        for file_path, wanted in _files(path).items():
            try:
                file = stack.enter_context(safe_open(file_path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file_path}: cannot be read: {error}") from error
            stored_names = set(file.keys())
            if missing := sorted(wanted - stored_names):
                raise CheckpointError(f"{file_path}: no tensor {missing[0]}, which the index names")
            for stored in sorted(stored_names):
                name = canonical(stored)
                if name in sources:
                    raise CheckpointError(f"{file_path}: {stored} is a second {name}")
                sources[name] = (file, stored)
        yield Tensors(path, sources)


def _files(path: Path) -> dict[Path, set[str]]:
    """Each safetensors file of a checkpoint, with the tensors that its index promises."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return {single: set()}
    if not index.exists():
        pickled = sorted(item.name for item in path.glob("pytorch_model*.bin"))
        hint = f" (it has {pickled[0]}: convert it to safetensors)" if pickled else ""
        raise CheckpointError(f"{path}: expected {single.name} or {index.name}{hint}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file_name in weight_map.items():
            if Path(file_name).name != file_name:
                raise ValueError(f"weight_map names {file_name!r}, outside this directory")
            files.setdefault(path / file_name, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: cannot be read as an index: {error}") from error
    return files


def write_checkpoint(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, HostArray]
) -> None:
    """Writes `path`/model.safetensors and config.json; holds one copy of the tensors meanwhile."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def qkv_placements(config: TransformerConfig, *, shards: int) -> dict[str, list[Placement]]:
    """Where the rows of q_proj, k_proj and v_proj go among the fused columns.

    Shard by shard q, k, v; kv heads are repeated when shards > G. In heads, for H = 4, G = 2:
    2 shards: q0 q1 k0 v0 | q2 q3 k1 v1      4 shards: q0 k0 v0 | q1 k0 v0 | q2 k1 v1 | q3 k1 v1
    """
    H, G, D = config.num_heads, config.num_kv_heads, config.head_dim
    if H % shards or (G % shards and shards % G):
        raise ConfigError(
            f"tensor parallel size is {shards}; expected a divisor of {H} heads that divides, "
            f"or is a multiple of, {G} kv heads"
        )
    num_q, num_kv = H // shards, max(G // shards, 1)
    placements: dict[str, list[Placement]] = {"q_proj": [], "k_proj": [], "v_proj": []}
    column = 0
    for shard in range(shards):
        first_kv = shard * G // shards
        for name, first, count in (
            ("q_proj", shard * num_q, num_q),
            ("k_proj", first_kv, num_kv),
            ("v_proj", first_kv, num_kv),
        ):
            rows = slice(first * D, (first + count) * D)
            placements[name].append((rows, slice(column, column + count * D)))
            column += count * D
    return placements


def gate_up_placements(inner: int, *, shards: int) -> dict[str, list[Placement]]:
    """gate_proj's and up_proj's rows among the fused columns: shard by shard gate, then up.

    inner = 4, 2 shards: g0 g1 u0 u1 | g2 g3 u2 u3
    """
    if inner % shards:
        raise ConfigError(
            f"tensor parallel size is {shards}; expected a divisor of intermediate_size {inner}"
        )
    size = inner // shards
    rows = [slice(i * size, (i + 1) * size) for i in range(shards)]
    return {
        "gate_proj": [(rows[i], slice(2 * i * size, (2 * i + 1) * size)) for i in range(shards)],
        "up_proj": [
            (rows[i], slice((2 * i + 1) * size, (2 * i + 2) * size)) for i in range(shards)
        ],
    }


def num_columns(placements: Mapping[str, Iterable[Placement]]) -> int:
    return max(int(columns.stop) for placed in placements.values() for _, columns in placed)


def fuse_kernel(
    tensors: Tensors,
    prefix: str,
    placements: Mapping[str, list[Placement]],
    *,
    in_size: int,
    dtype: npt.DTypeLike,
) -> HostArray:
    """[in, columns] from the stored `prefix`{name}.weight, each [out, in]."""
    fused = np.empty((in_size, num_columns(placements)), dtype)
    for name, placed in placements.items():
        stored = tensors.weight(f"{prefix}{name}.weight")
        for rows, columns in placed:
            _transpose_into(fused[:, columns], stored[rows])
    return fused


def fuse_bias(
    tensors: Tensors,
    prefix: str,
    placements: Mapping[str, list[Placement]],
    *,
    dtype: npt.DTypeLike,
) -> HostArray:
    """[columns] from the stored `prefix`{name}.bias."""
    fused = np.empty((num_columns(placements),), dtype)
    for name, placed in placements.items():
        stored = tensors.weight(f"{prefix}{name}.bias")
        for rows, columns in placed:
            fused[columns] = stored[rows]
    return fused


def kernel(tensors: Tensors, name: str, *, dtype: npt.DTypeLike) -> HostArray:
    """[in, out] from one stored [out, in]."""
    stored = tensors.weight(name)
    out = np.empty(stored.shape[::-1], dtype)
    _transpose_into(out, stored)
    return out


def vector_or_table(tensors: Tensors, name: str, *, dtype: npt.DTypeLike) -> HostArray:
    """A tensor that keeps its layout: a norm's scale or an embedding."""
    return tensors.weight(name).astype(dtype, copy=False)


def unfuse(
    fused: Any, placements: Mapping[str, list[Placement]], prefix: str, *, dtype: npt.DTypeLike
) -> dict[str, HostArray]:
    """The stored tensors of an unsharded fused kernel (or bias); inverse of the fuse functions.

    A kernel that was fused for several shards has the same shape and other columns where G divides
    among them: nothing here can tell, so only params of a `shards=1` load may come here.
    """
    host = np.asarray(fused)
    if host.shape[-1] != num_columns(placements):
        raise CheckpointError(
            f"params give {prefix}{'|'.join(placements)} {host.shape[-1]} fused columns; expected "
            f"{num_columns(placements)} (only unsharded params can be saved)"
        )
    suffix = "bias" if host.ndim == 1 else "weight"
    return {
        f"{prefix}{name}.{suffix}": stored(host[..., columns], dtype=dtype)
        for name, [(_, columns)] in placements.items()
    }


def stored(value: Any, *, dtype: npt.DTypeLike) -> HostArray:
    """A kernel as it is stored, [out, in], contiguous; vectors stay as they are."""
    return np.ascontiguousarray(np.asarray(value).T, dtype=dtype)


def check_stored(tensors: Mapping[str, HostArray], expected: Mapping[str, Shape]) -> None:
    """CheckpointError unless what is about to be written is what the configuration says."""
    for name in sorted(tensors.keys() | expected.keys()):
        found = tensors[name].shape if name in tensors else None
        if found != expected.get(name):
            raise CheckpointError(
                f"params give {name} the shape {found}; expected {expected.get(name)} "
                "from the configuration"
            )


def _transpose_into(out: HostArray, source: HostArray) -> None:
    """out[...] = source.T, cast; plain integers move 16-bit floats several times faster."""
    if out.dtype == source.dtype and out.dtype.itemsize == 2:
        out, source = out.view(np.uint16), source.view(np.uint16)
    for start in range(0, source.shape[0], _BLOCK):
        out[:, start : start + _BLOCK] = source[start : start + _BLOCK].T
