"""Small random targets with layers for multi-token prediction, in the published layouts, and code
that loads and runs them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from benchmarks.workloads import MIMO_V2_FLASH_JSON
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import Algorithm
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.files.json_files import Fields
from jspec.layers.linear import Shard
from jspec.messages.step_options import StepOptions
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.files.stored.tensors import stored_tensors, value_at
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.layer import Params
from jspec.models.params import Init
from jspec.models.placement import init_params, nested
from jspec.models.registry import family_named, table_of
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ranked import EagleDrafter
from tests.speculative.engines import (
    CONTEXT,
    DIAL_ACCEPTANCE,
    NUM_SLOTS,
    PLAIN,
    Compiled,
    build,
    mesh_of,
    spec_of,
)
from tests.support.dial_drafter import DialDrafter, DialMultiLayerDrafter, dial_head, dial_params
from tests.support.tiny_models import tiny_tokenizer

MIMO_7B = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "attention_bias": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 640000,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151680,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "max_window_layers": 2,
    "vocab_size": 320,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
MIMO_V2_FLASH = dict(MIMO_V2_FLASH_JSON)
TINY_V2 = {
    **{name: TINY[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
    **{name: TINY[name] for name in ("bos_token_id", "eos_token_id", "max_position_embeddings")},
    "head_dim": 12,
    "hybrid_layer_pattern": [0, 1, 0],
    "moe_intermediate_size": 16,
    "moe_layer_freq": [0, 1, 1],
    "n_routed_experts": 6,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "sliding_window": 6,
    "sliding_window_size": 6,
    "swa_head_dim": 12,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_v_head_dim": 8,
    "v_head_dim": 8,
}
STEP3P5_FLASH: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "att_impl_type": "GQA",
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "layer_types": [
        *(["full_attention", *["sliding_attention"] * 3] * 12)[:45],
        *["sliding_attention"] * 3,
    ],
    "max_position_embeddings": 262144,
    "max_seq_len": 262144,
    "moe_intermediate_size": 1280,
    "moe_layers_enum": ",".join(str(i) for i in range(3, 45)),
    "moe_num_experts": 288,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 8,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "num_attention_groups": 8,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "partial_rotary_factors": [*([0.5, 1.0, 1.0, 1.0] * 12)[:45], 1.0, 1.0, 1.0],
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 131072,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "rope_theta": [*([5e6, 1e4, 1e4, 1e4] * 12)[:45], 1e4, 1e4, 1e4],
    "share_expert_dim": 1280,
    "sliding_window": 512,
    "swiglu_limits": [*[0.0] * 43, 7.0, 7.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [*[0.0] * 43, 16.0, 16.0, 0.0, 0.0, 0.0],
    "tie_word_embeddings": False,
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "use_rope_layers": [],
    "vocab_size": 128896,
    "yarn_only_types": ["full_attention"],
    "zero_centered": True,
}
TINY_STEP = {
    **{name: TINY[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
    **{name: TINY[name] for name in ("bos_token_id", "eos_token_id", "max_position_embeddings")},
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 8},
    "head_dim": 8,
    "layer_types": ["full_attention", *["sliding_attention"] * 4],
    "max_seq_len": 256,
    "moe_intermediate_size": 16,
    "moe_layers_enum": "1",
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "num_attention_groups": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0],
    "rope_scaling": STEP3P5_FLASH["rope_scaling"] | {"original_max_position_embeddings": 32},
    "rope_theta": [500.0, 100.0, 100.0, 100.0, 100.0],
    "share_expert_dim": 12,
    "sliding_window": 6,
    "swiglu_limits": [0.0, 7.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 16.0, 0.5, 0.5, 0.5],
}
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
TINY_GLM = {
    **{name: value for name, value in TINY.items() if name != "max_window_layers"},
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "rope_theta": 1000,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_5_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "text_config": {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
}
TINY_HYBRID = {
    **{name: value for name, value in TINY.items() if name != "max_window_layers"},
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 6,
}
TINY_NEXT = TINY_HYBRID | {
    "full_attention_interval": 2,
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000,
    "shared_expert_intermediate_size": 12,
}
TINY_TEXT = TINY_HYBRID | {
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": QWEN3_5_27B["text_config"]["rope_parameters"]
    | {"partial_rotary_factor": 0.5, "rope_theta": 1000.0},
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
TINY_DEEPSEEK = {
    **{name: TINY[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
    **{name: TINY[name] for name in ("bos_token_id", "eos_token_id", "max_position_embeddings")},
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "moe_intermediate_size": 16,
    "n_group": 3,
    "n_routed_experts": 6,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"]
    | {"original_max_position_embeddings": 16, "mscale_all_dim": 0.7},
    "topk_group": 2,
    "v_head_dim": 6,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM_5 = {
    **{name: value for name, value in DEEPSEEK_V32.items() if name != "rope_theta"},
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "rope_scaling": None,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
TINY_INDEXER = {"index_head_dim": 6, "index_n_heads": 4, "index_topk": 5}
CONFIGS = {
    "mimo": MIMO_7B | TINY,
    "mimo_v2": MIMO_V2_FLASH | TINY_V2,
    "step3p5": STEP3P5_FLASH | TINY_STEP,
    "glm4_moe": GLM_4_5_AIR | TINY_GLM,
    "qwen3_next": QWEN3_NEXT_80B | TINY_NEXT,
    "qwen3_5": QWEN3_5_27B | {"text_config": QWEN3_5_27B["text_config"] | TINY_TEXT},
    "deepseek_v3": DEEPSEEK_V3 | TINY_DEEPSEEK,
    "deepseek_v32": DEEPSEEK_V32 | TINY_DEEPSEEK | TINY_INDEXER,
    "glm_moe_dsa": GLM_5
    | TINY_DEEPSEEK
    | TINY_INDEXER
    | {"rope_scaling": None, "n_group": 1, "topk_group": 1},
}
STEPS = 3  # as published, and the default


def drawn(table: Any, *, seed: int) -> Params:
    """Draw random weights; norms away from 1, biases and sinks from 0."""
    params = init_params(table, seed=seed)
    values = {spec.path: value_at(params, spec.path) for spec in table}
    for i, spec in enumerate(table):
        if spec.init in (Init.ONES, Init.ZEROS):
            offset = 1.0 if spec.init is Init.ONES else 0.0
            noise = jax.random.normal(jax.random.key(seed + i), spec.shape)
            values[spec.path] = offset + noise / 4
    return nested(values.items())


def write_checkpoint(path: Path, config: dict[str, Any], *, seed: int = 3) -> None:
    """Write a target with its layers for multi-token prediction, in one file, as published."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    spec = load_model_spec(path)
    family = family_named(spec.family)
    assert family.mtp is not None
    layers = family.mtp.read(Fields(path / "config.json", config), spec)
    table = tuple(own for own in head_params(layers, family.mtp.names(spec)) if own.layouts)
    tensors = stored_tensors(table_of(spec), drawn(table_of(spec), seed=seed), dtype=np.float32)
    tensors |= stored_tensors(table, drawn(table, seed=seed + 1), dtype=np.float32)
    if "text_config" in config:
        tensors = {
            name.replace("model.", "model.language_model."): value
            for name, value in tensors.items()
        } | {"model.visual.patch_embed.proj.bias": np.zeros(3, np.float32)}
    save_file(tensors, path / "model.safetensors")
    tiny_tokenizer().save(str(path / "tokenizer.json"))


