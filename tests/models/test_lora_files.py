"""Adapters in peft's layout: what is read of them, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import CheckpointError, ConfigError, NoCheckpointError
from jspec.models.files.lora_files import needs_of, read_adapter
from jspec.models.params import shard_columns
from jspec.models.registry import table_of
from jspec.spec.lora_spec import LoRASpec
from tests.support.lora_adapters import PREFIX, write_adapter
from tests.support.tiny_models import tiny_target_config

TARGET = tiny_target_config()
TABLE = table_of(TARGET)
MODULES = ("down_proj", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj")
LORA = LoRASpec(num_loras=2, rank=4, modules=MODULES)
BASE = {
    part.name: np.zeros(part.shape, np.float32)
    for spec in TABLE
    for part in spec.layouts[0]
    if len(part.shape) == 2
}


def write(path: Path, *, modules: tuple[str, ...] = MODULES, **options: Any) -> Path:
    write_adapter(path, BASE, modules, **options)
    return path


def read(path: Path, *, shards: int = 1) -> dict[Any, Any]:
    return read_adapter(path, TABLE, LORA, dtype=np.float32, shards=shards)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("by_root", [False, True])
def test_ranks_and_scales_follow_the_patterns(tmp_path: Path, shards: int, by_root: bool) -> None:
    """Four shards repeat the two kv heads, and split every other output."""
    path = write(tmp_path / "a", rank=4, alpha=6.0, use_rslora=by_root)
    stored = load_file(path / "adapter_model.safetensors")
    for name in [name for name in stored if ".v_proj." in name]:
        stored[name] = stored[name][:2] if "lora_A" in name else stored[name][:, :2].copy()
    save_file(stored, path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    config |= {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 9}}
    (path / "adapter_config.json").write_text(json.dumps(config))
    assert needs_of(path) == (4, frozenset(MODULES))
    found = read(path, shards=shards)
    kernels = {spec.path: spec for spec in TABLE}
    for layer in range(TARGET.num_layers):
        for product in (("attention", "qkv"), ("mlp", "gate_up"), ("mlp", "down")):
            spec = kernels["layers", layer, *product, "kernel"]
            a = found["lora", "layers", layer, *product, "a"]
            for i, part in enumerate(spec.layouts[0]):
                module = part.name.removesuffix(".weight")
                down, up = (stored[f"{PREFIX}{module}.lora_{x}.weight"] for x in "AB")
                rank = len(down)
                assert rank == (2 if "v_proj" in module else 4)
                alpha = 9.0 if module.endswith("layers.1.mlp.down_proj") else 6.0
                scale = np.float32(alpha / (math.sqrt(rank) if by_root else rank))
                np.testing.assert_array_equal(a[:, i, :rank], down.T)
                assert not a[:, i, rank:].any()
                pieces = shard_columns((part,), spec.column_shards(shards))
                rows = [row for _, first, n in pieces for row in range(first, first + n)]
                b = found["lora", "layers", layer, *product, "b", i]
                np.testing.assert_array_equal(b[:rank], (up * scale)[rows].T)
                assert not b[rank:].any()


def test_modules_without_an_adapter_are_zeros(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a", modules=("model.layers.1.self_attn.q_proj",)))
    used = {path for path, array in found.items() if array.any()}
    root = ("lora", "layers", 1, "attention", "qkv")
    assert used == {(*root, "a"), (*root, "b", 0)}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected 'LORA'"),
        ({"use_dora": True}, "use_dora is True; expected False"),
        ({"bias": "lora_only"}, "bias is 'lora_only'; expected 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]; expected \[\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True; expected False"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; expected True or"),
        ({"r": 0}, "r is 0; expected a positive integer"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'; expected a positive number"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern has '\('; expected patterns"),
    ],
)
def test_what_an_adapter_asks_for_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=said):
        read(write(tmp_path / "a", **config))


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (f"{Q}.lora_A.weight", (4, 5), r"has shape \(4, 5\); expected \(4, 32\)"),
        (f"{Q}.lora_B.weight", (32, 3), r"has shape \(32, 3\); expected \(32, 4\)"),
        (f"{Q}.lora_magnitude_vector.weight", (32,), "is DoRA's; expected plain LoRA"),
        ("model.embed_tokens.lora_embedding_A", (4, 9), "adapts the embedding; expected"),
        ("lm_head.lora_A.weight", (4, 32), "adapts lm_head, which is no plain linear layer here"),
        (f"{Q}.bias", (32,), "is no lora_A or lora_B of a linear layer"),
        ("model.layers.0.mlp.experts.3.up_proj.lora_A.weight", (4, 32), "adapts experts; expected"),
        (
            "model.layers.0.self_attn.o_proj.lora_A.weight",
            (4, 32),
            "adapts o_proj; expected modules in lora_target_modules, down_proj, gate_proj, k_proj",
        ),
        ("model.layers.7.self_attn.q_proj.lora_A.weight", (4, 32), "which the model has not"),
        ("model.layers.1.mlp.up_proj.lora_A.weight", None, "up_proj has lora_B alone; expected"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, said: str
) -> None:
    path = write(tmp_path / "a")
    stored = load_file(path / "adapter_model.safetensors")
    if shape is None:
        del stored[PREFIX + name]
    else:
        stored[PREFIX + name] = np.zeros(shape, np.float32)
    save_file(stored, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        read(path)


def test_a_rank_beyond_the_servers_a_number_that_is_none_and_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has rank 8; expected at most max_lora_rank 4"):
        read(write(tmp_path / "rank", rank=8))
    file = write(tmp_path / "nan") / "adapter_model.safetensors"
    stored = load_file(file)
    stored[f"{PREFIX}{Q}.lora_B.weight"][3, 1] = math.nan
    save_file(stored, file)
    with pytest.raises(CheckpointError, match="has a number that is not finite"):
        read(file.parent)
    with pytest.raises(CheckpointError, match="has no tensor; expected a LoRA adapter"):
        read(write(tmp_path / "empty", modules=()))
    with pytest.raises(NoCheckpointError, match="expected a directory with a LoRA adapter in peft"):
        read(tmp_path)
    (path := write(tmp_path / "bare")).joinpath("adapter_model.safetensors").unlink()
    with pytest.raises(NoCheckpointError, match="without weights; expected a LoRA adapter"):
        read(path)
