"""FP8 caches of K and V in checkpoints: the scheme in config.json, and the scales of the layers.

    self_attn.k_scale, self_attn.attn.k_scale     compressed-tensors, vLLM
    self_attn.k_proj.k_scale                      ModelOpt
    self_attn.k_proj.output_scale                 compressed-tensors' older form

and the same for V. A layer has one scale for K and one for V; K is stored as K / k_scale.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields, exists, read_fields
from jspec.models.files.array_tensors import LazyFile, LazyHeader, LazyTensor
from jspec.models.files.tensor_files import HostArray, Tensors
from jspec.spec.cache_entry import FP8

AUTO = "auto"
DTYPES = {"fp8_e4m3": FP8, "bfloat16": "bfloat16"}  # by the flag's value
_OF_MODELOPT = "hf_quant_config.json"
_NAME = re.compile(
    r"(.*\bself_attn\.)(?:(?:attn\.|qkv_proj\.|[kv]_proj\.)?([kv])_scale|([kv])_proj\.output_scale)"
)
_FLOAT8 = {"num_bits": 8, "type": "float"}


def cached_dtype(flag: str, path: Path) -> str | None:
    """Return the cache's dtype (None: the model's). Raises ConfigError for an unknown scheme."""
    if flag != AUTO:
        return DTYPES[flag]
    table = read_fields(path / "config.json").table("quantization_config")
    found = _scheme_of(table)
    if found is None and exists(path / _OF_MODELOPT):
        found = _scheme_of(read_fields(path / _OF_MODELOPT).table("quantization"))
    return found


def _scheme_of(table: Fields) -> str | None:
    name, scheme = "kv_cache_scheme", table.table("kv_cache_scheme")
    value: object = dict(scheme.values)
    is_fp8 = not scheme.get("dynamic") and scheme.get("strategy") in (None, "tensor")
    is_fp8 = is_fp8 and all(scheme.get(key) == wanted for key, wanted in _FLOAT8.items())
    if not scheme.values:
        name, value = "kv_cache_quant_algo", table.get("kv_cache_quant_algo")
        if value in (None, ""):
            return None
        is_fp8 = value == "FP8"
    if is_fp8:
        return FP8
    raise ConfigError(
        f"{table.path}: {name} is {shown(value)}; expected FP8 with one static scale a tensor, or "
        f"kv_cache_dtype {' or '.join(DTYPES)}, which decides it instead"
    )


def is_kv_scale(name: str) -> bool:
    """Match scales of attention, which a model without an FP8 cache does not read."""
    return name.rsplit(".", 1)[-1] in ("q_scale", "k_scale", "v_scale")


def with_kv_scales(tensors: Tensors) -> Tensors:
    """Return the tensors with scales of K and V as self_attn.k_scale and v_scale, float32 [1]."""
    named = {name: found for name in tensors.sources if (found := _NAME.fullmatch(name))}
    if not named:
        return tensors
    sources = {name: file for name, file in tensors.sources.items() if name not in named}
    scales: dict[str, LazyTensor] = {}
    for name, found in named.items():
        canonical = f"{found[1]}{found[2] or found[3]}_scale"
        if canonical in scales:
            raise CheckpointError(f"{tensors.path}: {name} is a second {canonical}")
        shape = tensors.shape(name)
        shape = (1,) if math.prod(shape) == 1 else shape
        scales[canonical] = LazyTensor(shape, "F32", partial(_read, tensors, name))
    file = LazyFile(tensors.path, LazyHeader(scales))
    return replace(tensors, sources=sources | {name: (file, name) for name in scales})


def _read(tensors: Tensors, name: str) -> HostArray:
    scale = tensors.weight(name).astype(np.float32).reshape(-1)
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise CheckpointError(
            f"{tensors.path}: {name} is {scale[0]}; expected a finite number above 0"
        )
    return scale
