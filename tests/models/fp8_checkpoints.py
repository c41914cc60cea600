"""Small checkpoints with products in fp8 or int8, in each published layout, and their numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from jspec.models.files.checkpoint import save_target
from jspec.models.files.tensor_files import open_tensors
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import LayerSpec, ModelSpec, uniform_decoder

E4M3 = ml_dtypes.float8_e4m3fn
LARGEST = 448.0
Packed = tuple[np.ndarray, np.ndarray]  # codes and scales of a weight [out, in]


def per_row(weight: np.ndarray) -> Packed:
    scales = (np.abs(weight).max(axis=1, keepdims=True) / LARGEST).astype(np.float32)
    return (weight / scales).astype(E4M3), scales


def per_row_flat(weight: np.ndarray) -> Packed:
    codes, scales = per_row(weight)
    return codes, scales[:, 0]


def per_tensor(weight: np.ndarray) -> Packed:
    scale = np.float32(np.abs(weight).max() / LARGEST)
    return (weight / scale).astype(E4M3), np.array(scale)


def per_row_int8(weight: np.ndarray) -> Packed:
    """Quantize as compressed-tensors does, with scales of the largest magnitude / 127.5."""
    scales = (np.abs(weight).max(axis=1, keepdims=True) / 127.5).astype(np.float32)
    return np.clip(np.rint(weight / scales), -128, 127).astype(np.int8), scales


def per_block(weight: np.ndarray, *, size: int = 128) -> Packed:
    counts = [-(-length // size) for length in weight.shape]
    padded = np.zeros([count * size for count in counts], np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.reshape(counts[0], size, counts[1], size)
    scales = np.abs(blocks).max(axis=(1, 3)).astype(np.float32) / np.float32(LARGEST)
    codes = (blocks / scales[:, None, :, None]).reshape(padded.shape).astype(E4M3)
    return codes[: weight.shape[0], : weight.shape[1]].copy(), scales


def values_of(codes: np.ndarray, scales: np.ndarray, *, size: int = 128) -> np.ndarray:
    numbers = codes.astype(np.float32)
    if scales.size in (1, len(codes)):
        return numbers * scales.reshape(-1, 1)
    each = scales.repeat(size, axis=0).repeat(size, axis=1)
    return numbers * each[: codes.shape[0], : codes.shape[1]]


_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


def _compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = _WEIGHTS | {"strategy": strategy} | more
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8_GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": _INT8 | {"strategy": "channel", "dynamic": False, "group_size": None},
    "input_activations": _INT8 | {"strategy": "token", "dynamic": True, "group_size": None},
    "output_activations": None,
}
INT8_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": INT8_GROUP},
    "ignore": ["lm_head"],
}
# Name: (quantization_config, how a weight is packed, the end of its scales' name).
LAYOUTS: dict[str, tuple[dict[str, Any] | None, Callable[[np.ndarray], Packed], str]] = {
    "blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        per_block,
        "_scale_inv",
    ),
    "compressed channel": (_compressed("channel"), per_row, "_scale"),
    "compressed tensor": (_compressed("tensor"), per_tensor, "_scale"),
    "compressed block": (
        _compressed("block", block_structure=[128, 128]),
        per_block,
        "_scale",
    ),
    "int8": (INT8_CONFIG, per_row_int8, "_scale"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, per_row, "_scale"),
    "modelopt, older": (None, per_tensor, "_scale"),
    "modelopt, as SGLang names it": (
        {"quant_method": "modelopt_fp8", "quant_algo": "FP8"},
        per_tensor,
        "_scale",
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, per_tensor, "_scale"),
}


def wide_spec(*, inner: int = 384) -> ModelSpec:
    """Return a spec in which every part of a product, and each shard's share, ends with a block."""
    return uniform_decoder(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=inner,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        max_position=320,
        eos_token_ids=(256,),
        bos_token_id=256,
    )


def moe_spec(*, inner: int = 256, num_layers: int = 1) -> ModelSpec:
    """Return a spec with four experts in each layer, whose halves end with blocks."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=64, qk_norm=True)
    ffn = MoESpec(num_experts=4, top_k=2, inner=inner)
    layer = LayerSpec(attention=attention, ffn=ffn, eps=1e-5)
    return replace(wide_spec(), layers=(layer,) * num_layers, family="qwen3_moe")


def write_plain(path: Path, spec: ModelSpec, *, seed: int = 0) -> Path:
    save_target(path, spec, init_params(table_of(spec), seed=seed), dtype=np.float32)
    return path


def fuse_experts(path: Path) -> None:
    """Store each layer's experts as two tensors, as transformers 5 does."""
    with open_tensors(path) as opened:
        tensors = {name: opened.read(name) for name in opened.sources}
    found: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        before, after = name.split(".experts.")
        expert, projection, kind = after.split(".")
        end = kind.removeprefix("weight")
        of_layer = found.setdefault(f"{before}.experts.{{}}{end}", {})
        of_layer.setdefault(int(expert), {})[projection] = tensors.pop(name)
    for name, experts in found.items():
        each = [experts[expert] for expert in range(len(experts))]
        halves = [np.concatenate([one["gate_proj"], one["up_proj"]]) for one in each]
        tensors[name.format("gate_up_proj")] = np.stack(halves)
        tensors[name.format("down_proj")] = np.stack([one["down_proj"] for one in each])
    save_file(tensors, path / "model.safetensors")


def write_fp8(plain: Path, path: Path, layout: str, *, only: str = "proj") -> Path:
    """Write the checkpoint with packed projections (names with `only`) to `path`; return a
    directory with them as float32."""
    config, pack, end = LAYOUTS[layout]
    shutil.copytree(plain, path)
    tensors = load_file(plain / "model.safetensors")
    numbers = dict(tensors)
    for name in [name for name in tensors if "proj" in name and only in name]:
        codes, scales = pack(tensors[name])
        tensors |= {name: codes, f"{name}{end}": scales}
        numbers[name] = values_of(codes, scales)
        if "modelopt" in layout:
            before = name.removesuffix("weight")
            tensors |= {f"{before}input_scale": np.array(np.float32(0.5))}
    save_file(tensors, path / "model.safetensors")
    if config is None:
        quantization = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
        (path / "hf_quant_config.json").write_text(json.dumps(quantization))
    else:
        whole = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
        (path / "config.json").write_text(json.dumps(whole))
    unpacked = path.with_name(f"{path.name}_numbers")
    shutil.copytree(plain, unpacked)
    save_file(numbers, unpacked / "model.safetensors")
    return unpacked
