"""Published config.json files of Qwen and Mistral."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jspec.errors import CheckpointError, ConfigError
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.registry import family_named
from jspec.spec.model_spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    Routing,
)
from jspec.spec.rope import RopeConfig

QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = QWEN2_7B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def read(path: Path, values: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(values))
    return load_model_spec(path)


def windows_of(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def test_qwen2(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN2_7B)
    attention = AttentionSpec(
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rope=RopeConfig(theta=1e6),
        qkv_bias=True,
    )
    layer = LayerSpec(attention=attention, ffn=DenseSpec(inner=18944), eps=1e-6)
    assert spec == ModelSpec(
        vocab_size=152064,
        hidden_size=3584,
        layers=(layer,) * 28,
        rms_norm_eps=1e-6,
        max_position=32768,
        eos_token_ids=(151645,),
        bos_token_id=151643,
        family="qwen2",
    )


def test_qwen3(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_8B)
    assert spec.one_layer.attention == AttentionSpec(
        num_heads=32, num_kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6), qk_norm=True
    )
    assert (spec.family, spec.num_layers, spec.hidden_size) == ("qwen3", 36, 4096)
    narrow = {key: value for key, value in QWEN3_8B.items() if key != "head_dim"}
    narrow["hidden_size"] = 1024
    assert read(tmp_path, narrow).one_layer.attention.head_dim == 128  # not 1024 / 32
    biased = read(tmp_path, QWEN3_8B | {"attention_bias": True}).one_layer.attention
    assert (biased.qkv_bias, biased.out_bias) == (True, True)


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_8B])
def test_qwen_s_windows_begin_at_a_layer(config: dict[str, Any], tmp_path: Path) -> None:
    short = config | {"num_hidden_layers": 3, "sliding_window": 512, "max_window_layers": 1}
    assert windows_of(read(tmp_path, short)) == [None] * 3  # use_sliding_window is false
    windowed = short | {"use_sliding_window": True}
    assert windows_of(read(tmp_path, windowed)) == [None, 512, 512]
    every = windowed | {"max_window_layers": 0}
    assert windows_of(read(tmp_path, every)) == [512] * 3
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    listed = windowed | {"layer_types": kinds}
    assert windows_of(read(tmp_path, listed)) == [512, None, 512]
    with pytest.raises(CheckpointError, match="there is no sliding_window; expected one"):
        read(tmp_path, short | {"layer_types": kinds})


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_8B, QWEN3_30B_A3B])
def test_keys_that_transformers_ignores_are_ignored(config: dict[str, Any], tmp_path: Path) -> None:
    """Keys of other architectures."""
    plain = read(tmp_path, config)
    others: dict[str, Any] = {
        "logit_scale": 0.5,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 30.0,
        "no_rope_layers": [1, 0],
    }
    assert read(tmp_path, config | others) == plain
    llama = config | {"architectures": ["LlamaForCausalLM"]}
    assert read(tmp_path, llama | others) == read(tmp_path, llama)


def test_qwen3_moe(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_30B_A3B)
    moe = MoESpec(num_experts=128, top_k=8, inner=768)
    assert moe.routing is Routing.SOFTMAX_THEN_TOP_NORMALIZED
    assert spec.one_layer.ffn == moe
    assert spec.one_layer.attention.qk_norm
    other = read(tmp_path, QWEN3_30B_A3B | {"norm_topk_prob": False})
    assert other.one_layer.ffn == dataclasses.replace(moe, routing=Routing.SOFTMAX_THEN_TOP)
    renamed = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"}
    assert read(tmp_path, renamed | {"num_local_experts": 64}).one_layer.ffn == dataclasses.replace(
        moe, num_experts=64
    )
    some = read(
        tmp_path,
        QWEN3_30B_A3B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    )
    dense = DenseSpec(inner=6144)
    assert [layer.ffn for layer in some.layers] == [dense, moe, dense, dense, dense, moe]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts_per_tok": 129}, ConfigError, "num_experts_per_tok is 129; expected 1 to"),
        ({"mlp_only_layers": 3}, CheckpointError, "mlp_only_layers is 3; expected a list"),
        ({"mlp_only_layers": ["3"]}, CheckpointError, "mlp_only_layers is"),
        ({"num_experts": "many"}, CheckpointError, "num_experts is 'many'"),
        ({"norm_topk_prob": 1}, CheckpointError, "norm_topk_prob is 1; expected true or false"),
    ],
)
def test_a_malformed_mixture_is_named(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, QWEN3_30B_A3B | changes)


def test_mistral_s_window_is_4096_where_it_says_nothing(tmp_path: Path) -> None:
    assert windows_of(read(tmp_path, MISTRAL_7B)) == [4096] * 32
    assert windows_of(read(tmp_path, MISTRAL_7B | {"sliding_window": 512})) == [512] * 32
    assert windows_of(read(tmp_path, MISTRAL_7B | {"sliding_window": None})) == [None] * 32
    silent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert windows_of(read(tmp_path, silent)) == [4096] * 32


def test_mistral_is_llama_but_for_the_window(tmp_path: Path) -> None:
    mistral = read(tmp_path, MISTRAL_7B | {"sliding_window": None})
    llama = read(tmp_path, MISTRAL_7B | {"architectures": ["LlamaForCausalLM"]})
    assert dataclasses.replace(mistral, family="llama") == llama


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_8B, QWEN3_30B_A3B, MISTRAL_7B])
def test_written_configs_read_back(config: dict[str, Any], tmp_path: Path) -> None:
    spec = read(tmp_path, config)
    assert read(tmp_path, family_named(spec.family).to_json(spec)) == spec
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    spec = read(tmp_path, config | {"rope_scaling": scaling, "tie_word_embeddings": True})
    assert spec.one_layer.attention.rope.factor == 4.0
    assert read(tmp_path, family_named(spec.family).to_json(spec)) == spec


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_8B, QWEN3_30B_A3B, MISTRAL_7B])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu' or 'swish'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method .awq.; expected .fp8."),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope type is 'linear'"),
    ],
)
def test_what_is_not_served_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config | changes)
