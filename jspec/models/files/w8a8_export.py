"""Quantization of a checkpoint to fp8 or int8, in the layout of compressed-tensors (W8A8).

X.weight         e4m3 or int8 [out, in]
X.weight_scale   float32 [out, 1]: the largest magnitude of the row / 448, of int8 / 127
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from jspec.errors import ConfigError
from jspec.models.files.array_tensors import DTYPES, LazyFile, LazyHeader, LazyTensor
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.files.stored.layouts import chosen_layout
from jspec.models.files.tensor_files import FP8, INT8, HostArray, Tensors
from jspec.models.files.w8a8 import quantization_method
from jspec.models.files.w8a8_weights import stored_w8a8
from jspec.models.registry import table_of
from jspec.spec import weight_format
from jspec.spec.weight_format import W8A8, Op

_SMALLEST = np.float32(2.0**-100)
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class _Kind:
    dtype: str  # safetensors' name
    largest: float
    type: str  # compressed-tensors' names
    format: str


_KINDS: Mapping[type[W8A8], _Kind] = {
    weight_format.FP8: _Kind(FP8, 448.0, "float", "float-quantized"),
    weight_format.INT8: _Kind(INT8, 127.0, "int", "int-quantized"),
}


def products_of(source: Path, tensors: Tensors, format: W8A8) -> set[str]:
    """Return the tensors that serving in `format` quantizes. Raises ConfigError if some are."""
    method = quantization_method(source)
    if method is not None:
        raise ConfigError(
            f"{source} is quantized by {method!r}; expected weights in 16 or 32 bits to quantize"
        )
    table = table_of(load_model_spec(source))
    wanted = (param for param in table if param.layouts and param.op in (Op.LINEAR, Op.GATED))
    found: set[str] = set()
    for param in wanted:
        layout = chosen_layout(tensors, param)
        stored = stored_w8a8(param, layout, lambda _: format, shards=1)
        if stored is not None and stored.problem is None:
            found |= {name for part in layout for name in part.names}
    return found


def with_codes(tensors: Tensors, names: Collection[str], format: W8A8) -> Tensors:
    """Return the tensors, with those of `names` as codes and scales that are computed on read."""
    made: dict[str, LazyTensor] = {}
    kind = _KINDS[type(format)]
    both = lru_cache(maxsize=1)(partial(quantized, tensors, kind))  # its scales are read next
    for name in names:
        rows, columns = tensors.shape(name)
        made[name] = LazyTensor((rows, columns), kind.dtype, partial(_part, both, name, 0))
        made[f"{name}_scale"] = LazyTensor((rows, 1), "F32", partial(_part, both, name, 1))
    file = LazyFile(tensors.path, LazyHeader(made))
    return replace(tensors, sources={**tensors.sources, **{name: (file, name) for name in made}})


def _part(both: Callable[[str], tuple[HostArray, ...]], name: str, which: int) -> HostArray:
    return both(name)[which]


def quantized(tensors: Tensors, kind: _Kind, name: str) -> tuple[HostArray, HostArray]:
    """Return a tensor's codes [out, in] and scales f32[out, 1]."""
    largest = np.float32(kind.largest)
    numbers = tensors.weight(name).astype(np.float32)
    most = np.abs(numbers).max(axis=1, keepdims=True)
    scales = np.maximum(most, _SMALLEST) * np.float32(1.0 / kind.largest)
    codes = np.clip(numbers / scales, -largest, largest)
    codes = np.round(codes) if kind.dtype == INT8 else codes
    return codes.astype(DTYPES[kind.dtype]), scales


def quantization_config(tensors: Tensors, names: Collection[str], format: W8A8) -> dict[str, Any]:
    """Return config.json's quantization_config, which lists all other products as ignored."""
    kind = _KINDS[type(format)]
    numbers = {"num_bits": 8, "type": kind.type, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": kind.format,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": _ignored(tensors, names),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
    }


def _ignored(tensors: Tensors, names: Collection[str]) -> list[str]:
    kept = {
        name.removesuffix(".weight")
        for name in tensors.sources
        if name.endswith(".weight")
        and name not in names
        and len(tensors.shape(name)) == 2
        and "embed_tokens" not in name
    }
    experts = {name for name in kept if ".experts." in name}  # thousands, so one pattern for all
    return sorted({"lm_head", *(kept - experts)}) + (["re:.*[.]experts[.].*"] if experts else [])
