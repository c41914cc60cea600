"""MiniMax M2's config.json, and its checkpoint in FP8 blocks.

Sizes are transformers' defaults for MiniMaxM2Config, those of the 229B model. Switches and the FP8
settings are those that published copies of its config show; no file of weights was read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jspec.errors import CheckpointError, ConfigError, JspecError
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.files.w8a8 import declared_forms
from jspec.models.registry import family_named, table_of
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import MoESpec, Routing
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.rope import RopeConfig
from jspec.spec.weight_format import FP8
from tests.models.random_params import assert_same
from tests.models.test_fp8 import to_fp8, unpack

GOLDEN = Path(__file__).parents[1] / "golden" / "families" / "minimax_m2"
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "float8_e4m3fn",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "bos_token_id": 200034,
    "eos_token_id": 200020,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
    "quantization_config": QUANTIZATION,
}


def read(path: Path, values: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(values))
    return load_model_spec(path)


def test_minimax_m2(tmp_path: Path) -> None:
    spec = read(tmp_path, MINIMAX_M2)
    attention = AttentionSpec(
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=64,
        rope=RopeConfig(theta=5e6),
        qk_norm=True,
        norms_span_heads=True,
    )
    moe = MoESpec(num_experts=256, top_k=8, inner=1536, routing=Routing.SIGMOID_THEN_TOP_NORMALIZED)
    assert spec == ModelSpec(
        vocab_size=200064,
        hidden_size=3072,
        layers=(LayerSpec(attention=attention, ffn=moe, eps=1e-6),) * 62,
        rms_norm_eps=1e-6,
        max_position=196608,
        eos_token_ids=(200020,),
        bos_token_id=200034,
        family="minimax_m2",
    )
    shapes = {own.path: own.shape for own in table_of(spec)}
    assert shapes["layers", 0, "attention", "q_norm", "scale"] == (48 * 128,)
    assert shapes["layers", 0, "attention", "k_norm", "scale"] == (8 * 128,)
    form_of = declared_forms(tmp_path)
    assert form_of("model.layers.0.block_sparse_moe.gate.weight") is None
    for module in ("block_sparse_moe.experts.7.w2", "self_attn.o_proj"):
        assert form_of(f"model.layers.0.{module}.weight") == FP8(has_blocks=True)
    assert read(tmp_path, family_named("minimax_m2").to_json(spec)) == spec


def test_the_rotated_part_has_two_names(tmp_path: Path) -> None:
    """transformers 5 writes a factor; without either, RoPE rotates whole heads, as there."""
    plain = {name: value for name, value in MINIMAX_M2.items() if name != "rotary_dim"}
    rope = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    expected = read(tmp_path, MINIMAX_M2)
    assert read(tmp_path, plain | rope) == expected
    assert read(tmp_path, {**plain, **rope, "rotary_dim": 64, "rope_theta": None}) == expected
    whole = read(tmp_path, plain).one_layer.softmax_attention
    assert whole.rotary_dim is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_type_list": [1, 0] * 31}, "attn_type_list is .*; expected 62 ones: all layers"),
        ({"num_hidden_layers": 61}, "attn_type_list is .*; expected 61 ones"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'; expected 'per_layer'"),
        ({"use_qk_norm": False}, "use_qk_norm is False; expected True"),
        ({"use_routing_bias": False}, "use_routing_bias is False; expected True"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected 'sigmoid'"),
        ({"shared_intermediate_size": 8192}, "shared_intermediate_size is 8192; expected 0"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5; expected 1.0"),
        ({"num_expert_group": 8}, "num_expert_group is 8; expected 1"),
        ({"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta is 2.0; expected 1.0"),
        ({"layernorm_full_attention_beta": 2}, "layernorm_full_attention_beta is 2; expected 1.0"),
        ({"sliding_window": 4096}, "sliding_window is 4096; expected no such key"),
        ({"attn_window_size": 4096}, "attn_window_size is 4096; expected no such key"),
        ({"partial_rotary_factor": 0.25}, "rotary_dim is 64; expected 32, partial_rotary_factor"),
        ({"partial_rotary_factor": 1.0}, "rotary_dim is 64; expected 128, partial_rotary_factor"),
        ({"rotary_dim": 256}, "RoPE rotates 256 dimensions of a head; expected an even number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu' or 'swish'"),
    ],
)
def test_switches_that_nothing_computes(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JspecError, match=message) as caught:
        read(tmp_path, MINIMAX_M2 | changes)
    assert isinstance(caught.value, ConfigError | CheckpointError)
    assert str(tmp_path) in str(caught.value)


def test_fp8_experts_are_those_of_the_unpacked_file(tmp_path: Path) -> None:
    """Projections and experts are packed, router and lm_head are not, as published."""
    block, packed, plain = (8, 8), tmp_path / "packed", tmp_path / "plain"
    shutil.copytree(GOLDEN, packed)
    to_fp8(packed, block, is_packed=lambda name: "_proj" in name or ".experts." in name)
    shutil.copytree(packed, plain)
    unpack(plain, block)
    spec = load_model_spec(packed)
    for shards in (1, 2):
        found, expected = (
            load_target(path, spec, dtype=np.float32, shards=shards) for path in (packed, plain)
        )
        assert_same(found, expected)


def test_routers_stay_in_float32() -> None:
    spec = load_model_spec(GOLDEN)
    exact, served = (
        load_target(GOLDEN, spec, dtype=dtype)["layers"][0]["moe"]
        for dtype in (np.float32, np.dtype(ml_dtypes.bfloat16))
    )
    assert served["experts"]["down"].dtype == ml_dtypes.bfloat16
    assert_same(served["router"], exact["router"])
