"""Published config.json files of families with latent attention."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jspec.errors import ConfigError
from jspec.files.json_files import Fields
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.registry import family_named, table_of
from jspec.spec.cache_entry import Latent
from jspec.spec.layers.attention import IndexerSpec, LatentAttentionSpec
from jspec.spec.layers.feed_forward import DenseSpec, MoESpec, Routing
from jspec.spec.model_spec import ModelSpec
from jspec.spec.rope import RopeConfig, YarnConfig
from tests.speculative.mtp_checkpoints import DEEPSEEK_V3, DEEPSEEK_V32, GLM_5

KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "eos_token_id": 163585,
    "bos_token_id": 163584,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
MOONLIGHT = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rope_scaling": None,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}
V2_LITE = MOONLIGHT | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "intermediate_size": 10944,
    "norm_topk_prob": False,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "vocab_size": 102400,
}
GLM_4_7_FLASH = {
    **{name: value for name, value in DEEPSEEK_V3.items() if name != "scoring_func"},
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
GLM_5_2 = GLM_5 | {
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
CONFIGS = [DEEPSEEK_V3, KIMI_K2, MOONLIGHT, V2_LITE, GLM_4_7_FLASH, DEEPSEEK_V32, GLM_5, GLM_5_2]


def read(path: Path, values: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(values))
    return load_model_spec(path)


def test_deepseek_v3(tmp_path: Path) -> None:
    spec = read(tmp_path, DEEPSEEK_V3)
    attention = LatentAttentionSpec(
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        rotary_dim=64,
        v_dim=128,
        kv_rank=512,
        q_rank=1536,
        interleaved=True,
        rope=RopeConfig(
            factor=40.0,
            original_max_position=4096,
            yarn=YarnConfig(attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0),
        ),
        scale=192**-0.5 * (0.1 * math.log(40) + 1) ** 2,
    )
    assert {layer.attention for layer in spec.layers} == {attention}
    assert attention.cache_entry == Latent(512, 64)
    moe = MoESpec(
        num_experts=256,
        top_k=8,
        inner=2048,
        routing=Routing.SIGMOID_THEN_TOP_NORMALIZED,
        weight_scale=2.5,
        shared=DenseSpec(inner=2048),
        num_groups=8,
        top_groups=4,
    )
    assert [layer.ffn for layer in spec.layers] == [DenseSpec(inner=18432)] * 3 + [moe] * 58
    shapes = {own.path: own.shape for own in table_of(spec)}
    assert shapes["layers", 0, "attention", "kv_a", "kernel"] == (7168, 576)
    assert shapes["layers", 0, "attention", "q", "kernel"] == (1536, 128 * 192)
    family = family_named("deepseek_v3")
    assert family.mtp is not None
    layer = family.mtp.read(Fields(tmp_path / "config.json", DEEPSEEK_V3), spec)
    assert layer.layer.layers == spec.layers[-1:]
    assert (layer.per_level, layer.aux_layer_ids, layer.feeds_back_normed) == (False, (), True)
    assert family.mtp.names(spec).of_layer(0) == "model.layers.61."


def test_the_others_have_other_numbers(tmp_path: Path) -> None:
    kimi, moonlight, lite, glm = (read(tmp_path, config) for config in CONFIGS[1:5])
    own = kimi.layers[0].attention
    assert isinstance(own, LatentAttentionSpec)
    assert own.rope.yarn == YarnConfig(
        attention_factor=1.0, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0
    )
    moe = kimi.layers[1].ffn
    assert isinstance(moe, MoESpec)
    assert (moe.num_experts, moe.num_groups, moe.weight_scale) == (384, 1, 2.827)
    plain = moonlight.layers[0].attention
    assert isinstance(plain, LatentAttentionSpec)
    assert (plain.q_rank, plain.scale) == (None, None)
    first, second = lite.layers[0].attention, lite.layers[1].ffn
    assert isinstance(first, LatentAttentionSpec)
    expected = 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2
    assert first.softmax_scale == pytest.approx(expected)
    assert second == MoESpec(
        num_experts=64,
        top_k=6,
        inner=1408,
        routing=Routing.SOFTMAX_THEN_TOP,
        shared=DenseSpec(inner=2816),
    )
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE | grouped))
    assert load_model_spec(tmp_path).layers[1].ffn == dataclasses.replace(
        second, num_groups=8, top_groups=3
    )
    last = glm.layers[-1].attention
    assert (last.head_dim, last.value_dim, last.rotary_dim) == (256, 256, 64)
    family = family_named("glm4_moe_lite")
    assert family.mtp is not None
    layer = family.mtp.read(Fields(tmp_path / "config.json", GLM_4_7_FLASH), glm)
    assert layer.layer.layers == glm.layers[-1:]


def test_families_with_an_indexer(tmp_path: Path) -> None:
    """GLM-5.2 has one in 21 of 78 layers; the layer for multi-token prediction has its own."""
    deepseek, glm, sharing = (read(tmp_path, config) for config in CONFIGS[5:])
    dense = read(tmp_path, DEEPSEEK_V3).layers[0].attention
    own = deepseek.layers[0].attention
    assert isinstance(own, LatentAttentionSpec)
    assert own.indexer == IndexerSpec(num_heads=64, head_dim=128, top_k=2048)
    assert dataclasses.replace(own, indexer=None) == dense
    assert own.cache_entry == Latent(512, 64, index_dim=128)
    shapes = {weight.path: weight.shape for weight in table_of(deepseek)}
    assert shapes["layers", 0, "attention", "indexer", "q", "kernel"] == (1536, 64 * 128)
    own = glm.layers[0].attention
    assert isinstance(own, LatentAttentionSpec)
    assert own.indexer == IndexerSpec(num_heads=32, head_dim=128, top_k=2048, interleaved=True)
    assert {layer.attention for layer in glm.layers} == {own}
    indexed = [i for i, layer in enumerate(sharing.layers) if layer.attention.cache_entry.index_dim]
    assert indexed == [0, 1, *range(2, 78, 4)]
    for config, spec in ((DEEPSEEK_V32, deepseek), (GLM_5_2, sharing)):
        family = family_named(spec.family)
        assert family.mtp is not None
        layer = family.mtp.read(Fields(tmp_path / "config.json", config), spec)
        assert layer.layer.layers[0].attention == spec.layers[0].attention
    listed = {"index_topk_freq": None, "indexer_types": ["full", *["shared"] * 77]}
    lettered = {"index_topk_freq": None, "index_topk_pattern": "F" + "S" * 77}
    assert read(tmp_path, GLM_5_2 | listed) == read(tmp_path, GLM_5_2 | lettered)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_written_configs_read_back(config: dict[str, Any], tmp_path: Path) -> None:
    spec = read(tmp_path, config)
    assert read(tmp_path, family_named(spec.family).to_json(spec)) == spec


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DEEPSEEK_V3, {"index_topk": 2048}, "index_topk is 2048; expected no such key: this fam"),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias is True; expected False"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected 'sigmoid'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method is 'greedy'; expected 'noaux_tc'"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2; expected 1"),
        (DEEPSEEK_V3, {"n_group": 7}, "n_group is 7 and topk_group 4; expected a divisor of 256"),
        (DEEPSEEK_V3, {"topk_group": 9}, "n_group is 8 and topk_group 9; expected a divisor"),
        (
            DEEPSEEK_V3,
            {"n_group": 128, "topk_group": 3},
            "num_experts_per_tok is 8; expected at most 6, the experts of topk_group 3",
        ),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads is 8; expected 128"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is True; expected False"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; expected 'greedy' or"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; expected 'softmax'"),
        (
            GLM_4_7_FLASH,
            {"mlp_layer_types": ["sparse", "dense"]},
            "mlp_layer_types is .*; expected 47 entries, 'dense' ones before 'sparse' ones",
        ),
        (DEEPSEEK_V32, {"index_topk_freq": 4}, "index_topk_freq is 4; expected 1"),
        (DEEPSEEK_V32, {"index_topk_pattern": "FS"}, "index_topk_pattern is 'FS'; expected no"),
        (DEEPSEEK_V32, {"indexer_types": ["shared"]}, "indexer_types is .*; expected 'full' only"),
        (DEEPSEEK_V32, {"q_lora_rank": None}, "q_lora_rank is missing; expected one: an indexer"),
        (DEEPSEEK_V32, {"index_head_dim": 32}, "index_head_dim is 32; expected at least 64"),
        (DEEPSEEK_V32, {"rope_interleave": False}, "rope_interleave is False; expected True"),
        (DEEPSEEK_V32, {"layer_types": ["full_attention"]}, "expected 'indexed_attention' only"),
        (GLM_5_2, {"index_kpool": 4}, "index_kpool is 4; expected no such key"),
        (GLM_5_2, {"indexer_types": ["shared"] * 78}, "expected 78 entries, .* the first 'full'"),
        (GLM_5_2, {"index_topk_pattern": "FX"}, "expected 78 entries, 'full' or 'shared'"),
    ],
)
def test_what_is_not_served_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config | changes)
