"""Weights in fp8 (e4m3) or int8 with scales, read as float32; `w8a8_weights` leaves them packed.

A weight X [.., O, I] is the stored value times the scale of its block. The scales are one of:

    X_scale_inv [.., ceil(O / 128), ceil(I / 128)]   per block of 128 x 128: DeepSeek's form, also
                                                     of MiMo-V2, Step-3.5 and Qwen3
    X_scale [], [1], [.., O] or [.., O, 1]           per tensor or per row: compressed-tensors,
                                                     fbgemm_fp8, vLLM's fp8, ModelOpt's

int8 has the second form, of compressed-tensors alone (`int8.py`). Despite its name, `_scale_inv` is
also a factor. Scales of activations are ignored.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields, exists, read_fields
from jspec.models.files.array_tensors import DTYPES, LazyHeader, LazyTensor
from jspec.models.files.int8 import check_int8
from jspec.models.files.kv_scales import with_kv_scales
from jspec.models.files.tensor_files import FP8, INT8, HostArray, TensorFile, Tensors
from jspec.models.files.tensor_files import open_tensors as open_stored
from jspec.spec import weight_format
from jspec.spec.weight_format import W8A8, Shape

SCALES = ("_scale_inv", "_scale")
MODELOPT, _OLDER_MODELOPT = "modelopt", "modelopt_fp8"
METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", MODELOPT, _OLDER_MODELOPT)
E4M3_NAMES = ("e4m3", "float8_e4m3fn")  # DeepSeek's, MiniMax's
BLOCK = (128, 128)  # the default of config.json
STATIC = ("input_scale", "activation_scale", "input_scale_ub")  # scales of products' inputs
_OF_ACTIVATIONS = (*STATIC, "q_scale")
# Keys of config.json that list modules that are not quantized.
_KEPT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
CODES = (FP8, INT8)  # dtypes of codes
_NUMBERS = {
    dtype: np.arange(256, dtype=np.uint8).view(DTYPES[dtype]).astype(np.float32) for dtype in CODES
}
_FLOAT32 = "F32"
Form = W8A8 | str  # a tensor's stored form, or the reason why it must be unpacked


def check_quantization(fields: Fields) -> tuple[int, int]:
    """Return (rows, columns) of a scale's block, or raise ConfigError for other quantization."""
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
    if method in (MODELOPT, _OLDER_MODELOPT):
        inner = table.table("quantization") if table.get("quantization") else table
        why = "fp8 with a scale per tensor or row is all that is read of it"
        inner.refuse("quant_algo", allowed=("FP8", "FP8_PER_CHANNEL_PER_TOKEN"), why=why)
        return BLOCK
    table.refuse("fmt", allowed=E4M3_NAMES, why="fp8 is read in this form alone")
    return _block(table, "weight_block_size")


def _is_int8(table: Fields) -> bool:
    groups = table.table("config_groups")
    kinds = {groups.table(name).table("weights").get("type") for name in groups.values}
    return kinds == {"int"}


def _compressed_block(table: Fields) -> tuple[int, int]:
    if _is_int8(table):
        check_int8(table)
        return BLOCK
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


def quantization_method(path: Path) -> str | None:
    method = read_fields(path / "config.json").table("quantization_config").get("quant_method")
    if method is None and exists(path / "hf_quant_config.json"):
        return MODELOPT  # older exports of ModelOpt have no key in config.json
    if method == _OLDER_MODELOPT:
        return MODELOPT
    return None if method is None else str(method)


def declared_forms(path: Path) -> Callable[[str], Form | None]:
    """Return a function from tensor names to stored forms, from config.json alone."""
    fields = read_fields(path / "config.json")
    table = fields.table("quantization_config")
    if table.get("quant_method") not in METHODS:
        return lambda _: None
    block = check_quantization(fields)
    form: Form = weight_format.INT8() if _is_int8(table) else weight_format.FP8()
    groups = table.table("config_groups")
    strategies = {groups.table(x).table("weights").get("strategy") for x in groups.values}
    if table.get("weight_block_size") is not None or "block" in strategies:
        form = weight_format.FP8(has_blocks=True)
    found = form if block == BLOCK else _odd_block(*block)
    kept = [str(x) for key in _KEPT for x in (table.get(key) or ())]

    def form_of(name: str) -> Form | None:
        return None if any(_names(entry, name) for entry in ("lm_head", *kept)) else found

    return form_of


def _names(entry: str, tensor: str) -> bool:
    """Match a tensor's module with a module, a glob (ModelOpt's) or a pattern after "re:"."""
    if entry.startswith("re:"):
        return re.match(entry[3:], tensor.removesuffix(".weight")) is not None
    if any(sign in entry for sign in "*?["):
        return fnmatchcase(tensor.removesuffix(".weight"), entry)
    return tensor.startswith(f"{entry}.") or f".{entry}." in tensor


