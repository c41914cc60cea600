"""Mistral Small 4 and Ministral 3: config.json, and checkpoints that also read images.

Sizes are transformers' defaults (119B and 8B); no published file was read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import JspecError
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.registry import family_named
from jspec.spec.layers.attention import LatentAttentionSpec
from jspec.spec.layers.feed_forward import DenseSpec, MoESpec
from jspec.spec.model_spec import ModelSpec
from jspec.spec.rope import QueryGrowth
from tests.models.random_params import assert_same

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "max_position_embeddings": 1048576,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
SMALL_4 = {
    "architectures": ["Mistral4ForCausalLM"],
    "model_type": "mistral4",
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "kv_lora_rank": 256,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 32,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 131072,
}
MINISTRAL_3 = {
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": YARN | {"factor": 16.0, "original_max_position_embeddings": 16384},
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
WITH_IMAGES = {"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}}


def read(path: Path, values: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(values))
    return load_model_spec(path)


def test_mistral_small_4(tmp_path: Path) -> None:
    spec = read(tmp_path, SMALL_4)
    own = spec.one_layer.attention
    assert isinstance(own, LatentAttentionSpec)
    assert (own.num_heads, own.head_dim, own.rotary_dim, own.value_dim) == (32, 128, 64, 128)
    assert (own.kv_rank, own.q_rank, own.growth) == (256, 1024, QueryGrowth(beta=0.1, period=8192))
    assert own.softmax_scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)
    assert spec.one_layer.ffn == MoESpec(
        num_experts=128, top_k=4, inner=2048, shared=DenseSpec(inner=2048)
    )


def test_ministral_3_is_mistral_with_queries_that_grow(tmp_path: Path) -> None:
    spec = read(tmp_path, MINISTRAL_3)
    own = spec.one_layer.softmax_attention
    assert (spec.family, own.window, own.scale) == ("mistral", None, None)
    assert own.growth == QueryGrowth(beta=0.1, period=16384)
    plain = read(tmp_path, MINISTRAL_3 | {"architectures": ["MistralForCausalLM"]})
    assert plain.one_layer.softmax_attention.growth is None
    inside = WITH_IMAGES | {"text_config": MINISTRAL_3 | {"architectures": None}}
    assert read(tmp_path, inside) == spec


@pytest.mark.parametrize("config", [SMALL_4, MINISTRAL_3], ids=lambda config: config["model_type"])
def test_written_configs_read_back(config: dict[str, Any], tmp_path: Path) -> None:
    spec = read(tmp_path, config)
    assert read(tmp_path, family_named(spec.family).to_json(spec)) == spec


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (SMALL_4, {"n_group": 4}, "n_group is 4; expected 1: all experts are one group"),
        (SMALL_4, {"norm_topk_prob": False}, "norm_topk_prob is False; expected True"),
        (SMALL_4, {"attention_bias": True}, "attention_bias is True; expected False"),
        (
            SMALL_4,
            {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor is 0.25; expected qk_rope_head_dim 64 of 128 dimensions",
        ),
        (SMALL_4, {"rope_parameters": None}, "llama_4_scaling_beta is absent from rope_parameters"),
        (MINISTRAL_3, {"rope_parameters": None}, "llama_4_scaling_beta is absent"),
        (
            MINISTRAL_3,
            WITH_IMAGES | {"text_config": {"model_type": "mixtral"}},
            "model_type in text_config is 'mixtral'; expected 'mistral' or 'ministral3' or",
        ),
    ],
)
def test_what_is_not_served_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JspecError, match=message):
        read(tmp_path, config | changes)


@pytest.mark.parametrize("layers", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("variant", ["mistral", "ministral3", "mistral4"])
def test_inside_of_a_model_that_reads_images_is_the_same_model(
    variant: str, layers: str, tmp_path: Path
) -> None:
    """Tensors have the names of transformers 4, or those of version 5 in memory."""
    own = json.loads((GOLDEN / variant / "config.json").read_text())
    head = "language_model.lm_head." if layers.startswith("language") else "lm_head."
    tensors = {
        layers + name.removeprefix("model.")
        if name.startswith("model.")
        else head + name.removeprefix("lm_head."): value
        for name, value in load_file(GOLDEN / variant / "model.safetensors").items()
    }
    tower = {"vision_tower.ln_pre.weight": np.ones(3, np.float32)}
    save_file(tensors | tower, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(WITH_IMAGES | {"text_config": own}))
    spec = load_model_spec(GOLDEN / variant)
    assert load_model_spec(tmp_path) == spec
    expected = load_target(GOLDEN / variant, spec, dtype=np.float32)
    assert_same(load_target(tmp_path, spec, dtype=np.float32), expected)
