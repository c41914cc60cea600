"""Published config.json files of Qwen and Mistral; those of hybrids are in mtp_checkpoints.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jspec.errors import CheckpointError, ConfigError, JspecError
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.registry import family_named
from jspec.spec.layers.attention import AttentionSpec, HeadGate
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import DenseSpec, MoESpec, Routing
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.rope import RopeConfig
from tests.speculative.mtp_checkpoints import QWEN3_5_27B, QWEN3_NEXT_80B

QWEN3_5_35B_A3B = QWEN3_5_27B | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        **{k: v for k, v in QWEN3_5_27B["text_config"].items() if k != "intermediate_size"},
        "hidden_size": 2048,
        "layer_types": None,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
}
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


def test_qwen3_next(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_NEXT_80B)
    delta_net, full = spec.layers[0], spec.layers[3]
    moe = MoESpec(
        num_experts=512, top_k=10, inner=512, shared=DenseSpec(inner=512), shared_gate=True
    )
    own = DeltaNetSpec(num_heads=32, num_key_heads=16, key_dim=128, value_dim=128)
    attention = AttentionSpec(
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        rope=RopeConfig(theta=1e7),
        qk_norm=True,
        rotary_dim=64,
        gate=HeadGate.OF_NUMBERS,
    )
    assert spec.layers == (*(delta_net,) * 3, full) * 12
    assert delta_net == LayerSpec(attention=own, ffn=moe, eps=1e-6)
    assert full == LayerSpec(attention=attention, ffn=moe, eps=1e-6)
    some = read(tmp_path, QWEN3_NEXT_80B | {"mlp_only_layers": [1], "decoder_sparse_step": 1})
    assert [i for i, x in enumerate(some.layers) if x.ffn != moe] == [1]


def test_qwen3_5(tmp_path: Path) -> None:
    """The text model of a model that reads images, and alone."""
    spec = read(tmp_path, QWEN3_5_27B)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (64, 5120, 248320)
    own = DeltaNetSpec(num_heads=48, num_key_heads=16, key_dim=128, value_dim=128)
    assert [x.attention == own for x in spec.layers] == [i % 4 != 3 for i in range(64)]
    attention = spec.layers[3].softmax_attention
    assert (attention.num_heads, attention.num_kv_heads, attention.rotary_dim) == (24, 4, 64)
    assert attention.rope == RopeConfig(theta=1e7)
    assert {x.ffn for x in spec.layers} == {DenseSpec(inner=17408)}
    assert spec.eos_token_ids == (248044,)
    alone = QWEN3_5_27B["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
    assert read(tmp_path, alone) == spec
    moe = read(tmp_path, QWEN3_5_35B_A3B)
    assert {x.ffn for x in moe.layers} == {
        MoESpec(num_experts=256, top_k=8, inner=512, shared=DenseSpec(inner=512), shared_gate=True)
    }
    tied = read(tmp_path, QWEN3_5_27B | {"tie_word_embeddings": True})
    assert tied == dataclasses.replace(spec, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu' or 'swish'"),
        ({"attn_output_gate": False}, "attn_output_gate is False; expected True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; expected 'swish'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'; expected 'float32'"),
        ({"use_sliding_window": True}, "use_sliding_window is True; expected False"),
        ({"layer_types": ["sliding_attention"] * 64}, "layer_types has .'sliding_attention'.; exp"),
        ({"layer_types": ["linear_attention"] * 64}, "none of the 64 layers is 'full_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; expected num_hidden_lay"),
        ({"linear_num_value_heads": 40}, "linear_num_value_heads is 40; expected a multiple of"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0; expected a positive integer"),
        ({"num_experts": 8}, "num_experts is 8 for Qwen3_5ForConditionalGeneration; expected exp"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; expected True"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]; expected \[\]: all layers"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is False, and in text_config True"),
        ({"partial_rotary_factor": 0.1, "rope_parameters": None}, "RoPE rotates 25 dimensions"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type is 'longrope'"),
    ],
)
def test_variants_of_qwen3_5_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    text = QWEN3_5_27B["text_config"] | changes
    with pytest.raises(JspecError, match=message):
        read(tmp_path, QWEN3_5_27B | {"text_config": text})


@pytest.mark.parametrize(
    "config", [QWEN3_NEXT_80B, QWEN3_5_27B, QWEN3_5_35B_A3B], ids=lambda x: x["model_type"]
)
def test_written_configs_of_hybrids_read_back(config: dict[str, Any], tmp_path: Path) -> None:
    spec = read(tmp_path, config)
    assert read(tmp_path, family_named(spec.family).to_json(spec)) == spec


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
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type is 'longrope'"),
    ],
)
def test_what_is_not_served_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config | changes)
