"""LoRA adapters as peft writes them, and the merged weights that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]
PREFIX = "base_model.model."


def write_adapter(
    path: Path,
    base: Mapping[str, np.ndarray],
    modules: Collection[str],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.2,
    **config: Any,
) -> Tensors:
    """Write an adapter of all of `base` whose module's name, or its last part, is in `modules`.

    Returns the changed weights: W + alpha / rank * B A.
    """
    rng = np.random.default_rng(seed)
    stored, merged = {}, {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or not {module, module.rsplit(".", 1)[-1]} & set(modules):
            continue
        a = size * rng.standard_normal((rank, weight.shape[1])).astype(np.float32)
        b = size * rng.standard_normal((weight.shape[0], rank)).astype(np.float32)
        stored[f"{PREFIX}{module}.lora_A.weight"] = a
        stored[f"{PREFIX}{module}.lora_B.weight"] = b
        merged[name] = weight.astype(np.float32) + np.float32(alpha / rank) * (b @ a)
    path.mkdir(parents=True)
    save_file(stored, path / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rsplit(".", 2)[-2] for name in merged}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    }
    (path / "adapter_config.json").write_text(json.dumps(values | config))
    return merged


def write_merged(path: Path, checkpoint: Path, merged: Mapping[str, np.ndarray]) -> Path:
    """Write a copy of a checkpoint of one file with other weights."""
    shutil.copytree(checkpoint, path)
    whole = load_file(checkpoint / "model.safetensors")
    save_file({**whole, **merged}, path / "model.safetensors", metadata={"format": "pt"})
    return path