def _odd_block(rows: int, columns: int) -> str:
    return f"a scale's block is {rows} x {columns}, not 128 x 128"


@contextmanager
def open_tensors(
    path: Path, *, canonical: Callable[[str], str] = lambda name: name
) -> Iterator[Tensors]:
    """Open a checkpoint (tensor_files.open_tensors), 8-bit weights as float32 without scales."""
    with open_stored(path, canonical=canonical) as tensors:
        yield unscaled(with_kv_scales(tensors))


def unscaled(tensors: Tensors) -> Tensors:
    coded = [name for name in tensors.sources if tensors.dtype(name) in CODES]
    if not coded:
        return tensors
    config = tensors.path / "config.json"
    block = check_quantization(read_fields(config)) if exists(config) else BLOCK
    sources = dict(tensors.sources)
    for name in coded:
        scales = next((name + end for end in SCALES if name + end in tensors), None)
        if scales is None:
            raise CheckpointError(
                f"{tensors.path}: {name} has dtype {tensors.dtype(name)} but no scales; expected "
                f"{' or '.join(name + end for end in SCALES)}"
            )
        scaled = Scaled.of(tensors, name, scales, block)
        sources[name] = scaled, scaled.name
        del sources[scales]
    kept = {name: file for name, file in sources.items() if not _is_of_activations(name)}
    return replace(tensors, sources=kept)


def coded_bytes(tensors: Tensors, *, without: Collection[str]) -> Mapping[str, int]:
    """Return the bytes of codes by the name of their format."""
    found: Counter[str] = Counter()
    for name, (file, _) in tensors.sources.items():
        if name not in without and isinstance(file, Scaled):
            found[file.kind.name] += math.prod(file.shape)
    return found


def _is_of_activations(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _OF_ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Scaled:
    """One weight whose values are computed on read. shape: (*X, O, I); block: of one scale. The
    scales are [num, columns] in row-major order, with the same number of rows for each [O, I]."""

    codes: TensorFile
    name: str  # in `codes`
    scales: TensorFile
    scales_name: str
    scales_dtype: np.dtype[Any]
    shape: Shape
    block: tuple[int, int]
    dtype: str  # of the codes

    @classmethod
    def of(cls, tensors: Tensors, name: str, scales: str, block: tuple[int, int]) -> Scaled:
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
            dtype=tensors.dtype(name),
        )

    @property
    def path(self) -> Path:
        return self.codes.path

    @property
    def kind(self) -> type[W8A8]:
        return weight_format.INT8 if self.dtype == INT8 else weight_format.FP8

    @property
    def form(self) -> Form:
        (rows, columns), size = self.block, weight_format.FP8.size
        if columns >= self.shape[-1]:
            return self.kind()
        if self.dtype == FP8 and columns == size and rows in (size, min(size, self.shape[-2])):
            return weight_format.FP8(has_blocks=True)
        return _odd_block(rows, columns)

    def rows(self, chosen: HostArray) -> tuple[HostArray, HostArray]:
        """Return (codes [n, I], scales [n, columns of blocks]) of ascending rows of one matrix."""
        first, count = int(chosen[0]), int(chosen[-1]) - int(chosen[0]) + 1
        codes = np.empty((count, self.shape[-1]), DTYPES[self.dtype])
        self.codes.read_into(codes, self.name, offset=first * self.shape[-1])
        factors = self._factors(first, count)
        if len(chosen) == count:
            return codes, factors
        return codes[chosen - first], factors[chosen - first]

    @property
    def header(self) -> LazyHeader:
        return LazyHeader({self.name: LazyTensor(self.shape, _FLOAT32, self._whole)})

    def _whole(self) -> HostArray:
        out = np.empty(self.shape, np.float32)
        self.read_into(out, self.name)
        return out

    def read_into(self, out: HostArray, name: str, *, offset: int = 0) -> None:
        del name
        width = self.shape[-1]
        rows = out.reshape(-1, width)
        first = offset // (width * out.itemsize)
        codes = np.empty(rows.shape, np.uint8)
        self.codes.read_into(codes, self.name, offset=first * width)
        np.take(_NUMBERS[self.dtype], codes, out=rows, mode="clip")
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
    """Return a weight's block by its scales' shape. Raises CheckpointError if they do not fit."""
    shape, found = tensors.shape(name), tensors.shape(scales)
    if len(shape) < 2 or 0 in shape:
        raise CheckpointError(
            f"{tensors.path}: {name} has dtype {tensors.dtype(name)} and shape {shape}; expected a "
            "matrix"
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