def load(path: Path, *, shards: int = 1, experts: int = 1, **arguments: Any) -> LoadedModels:
    args = EngineArgs(
        model_path=str(path),
        tp_size=shards,
        ep_size=experts,
        dtype="float32",
        **{"speculative_algorithm": "NEXTN", **arguments},
    )
    return load_models(args, resolve_paths(args), mesh=mesh_of(shards, experts=experts))


def engine_of(models: LoadedModels, shape: tuple[int, int, int]) -> Compiled:
    """Return the loaded pair under a scheduler, with drafts of every quality; 0/1/1 decodes
    plainly."""
    target_params, draft = models.params["target"], models.params["draft"]
    own = models.drafter
    settings: dict[str, Any] = {
        "page_size": 4,
        "variants": (StepOptions(),),
        "target_spec": models.target.spec,
    }
    shards = models.target.shard.size
    settings["experts"] = models.request.expert_shards
    if shape[0] == 0:
        return build(PLAIN, params=(target_params, {}), shards=shards, **settings)
    is_recurrent = not isinstance(own, MultiLayerDrafter)
    spec = spec_of(*shape, Algorithm.NEXTN if is_recurrent else Algorithm.MULTI_LAYER_EAGLE)
    head = layers_of(own)

    def make(ops: Ops, shard: Shard) -> Drafter:
        layers = FeatureHead(head.spec, ops, shard, head.names)
        if is_recurrent:
            inner = dial_head(layers)
            return DialDrafter(inner, spec, acceptance=DIAL_ACCEPTANCE)
        return DialMultiLayerDrafter(layers, spec, acceptance=DIAL_ACCEPTANCE)

    empty = dial_params({0: (0,)}, rows=NUM_SLOTS, width=CONTEXT)
    own_params = {"head": draft} if is_recurrent else draft
    return build(
        spec,
        params=(target_params, {**own_params, "dial": empty}),
        make=make,
        aux_layer_ids=models.target.aux_layer_ids,
        shards=shards,
        **settings,
    )


def layers_of(drafter: Drafter) -> FeatureHead:
    """Return the layers for multi-token prediction of either drafter."""
    assert isinstance(drafter, EagleDrafter)
    return drafter.model
