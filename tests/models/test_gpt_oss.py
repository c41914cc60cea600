"""gpt-oss: its published config and its mxfp4 experts."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.workloads import GPT_OSS_20B_JSON, PACKED
from jspec.device.weights import dense
from jspec.engine.weights.resident_formats import Wanted, resident_formats
from jspec.errors import CheckpointError, ConfigError
from jspec.models.families.gpt_oss import expert_params
from jspec.models.files.checkpoint import load_model_spec, load_target, save_target
from jspec.models.files.mxfp4 import E2M1
from jspec.models.files.stored.layouts import check_names
from jspec.models.files.stored.param_reads import on_host, param_reads
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import open_tensors
from jspec.models.layer import Params
from jspec.models.params import with_formats
from jspec.models.placement import nested
from jspec.models.registry import family_named, table_of
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import Gate, MoESpec, Routing
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.rope import RopeConfig, YarnConfig
from jspec.spec.weight_format import Formats
from tests.models.random_params import assert_same, random_params

GOLDEN = Path(__file__).parents[1] / "golden" / "families" / "gpt_oss"
GPT_OSS_20B = {
    **GPT_OSS_20B_JSON,
    "model_type": "gpt_oss",
    "experts_per_token": 4,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
}


def read(path: Path, values: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(values))
    return load_model_spec(path)


def test_the_published_config(tmp_path: Path) -> None:
    full = AttentionSpec(
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rope=RopeConfig(
            theta=150000.0,
            factor=32.0,
            original_max_position=4096,
            yarn=YarnConfig(attention_factor=0.1 * np.log(32.0) + 1, truncate=False),
        ),
        sinks=True,
        qkv_bias=True,
        out_bias=True,
    )
    moe = MoESpec(
        num_experts=32,
        top_k=4,
        inner=2880,
        routing=Routing.TOP_THEN_SOFTMAX,
        gate=Gate.CLAMPED,
        bias=True,
    )
    windowed = dataclasses.replace(full, window=128)
    layers = tuple(LayerSpec(attention=a, ffn=moe, eps=1e-5) for a in (windowed, full))
    spec = read(tmp_path, GPT_OSS_20B)
    assert spec == ModelSpec(
        vocab_size=201088,
        hidden_size=2880,
        layers=layers * 12,
        rms_norm_eps=1e-5,
        max_position=131072,
        eos_token_ids=(200002,),
        family="gpt_oss",
    )
    assert read(tmp_path, family_named("gpt_oss").to_json(spec)) == spec


def test_absent_keys_mean_what_transformers_takes(tmp_path: Path) -> None:
    optional = ("layer_types", "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit")
    kept = {key: value for key, value in GPT_OSS_20B.items() if key not in optional}
    for key in ("head_dim", "num_key_value_heads", "attention_bias", "num_experts_per_tok"):
        del kept[key]
    assert read(tmp_path, kept) == read(tmp_path, GPT_OSS_20B)
    plain = read(tmp_path, kept | {"rope_scaling": {"rope_type": "default"}})
    assert plain.layers[0].attention.rope == RopeConfig(theta=150000.0)
    unbiased = read(tmp_path, kept | {"attention_bias": False}).layers[0].attention
    assert (unbiased.qkv_bias, unbiased.out_bias) == (False, False)
    kinds = ["full_attention"] * 24
    full = read(tmp_path, kept | {"layer_types": kinds, "sliding_window": None})
    assert full.one_layer.attention.window is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"swiglu_alpha": 1.5}, ConfigError, r"swiglu_alpha is 1\.5; expected 1\.702"),
        ({"swiglu_limit": 10.0}, ConfigError, r"swiglu_limit is 10\.0; expected 7\.0"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            ConfigError,
            "quantization_config has quant_method 'fp8'; expected 'mxfp4'",
        ),
        (
            {"quantization_config": {"bits": 4}},
            ConfigError,
            "quantization_config has quant_method None; expected 'mxfp4'",
        ),
        ({"num_experts_per_tok": 33}, ConfigError, "num_experts_per_tok is 33; expected 1 to 32"),
        ({"sliding_window": None}, CheckpointError, "there is no sliding_window; expected one"),
        ({"hidden_act": "gelu"}, ConfigError, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_served_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, GPT_OSS_20B | changes)


# mxfp4


def packed(rng: np.random.Generator, *shape: int) -> tuple[Any, Any, Any]:
    """Return (float64 numbers, blocks, scales), packed number by number."""
    *rows, size = shape
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    scales = rng.integers(114, 129, (*rows, size // 32)).astype(np.uint8)
    magnitudes = np.array(E2M1)[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    values = magnitudes * 2.0 ** (np.repeat(scales, 32, axis=-1).astype(int) - 127)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return values, blocks.reshape(*rows, size // 32, 16), scales


MIXTURE = MoESpec(
    num_experts=3,
    top_k=2,
    inner=64,
    routing=Routing.TOP_THEN_SOFTMAX,
    gate=Gate.CLAMPED,
    bias=True,
)


def write_experts(path: Path) -> tuple[Any, Any]:
    """Write the same experts unpacked and packed; return both sets of tensors."""
    rng = np.random.default_rng(0)
    table = expert_params(MIXTURE, size=96)
    held = stored_tensors(table, random_params(table), dtype=np.float32)
    small = dict(held)
    for name, shape in (("gate_up_proj", (3, 128, 96)), ("down_proj", (3, 96, 64))):
        values, blocks, scales = packed(rng, *shape)
        name = f"mlp.experts.{name}"
        assert held[name].shape == (shape[0], shape[2], shape[1])
        held[name] = np.ascontiguousarray(values.swapaxes(1, 2), np.float32)
        del small[name]
        small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for kind, tensors in (("held", held), ("packed", small)):
        (path / kind).mkdir()
        save_file(tensors, path / kind / "model.safetensors")
    return held, small


def read_experts(path: Path, *, dtype: Any, shards: int = 1) -> Params:
    table = expert_params(MIXTURE, size=96)
    with open_tensors(path) as tensors:
        check_names(tensors, table, is_stray=lambda _: False)
        return nested(on_host(param_reads(tensors, table, dtype=dtype, shards=shards)).items())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shards", [1, 2])
def test_packed_experts_are_the_unpacked_ones_bit_for_bit(
    shards: int, dtype: Any, tmp_path: Path
) -> None:
    held, _ = write_experts(tmp_path)
    found = read_experts(tmp_path / "packed", dtype=dtype, shards=shards)
    assert_same(found, read_experts(tmp_path / "held", dtype=dtype, shards=shards))
    if shards == 1:
        stored = held["mlp.experts.gate_up_proj"]
        expected = np.concatenate((stored[..., 0::2], stored[..., 1::2]), axis=-1).astype(dtype)
        np.testing.assert_array_equal(found["moe"]["experts"]["gate_up"], expected, strict=True)


def test_experts_that_stay_packed_are_the_unpacked_ones(tmp_path: Path) -> None:
    """Inputs that are no multiple of a group of 128: 96 of gate and up, 64 of down."""
    write_experts(tmp_path)
    table = with_formats(expert_params(MIXTURE, size=96), PACKED)
    with open_tensors(tmp_path / "packed") as tensors:
        check_names(tensors, table, is_stray=lambda _: False)
        found = nested(on_host(param_reads(tensors, table, dtype=np.float32, shards=1)).items())
    experts = found["moe"]["experts"]
    assert experts["gate_up"].codes.shape == (3, 1, 128, 64)
    assert experts["gate_up"].scales.shape == (3, 1, 256)
    expected = read_experts(tmp_path / "held", dtype=np.float32)["moe"]["experts"]
    found = {name: dense(jax.tree.map(jnp.asarray, x), jnp.float32) for name, x in experts.items()}
    assert_same(found, expected)


def test_packed_experts_have_scales_of_at_most_two(tmp_path: Path) -> None:
    """Kernels apply 2 ** 126 times a scale in one multiplication of bfloat16."""
    _, small = write_experts(tmp_path)
    name = "mlp.experts.down_proj_scales"
    scales = small[name].copy()
    scales[2, 5, 1] = 130
    save_file(small | {name: scales}, tmp_path / "packed" / "model.safetensors")
    table = with_formats(expert_params(MIXTURE, size=96), PACKED)
    message = r"down_proj_scales has a scale of 2 \*\* 3; expected at most 2 \*\* 1 where"
    with (
        open_tensors(tmp_path / "packed") as tensors,
        pytest.raises(CheckpointError, match=message),
    ):
        on_host(param_reads(tensors, table, dtype=np.float32, shards=1))
    read_experts(tmp_path / "packed", dtype=np.float32)


def test_the_headers_tell_what_is_packed_and_without_files_the_config(tmp_path: Path) -> None:
    published = json.loads((GOLDEN / "config.json").read_text())
    config = published | {"quantization_config": {"quant_method": "mxfp4"}}
    spec = read(tmp_path, config)
    assert formats_of(tmp_path, spec, has_files=False) == PACKED
    shutil.copy(GOLDEN / "model.safetensors", tmp_path)  # unpacked
    assert not formats_of(tmp_path, spec, has_files=True)
    assert not formats_of(GOLDEN, spec, has_files=False)
    odd = read(tmp_path, config | {"intermediate_size": 48})
    assert not formats_of(tmp_path, odd, has_files=False)
    write_packed(tmp_path / "packed")
    assert formats_of(tmp_path / "packed", spec, has_files=True) == PACKED


def formats_of(path: Path, spec: ModelSpec, *, has_files: bool) -> Formats:
    wanted = Wanted(bundle="gpu", dtype="bfloat16", shards=1)
    return resident_formats(path, table_of(spec), wanted, has_files=has_files)


def write_packed(path: Path, *, seed: int = 1) -> dict[str, Any]:
    """Write the golden model as published; return its experts in transformers' layout."""
    shutil.copytree(GOLDEN, path)
    tensors = load_file(GOLDEN / "model.safetensors")
    rng, unpacked = np.random.default_rng(seed), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, size, width = tensors.pop(name).shape
        values, blocks, scales = packed(rng, experts, width, size)
        unpacked[name] = values.swapaxes(1, 2)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((GOLDEN / "config.json").read_text())
    read(path, config | {"quantization_config": {"quant_method": "mxfp4"}})
    return unpacked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"down_proj_scales": np.full((3, 96, 2), 255, np.uint8)},
            r"down_proj_scales has a scale of 255, which is no number",
        ),
        (
            {"down_proj_blocks": np.zeros((3, 96, 2, 16), np.float32)},
            r"down_proj_blocks has dtype F32; expected U8",
        ),
        (
            {"down_proj_blocks": np.zeros((3, 96, 3, 16), np.uint8)},
            r"down_proj_blocks has shape \(3, 96, 3, 16\); expected \(3, 96, 2, 16\)",
        ),
        ({"down_proj_scales": None}, r"no tensor mlp\.experts\.down_proj_scales"),
        ({"down_proj_blocks": None}, r": no tensor mlp\.experts\.down_proj_blocks; expected"),
        ({"down_proj": np.zeros((3, 64, 96))}, r"unknown tensor mlp\.experts\.down_proj_blocks"),
        (
            {"gate_up_proj_bias": np.zeros((3, 128), np.uint8)},
            r"gate_up_proj_bias has dtype U8; expected one of F16",
        ),
    ],
)
def test_packed_experts_that_do_not_fit_are_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, tensors = write_experts(tmp_path)
    for name, value in change.items():
        tensors.pop(f"mlp.experts.{name}", None)
        if value is not None:
            tensors[f"mlp.experts.{name}"] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_experts(tmp_path, dtype=np.float32)


def test_a_packed_checkpoint_says_what_it_takes_and_is_saved_unpacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """4 layers of 4 experts, 32 by 96."""
    expected = write_packed(tmp_path / "packed")
    spec = load_model_spec(tmp_path / "packed")
    with caplog.at_level(logging.INFO, "jspec.models.files.checkpoint"):
        params = load_target(tmp_path / "packed", spec, dtype=np.float32)
    numbers = 4 * 4 * 32 * (64 + 32)
    assert [record.args for record in caplog.records] == [
        (tmp_path / "packed", numbers * 17 / 32 / 2**30, "float32", numbers * 4 / 2**30)
    ]
    caplog.clear()
    save_target(tmp_path / "saved", spec, params, dtype=np.float32)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == load_file(GOLDEN / "model.safetensors").keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(saved[name], value)
    with caplog.at_level(logging.INFO, "jspec.models.files.checkpoint"):
        assert_same(load_target(tmp_path / "saved", spec, dtype=np.float32), params)
    assert not caplog.records


# The layers
