"""Weights in fp8 (e4m3) with scales, presented as float32 weights. Read, never written.

A weight X [.., O, I] is the stored value times the scale of its block. The scales are one of:

    X_scale_inv [.., ceil(O / 128), ceil(I / 128)]   per block of 128 x 128: DeepSeek's form, also
                                                     of MiMo-V2, Step-3.5 and Qwen3
    X_scale [], [1], [.., O] or [.., O, 1]           per tensor or per row: compressed-tensors,
                                                     fbgemm_fp8, vLLM's fp8

(Despite its name, `_scale_inv` is multiplied by, too.) Scales of activations, K and V are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields, exists, read_fields
from jspec.models.files.array_tensors import LazyHeader, LazyTensor
from jspec.models.files.tensor_files import FP8, HostArray, TensorFile, Tensors
from jspec.models.files.tensor_files import open_tensors as open_stored
from jspec.spec.weight_format import Shape

SCALES = ("_scale_inv", "_scale")
METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
BLOCK = (128, 128)  # the default of config.json
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "q_scale", "k_scale", "v_scale")
_NUMBERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_FLOAT32 = "F32"


def check_quantization(fields: Fields) -> tuple[int, int]:
    """Return (rows, columns) of a scale's block; ConfigError unless weights are fp8 or plain."""
    table = fields.table("quantization_config")
    if not table.values:
        return BLOCK
    method = table.get("quant_method")
    if method not in METHODS:
        raise ConfigError(
            f"{fields.path}: quantization_config has quant_method {shown(method)}; expected "
            f"{' or '.join(map(repr, METHODS))}, or no such key: other quantized weights are not "
            "served"
        )
    if method == "compressed-tensors":
        return _compressed_block(table)
    table.refuse("fmt", allowed=("e4m3",), why="fp8 is read in this form alone")
    return _block(table, "weight_block_size")


def _compressed_block(table: Fields) -> tuple[int, int]:
    allowed = ("float-quantized", "naive-quantized")
    table.refuse("format", allowed=allowed, why="weights in fp8 are all that is read of it")
    groups = table.table("config_groups")
    blocks = {BLOCK}
    for name in groups.values:
        weights = groups.table(name).table("weights")
        why = "weights in fp8 are all that is read of it"
        weights.refuse("num_bits", allowed=(8,), why=why)
        weights.refuse("type", allowed=("float",), why=why)
        weights.refuse("strategy", allowed=("tensor", "channel", "block"), why=why)
        if weights.get("block_structure") is not None:
            blocks.add(_block(weights, "block_structure"))
    if len(blocks - {BLOCK}) > 1:
        raise ConfigError(
            f"{table.path}: block_structure is {' and '.join(map(str, sorted(blocks - {BLOCK})))}; "
            "expected the same in each of config_groups"
        )
    return max(blocks, key=lambda block: block != BLOCK)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.get(name)
    if value is None:
        return BLOCK
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        raise CheckpointError(f"{fields.path}: {name} is {shown(value)}; expected two integers")
    if min(value) < 1:
        raise CheckpointError(f"{fields.path}: {name} is {shown(value)}; expected positive ones")
    return value[0], value[1]


@contextmanager
def open_tensors(
    path: Path, *, canonical: Callable[[str], str] = lambda name: name
) -> Iterator[Tensors]:
    """Open a checkpoint (tensor_files.open_tensors) with fp8 weights as float32, without scales."""
    with open_stored(path, canonical=canonical) as tensors:
        yield unscaled(tensors)


def unscaled(tensors: Tensors) -> Tensors:
    coded = [name for name in tensors.sources if tensors.dtype(name) == FP8]
    if not coded:
        return tensors
    config = tensors.path / "config.json"
    block = check_quantization(read_fields(config)) if exists(config) else BLOCK
    sources = dict(tensors.sources)
    for name in coded:
        scales = next((name + end for end in SCALES if name + end in tensors), None)
        if scales is None:
            raise CheckpointError(
                f"{tensors.path}: {name} has dtype {FP8} but no scales; expected "
                f"{' or '.join(name + end for end in SCALES)}"
            )
        scaled = _Scaled.of(tensors, name, scales, block)
        sources[name] = scaled, scaled.name
        del sources[scales]
    kept = {name: file for name, file in sources.items() if not _is_of_activations(name)}
    return replace(tensors, sources=kept)


