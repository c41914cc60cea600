"""Gemma 4's config.json, and checkpoints that also read images and audio.

Keys are those that transformers reads; sizes resemble 31B, 26B-A4B and E2B. No published file was
read.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import JspecError
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.registry import family_named, table_of
from jspec.spec.cache_entry import KV
from jspec.spec.layers.feed_forward import DenseSpec, MoESpec
from jspec.spec.model_spec import ModelSpec, cache_groups
from jspec.spec.rope import RopeConfig
from jspec.spec.sandwich import SandwichSpec, cache_indices
from tests.models.random_params import assert_same

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
SLIDING, FULL = "sliding_attention", "full_attention"
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        FULL: {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
WITH_MEDIA = {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {}}
GEMMA_31B = WITH_MEDIA | {"text_config": TEXT}
GEMMA_26B = WITH_MEDIA | {
    "text_config": TEXT
    | {
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    }
}
GEMMA_E2B = WITH_MEDIA | {
    "text_config": TEXT
    | {
        "attention_k_eq_v": False,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "use_double_wide_mlp": True,
    }
}


def read(path: Path, values: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(values))
    return load_model_spec(path)


def layers_of(spec: ModelSpec) -> list[SandwichSpec]:
    found = [layer for layer in spec.layers if isinstance(layer, SandwichSpec)]
    assert len(found) == spec.num_layers
    return found


def test_31b(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA_31B)
    assert (spec.logit_cap, spec.embed_scale, spec.tie_word_embeddings) == (30.0, 5376**0.5, True)
    entries = [layer.attention.cache_entry for layer in spec.layers]
    assert entries == ([KV(16, 256, 256)] * 5 + [KV(4, 512, 512)]) * 10
    assert [layer.attention.window for layer in spec.layers] == ([1024] * 5 + [None]) * 10
    sliding, full = spec.layers[0].softmax_attention, spec.layers[5].softmax_attention
    assert (sliding.k_is_v, full.k_is_v, full.softmax_scale) == (False, True, 1.0)
    assert full.rope == RopeConfig(theta=1e6, turned=0.25)
    groups = cache_groups(spec, name="target")
    assert [group.num_layers for group in groups] == [5, 1] * 10


def test_26b_has_experts_beside_its_mlps(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA_26B)
    (experts,) = {layer.experts for layer in layers_of(spec)}
    assert isinstance(experts, MoESpec)
    assert (experts.num_experts, experts.top_k, experts.inner) == (128, 8, 704)
    assert {layer.ffn for layer in spec.layers} == {DenseSpec(inner=2112, gelu=True)}


def test_e2b_shares_caches(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA_E2B)
    assert [layer.attention.kv_of for layer in spec.layers[:15]] == [None] * 15
    assert [layer.attention.kv_of for layer in spec.layers[15:]] == ([13] * 4 + [14]) * 4
    assert cache_indices(spec)[14:20] == (14, 13, 13, 13, 13, 14)
    assert sum(group.num_layers for group in cache_groups(spec, name="target")) == 15
    assert Counter(layer.ffn.inner for layer in spec.layers) == {6144: 15, 12288: 20}
    assert {layer.token_size for layer in layers_of(spec)} == {256}
    shapes = {own.path: own.shape for own in table_of(spec)}
    assert shapes["tokens", "table"] == (262144, 35 * 256)
    assert shapes["layers", 20, "attention", "qkv", "kernel"] == (1536, 8 * 256)


@pytest.mark.parametrize("config", [GEMMA_31B, GEMMA_26B, GEMMA_E2B])
def test_written_configs_read_back(config: dict[str, Any], tmp_path: Path) -> None:
    spec = read(tmp_path, config)
    assert read(tmp_path, family_named("gemma4").to_json(spec)) == spec
    alone = config["text_config"] | {"architectures": ["Gemma4ForCausalLM"]}
    assert read(tmp_path, alone) == spec


def test_12b_has_no_embeddings_for_layers_where_it_says_nothing(tmp_path: Path) -> None:
    names = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "sliding_window")
    silent = {name: value for name, value in TEXT.items() if name not in names}
    unified = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": silent}
    assert read(tmp_path, unified) == read(tmp_path, GEMMA_31B)
    (size,) = {
        x.token_size for x in layers_of(read(tmp_path, WITH_MEDIA | {"text_config": silent}))
    }
    assert size == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True; expected False"),
        (
            {"hidden_activation": "gelu"},
            "hidden_activation is 'gelu'; expected 'gelu_py",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; expected"),
        ({"layer_types": ["linear_attention"] * 60}, "layer_types has .'linear_attention'.; exp"),
        ({"num_kv_shared_layers": 57}, "num_kv_shared_layers is 57; expected fewer"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 7},
            "vocab_size_per_layer_input is 7; expected 262144",
        ),
        ({"rope_parameters": {FULL: {}}}, "rope_parameters has no sliding_attention"),
        (
            {"rope_parameters": {SLIDING: {"rope_type": "longrope"}, FULL: {}}},
            "rope type is 'longrope'",
        ),
        (
            {"per_layer_config": {"3": {"sliding_window": 7}}},
            "per_layer_config has .'sliding_window'. for layer 3; expected head_dim and",
        ),
        (
            {"num_kv_shared_layers": 6, "per_layer_config": {"57": {"head_dim": 128}}},
            "expected KV.num_heads=16, qk_dim=256.*the entry of layer 52",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method .awq.; expected .fp8."),
    ],
)
def test_what_is_not_served_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JspecError, match=message):
        read(tmp_path, GEMMA_31B | {"text_config": TEXT | changes})


def test_inside_of_a_model_that_reads_images_is_the_same_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """K and V of layers without a cache are stored, and not read."""
    own = json.loads((GOLDEN / "gemma4" / "config.json").read_text())
    stored = load_file(GOLDEN / "gemma4" / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in stored.items()}
    for name in ("k_proj", "v_proj", "k_norm"):
        value = stored[f"model.layers.0.self_attn.{name}.weight"]
        tensors[f"model.language_model.layers.4.self_attn.{name}.weight"] = value
    towers = dict.fromkeys(("model.vision_tower.x", "model.embed_audio.y"), np.ones(3, np.float32))
    save_file(tensors | towers, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(WITH_MEDIA | {"text_config": own}))
    spec = load_model_spec(GOLDEN / "gemma4")
    assert load_model_spec(tmp_path) == spec
    expected = load_target(GOLDEN / "gemma4", spec, dtype=np.float32)
    with caplog.at_level("INFO", "jspec"):
        assert_same(load_target(tmp_path, spec, dtype=np.float32), expected)
    assert "2 tensors of model.vision_tower. and" in caplog.text