def coded_bytes(tensors: Tensors) -> int:
    """Return the bytes of the weights that are stored in fp8, without their scales."""
    files = ((name, file) for name, (file, _) in tensors.sources.items())
    return sum(math.prod(tensors.shape(name)) for name, file in files if isinstance(file, _Scaled))


def _is_of_activations(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _OF_ACTIVATIONS


@dataclass(frozen=True, slots=True)
class _Scaled:
    """One weight whose values are computed on read. shape: (*X, O, I); block: of one scale.

    The scales are [num, columns] in row-major order, with as many rows for each [O, I] of the X.
    """

    codes: TensorFile
    name: str  # in `codes`
    scales: TensorFile
    scales_name: str
    scales_dtype: np.dtype[Any]
    shape: Shape
    block: tuple[int, int]

    @classmethod
    def of(cls, tensors: Tensors, name: str, scales: str, block: tuple[int, int]) -> _Scaled:
        (codes, stored), (file, stored_scales) = tensors.sources[name], tensors.sources[scales]
        shape = tensors.shape(name)
        return cls(
            codes=codes,
            name=stored,
            scales=file,
            scales_name=stored_scales,
            scales_dtype=tensors.weight_dtype(scales),
            shape=shape,
            block=_block_of(tensors, name, scales, block),
        )

    @property
    def path(self) -> Path:
        return self.codes.path

    @property
    def header(self) -> LazyHeader:
        return LazyHeader({self.name: LazyTensor(self.shape, _FLOAT32, self._whole)})

    def _whole(self) -> HostArray:
        out = np.empty(self.shape, np.float32)
        self.read_into(out, self.name)
        return out

    def read_into(self, out: HostArray, name: str, *, offset: int = 0) -> None:
        """Fill `out`, whole rows, from `offset` bytes into the weight as float32."""
        del name
        width = self.shape[-1]
        rows = out.reshape(-1, width)
        first = offset // (width * out.itemsize)
        codes = np.empty(rows.shape, np.uint8)
        self.codes.read_into(codes, self.name, offset=first * width)
        np.take(_NUMBERS, codes, out=rows, mode="clip")
        factors = self._factors(first, len(rows))
        columns = self.block[1]
        if width % columns == 0:
            blocks = rows.reshape(len(rows), -1, columns)
            blocks *= factors[:, :, None]
        else:
            rows *= np.repeat(factors, columns, axis=1)[:, :width]

    def _factors(self, first: int, count: int) -> HostArray:
        """Return the scales [count, columns of blocks] of rows of the weight seen as [X * O, I]."""
        length, width = self.shape[-2:]
        per_matrix, columns = -(-length // self.block[0]), -(-width // self.block[1])
        rows = np.arange(first, first + count)
        index = rows // length * per_matrix + rows % length // self.block[0]
        stored = np.empty((int(index[-1] - index[0]) + 1, columns), self.scales_dtype)
        offset = int(index[0]) * columns * stored.itemsize
        self.scales.read_into(stored, self.scales_name, offset=offset)
        factors = stored.astype(np.float32)
        wrong = ~(np.isfinite(factors) & (factors >= 0))
        if wrong.any():
            raise CheckpointError(
                f"{self.scales.path}: {self.scales_name} has a scale of {factors[wrong][0]}; "
                "expected finite numbers, none below zero"
            )
        return factors[index - index[0]]


def _block_of(tensors: Tensors, name: str, scales: str, block: tuple[int, int]) -> tuple[int, int]:
    """Return a weight's block by its scales' shape; raise CheckpointError if they do not fit."""
    shape, found = tensors.shape(name), tensors.shape(scales)
    if len(shape) < 2 or 0 in shape:
        raise CheckpointError(
            f"{tensors.path}: {name} has dtype {FP8} and shape {shape}; expected a matrix"
        )
    *stack, length, width = shape
    blocks = (-(-length // block[0]), -(-width // block[1]))
    forms = {
        (*stack, *blocks): (min(block[0], length), min(block[1], width)),
        (*stack, length, 1): (1, width),
        (*stack, length): (1, width),
        (*stack, 1, 1): (length, width),
        (*stack, 1): (length, width),
        tuple(stack): (length, width),
    }
    if found not in forms:
        raise CheckpointError(
            f"{tensors.path}: {scales} has shape {found}; expected {(*stack, *blocks)}, one per "
            f"block of {block[0]} x {block[1]}, {(*stack, length, 1)}, one per row, or "
            f"{tuple(stack) or (1,)}, one for all, for {name} of shape {shape}"
        )
    return forms[found]
