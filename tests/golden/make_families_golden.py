"""Write tests/golden/families: a tiny random checkpoint of each family and transformers' outputs.

Run by hand where torch and transformers (5) are installed; the tests read only the output:

    python tests/golden/make_families_golden.py && python tests/golden/make_fp8_golden.py

transformers writes an MoE's experts one by one, like published checkpoints; the variant
`qwen3_moe_fused` is `qwen3_moe` with the tensors as transformers 5 has them in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Step3p7TextConfig,
    Step3p7TextModel,
)

OUT = Path(__file__).parent / "families"
NUM_TOKENS = 24  # three times the windows
WINDOW = 8
NUM_GREEDY = 220  # ids that a model writes by itself, many windows long
MIN_GAP = 1e-3  # between the two best logits: far above the effect of summation order
INDEX_TOPK = 7  # tokens that sparse attention selects
MIN_INDEX_GAP = 5e-6  # between the scores of the last one selected and the next

COMMON = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
MIXTURE = {
    **COMMON,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def models() -> dict[str, PreTrainedModel]:
    """Together they cover windows on some and on all layers, biases, norms of q and k, another
    head_dim, tied embeddings, MoE with and without normalized weights, and dense layers among MoE
    layers.
    """
    torch.manual_seed(0)
    return {
        "qwen2": Qwen2ForCausalLM(
            Qwen2Config(
                **COMMON,
                num_hidden_layers=4,
                use_sliding_window=True,
                sliding_window=WINDOW,
                max_window_layers=2,
            )
        ),
        "qwen3": Qwen3ForCausalLM(
            Qwen3Config(**COMMON, num_hidden_layers=3, head_dim=10, tie_word_embeddings=True)
        ),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**MIXTURE, num_hidden_layers=2, norm_topk_prob=True)
        ),
        "qwen3_moe_mixed": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **MIXTURE,
                num_hidden_layers=4,
                norm_topk_prob=False,
                decoder_sparse_step=2,
                mlp_only_layers=[3],
            )
        ),
        "mistral": MistralForCausalLM(
            MistralConfig(**COMMON, num_hidden_layers=2, sliding_window=WINDOW)
        ),
    }


def later_models() -> dict[str, PreTrainedModel]:
    """They are made after those above, so that the earlier ones keep their random numbers.

    gpt-oss with sinks, a window on every other layer, YaRN that matters within a few tokens, and
    widths of whole mxfp4 blocks.
    """
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    }
    sizes = COMMON | {"hidden_size": 32, "intermediate_size": 32}
    return {
        "gpt_oss": GptOssForCausalLM(
            GptOssConfig(
                **sizes,
                head_dim=8,
                num_hidden_layers=4,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=WINDOW,
                rope_parameters=yarn,
            )
        ),
    }


def latest_models() -> dict[str, PreTrainedModel]:
    """GLM-4.5: RoPE on half of each head, biases, norms of q and k, one dense layer, then MoE
    layers with a shared expert.
    """
    torch.manual_seed(2)
    config = Glm4MoeConfig(
        **COMMON,
        head_dim=8,
        num_hidden_layers=3,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )
    return {"glm4_moe": Glm4MoeForCausalLM(config)}


def last_models() -> dict[str, PreTrainedModel]:
    """MiMo-V2-Flash: sliding layers with sinks, their own theta and kv heads between full layers,
    values narrower than keys, one dense layer, then MoE layers.
    """
    torch.manual_seed(3)
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = MiMoV2FlashConfig(
        **COMMON | {"num_key_value_heads": 1},
        head_dim=12,
        v_head_dim=8,
        num_hidden_layers=4,
        layer_types=kinds,
        mlp_layer_types=["dense", *["sparse"] * 3],
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        sliding_window=WINDOW,
    )
    return {"mimo_v2": MiMoV2FlashForCausalLM(config)}


def hybrid_models() -> dict[str, PreTrainedModel]:
    """Qwen3-Next and Qwen3.5: gated delta nets and full attention with a gate for each number of a
    head, RoPE on a part of each head, norms stored less one, and a gated shared expert.
    """
    torch.manual_seed(4)
    linear, full = "linear_attention", "full_attention"
    delta_net = {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    }
    mixture = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 10,
    }
    experts_only = {name: value for name, value in COMMON.items() if name != "intermediate_size"}
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    return {
        "qwen3_next": Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **COMMON | delta_net | mixture,
                num_hidden_layers=3,
                layer_types=[linear, full, linear],
                mlp_only_layers=[2],
                rope_parameters=rope,
            )
        ),
        "qwen3_5": Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                **COMMON | delta_net | {"linear_num_value_heads": 6},
                num_hidden_layers=4,
                rope_parameters=rope | sections,
                tie_word_embeddings=True,
            )
        ),
        "qwen3_5_moe": Qwen3_5MoeForCausalLM(
            Qwen3_5MoeTextConfig(
                **experts_only | delta_net | mixture,
                num_hidden_layers=2,
                layer_types=[linear, full],
                rope_parameters=rope | sections | {"partial_rotary_factor": 0.25},
            )
        ),
    }


def latent_models() -> dict[str, PreTrainedModel]:
    """DeepSeek-V3 with groups of experts and a YaRN whose two mscales differ; Kimi K2, with one
    group and a ramp of no width; V2 with softmaxes and full queries; GLM-4.7-Flash, with values as
    wide as keys.
    """
    torch.manual_seed(4)
    common = COMMON | {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 10,
        "q_lora_rank": 14,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 16,
    }
    kimi = yarn | {"rope_theta": 50000.0, "beta_fast": 1.0, "factor": 32.0, "mscale_all_dim": 1.0}
    one_group = {"n_group": 1, "topk_group": 1}
    lite = {name: value for name, value in common.items() if name != "first_k_dense_replace"}
    return {
        "deepseek_v3": DeepseekV3ForCausalLM(DeepseekV3Config(**common, rope_parameters=yarn)),
        "kimi_k2": DeepseekV3ForCausalLM(
            DeepseekV3Config(**common | one_group, rope_parameters=kimi, num_mtp_layers=0)
        ),
        "deepseek_v2": DeepseekV2ForCausalLM(
            DeepseekV2Config(
                **common | {"q_lora_rank": None, "n_shared_experts": 2},
                topk_method="group_limited_greedy",
                rope_parameters=yarn | {"mscale": 0.707, "mscale_all_dim": 0.707},
            )
        ),
        "glm4_moe_lite": Glm4MoeLiteForCausalLM(
            Glm4MoeLiteConfig(**lite | one_group | {"v_head_dim": 12})
        ),
    }


LATENT = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
}


def sparse_models() -> dict[str, PreTrainedModel]:
    """DeepSeek-V3.2 with YaRN and groups of experts; GLM-5, whose second layer attends to what the
    first one's indexer selected.
    """
    torch.manual_seed(9)
    indexer = {"index_topk": INDEX_TOPK, "index_head_dim": 6, "index_n_heads": 8}
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
    }
    common = COMMON | LATENT | indexer | {"first_k_dense_replace": 1}
    return {
        "deepseek_v32": DeepseekV32ForCausalLM(
            DeepseekV32Config(**common, n_group=4, topk_group=2, rope_parameters=yarn)
        ),
        "glm_moe_dsa": GlmMoeDsaForCausalLM(
            GlmMoeDsaConfig(**common, indexer_types=["full", "shared", "full"])
        ),
    }


@contextmanager
def watched_indexers() -> Iterator[list[float]]:
    """Yield a list that gets the gap in scores after every query's last selected token."""
    gaps: list[float] = []
    topk = torch.Tensor.topk

    def watched(scores: torch.Tensor, k: int, *args: object, **options: object) -> object:
        if k == INDEX_TOPK and scores.shape[-1] > k:
            best = topk(scores, k + 1).values
            seen = best[..., k] > -1e30
            gaps.extend((best[..., k - 1] - best[..., k])[seen].tolist())
        return topk(scores, k, *args, **options)

    torch.Tensor.topk = watched
    try:
        yield gaps
    finally:
        torch.Tensor.topk = topk


def write_sparse() -> None:
    with watched_indexers() as gaps:
        write(sparse_models())
    print("index gap", min(gaps), "of", len(gaps))
    assert min(gaps) > MIN_INDEX_GAP, "a selection comes near a tie: choose another seed"


def spanning_models() -> dict[str, PreTrainedModel]:
    """MiniMax M2: norms that span all heads, RoPE on half of each, MoE layers alone."""
    torch.manual_seed(5)
    config = MiniMaxM2Config(
        **COMMON | {"intermediate_size": 8},
        head_dim=8,
        rotary_dim=4,
        num_hidden_layers=3,
        num_local_experts=6,
        num_experts_per_tok=2,
    )
    return {"minimax_m2": MiniMaxM2ForCausalLM(config)}


def growing_models() -> dict[str, PreTrainedModel]:
    """Mistral Small 4 and Ministral 3: queries whose scale grows within a few tokens."""
    torch.manual_seed(6)
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 6,
        "llama_4_scaling_beta": 0.3,
    }
    latent = Mistral4Config(
        **COMMON | {"num_key_value_heads": 4},
        num_hidden_layers=3,
        first_k_dense_replace=1,
        kv_lora_rank=10,
        q_lora_rank=14,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        rope_parameters=dict(rope),
    )
    plain = Ministral3Config(**COMMON, head_dim=8, num_hidden_layers=2, rope_parameters=dict(rope))
    return {
        "mistral4": Mistral4ForCausalLM(latent),
        "ministral3": Ministral3ForCausalLM(plain),
    }


def sandwich_models() -> dict[str, PreTrainedModel]:
    """Gemma 4: windows and full attention with wider heads, an MoE beside each MLP and one
    projection for K and V (26B-A4B); embeddings of tokens for each layer and layers that read an
    earlier one's cache, with MLPs twice as wide (E2B); the same without media (12B).
    """
    torch.manual_seed(7)
    kinds = ["sliding_attention", "full_attention"]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 1000.0,
        },
    }
    common = COMMON | {
        "head_dim": 8,
        "global_head_dim": 12,
        "rope_parameters": rope,
        "sliding_window": WINDOW,
        "final_logit_softcapping": 5.0,
    }
    no_tokens = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    one_head = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return {
        "gemma4_moe": Gemma4ForCausalLM(
            Gemma4TextConfig(
                **common | no_tokens | one_head,
                num_hidden_layers=3,
                layer_types=["sliding_attention", *kinds],
                enable_moe_block=True,
                num_experts=6,
                top_k_experts=2,
                moe_intermediate_size=8,
            )
        ),
        "gemma4": Gemma4ForCausalLM(
            Gemma4TextConfig(
                **common,
                hidden_size_per_layer_input=6,
                vocab_size_per_layer_input=COMMON["vocab_size"],
                num_hidden_layers=5,
                layer_types=[*kinds, "sliding_attention", *kinds],
                num_kv_shared_layers=3,
                use_double_wide_mlp=True,
            )
        ),
        "gemma4_unified": Gemma4UnifiedForCausalLM(
            Gemma4UnifiedTextConfig(
                **common | one_head,
                num_hidden_layers=2,
                layer_types=kinds,
                tie_word_embeddings=False,
            )
        ),
    }


STEP = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    **{name: COMMON[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 8,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "max_position_embeddings": 256,
    "max_seq_len": 256,
    "moe_intermediate_size": 8,
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 6,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 2,
    "norm_expert_weight": True,
    "num_attention_groups": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "rope_theta": [500.0, 100.0, 100.0, 500.0],
    "share_expert_dim": 10,
    "sliding_window": WINDOW,
    "swiglu_limits": [0.0, 0.0, 7.0, 7.0],
    "swiglu_limits_shared": [2.0, 0.0, 1.5, 16.0],
    "tie_word_embeddings": False,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "yarn_only_types": ["full_attention"],
    "zero_centered": True,
}
GREEDY = 200  # ids that the model writes by itself, after one


class StepWithHead(torch.nn.Module):
    """Step's text model with an lm_head; transformers has it as a part of Step-3.7's, without
    one."""

    def __init__(self) -> None:
        super().__init__()
        own = {name: value for name, value in STEP.items() if name != "architectures"}
        own |= {"num_key_value_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 2}
        config = Step3p7TextConfig(**own, attn_implementation="eager")
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def published(self) -> dict[str, torch.Tensor]:
        """Return the tensors under the checkpoint's names, with experts as one tensor per
        product."""
        tensors = {}
        for name, value in self.state_dict().items():
            name = name.replace(".mlp.shared_experts.", ".share_expert.")
            name = name.replace(".mlp.gate.e_score_correction_bias", ".moe.router_bias")
            name = name.replace(".mlp.gate.weight", ".moe.gate.weight")
            name = name.replace(".mlp.experts.down_proj", ".moe.down_proj.weight")
            if name.endswith(".mlp.experts.gate_up_proj"):
                layer = name.removesuffix(".mlp.experts.gate_up_proj")
                for part, half in zip(("gate", "up"), value.chunk(2, dim=1), strict=True):
                    tensors[f"{layer}.moe.{part}_proj.weight"] = half.contiguous()
                continue
            tensors[name] = value.contiguous()
        return tensors


@torch.no_grad()
def write_step() -> None:
    """Norms are stored less one, as multiples of 1/256 like bfloat16's; gates and experts are large
    enough for the limits to matter.
    """
    torch.manual_seed(1)
    model, folder = StepWithHead().float().eval(), OUT / "step3p5"
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:
            value.copy_(value.uniform_(-128, 128).round() / 256)
        elif "correction_bias" in name:
            value.normal_(std=0.3)
        elif "inv_freq" not in name:
            is_wide = any(part in name for part in ("gate_up_proj", ".gate_proj", ".up_proj"))
            scale = 3.0 if is_wide else 0.1 if "down_proj" in name else 1.0
            value.normal_(std=scale * value.shape[-1] ** -0.5)
    ids = torch.randint(0, STEP["vocab_size"], (1, NUM_TOKENS))
    output = model.model(ids, output_hidden_states=True)
    text = ids[:, :1]
    for _ in range(GREEDY):
        logits = model.lm_head(model.model(text, use_cache=False).last_hidden_state[:, -1:])
        text = torch.cat([text, logits.argmax(-1)], dim=1)
    folder.mkdir()
    save_file(model.published(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(STEP, indent=2) + "\n")
    np.savez_compressed(
        folder / "outputs.npz",
        token_ids=ids[0].numpy(),
        logits=model.lm_head(output.last_hidden_state)[0].numpy(),
        hidden_states=np.stack([hidden[0].numpy() for hidden in output.hidden_states]),
        greedy=text[0].numpy(),
    )
    write_greedy(
        folder,
        ids,
        lambda text: model.lm_head(model.model(text, use_cache=False).last_hidden_state[:, -1]),
    )


def write_greedy(
    folder: Path, ids: torch.Tensor, next_logits: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Write the model's greedy text after the longest prefix of ids without a near-tie.

    next_logits: of one text, without a cache.
    """
    for length in range(ids.shape[1], 2, -1):
        text, gap = ids[:, :length], float("inf")
        for _ in range(NUM_GREEDY):
            best = next_logits(text)[0].topk(2)
            gap = min(gap, (best.values[0] - best.values[1]).item())
            if gap < MIN_GAP:
                break
            text = torch.cat([text, best.indices[None, :1]], dim=1)
        else:
            written = {"prompt": text[0, :length].tolist(), "ids": text[0, length:].tolist()}
            (folder / "greedy.json").write_text(json.dumps(written) + "\n")
            print(folder.name, length, "gap", gap, "of", len({*written["ids"]}), "ids")
            return
    raise AssertionError(f"{folder.name}: every text comes near a tie")


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Draw weights large enough for attention to matter; norms away from 1, biases from 0."""
    is_hybrid = hasattr(model.config, "linear_num_key_heads")
    for name, value in model.named_parameters():
        if "norm" in name or "router.scale" in name or "per_expert_scale" in name:
            value.uniform_(0.5, 1.5)
            if is_hybrid and "linear_attn" not in name:  # stored less one
                value.sub_(1.0)
        elif "A_log" in name:  # from a memory of many tokens to one of a few
            value.uniform_(-4.0, 0.5)
        elif "gate_up_proj_bias" in name:  # so that some gates are clamped
            value.normal_(std=5.0)
        elif "bias" in name:
            value.normal_(std=0.3)
        else:
            value.normal_(std=value.shape[-1] ** -0.5)
    for name, value in model.named_buffers():
        if "correction_bias" in name:
            value.normal_(std=0.3)
        elif "layer_scalar" in name:
            value.uniform_(0.5, 1.2)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)  # the products are tiny
    shutil.rmtree(OUT, ignore_errors=True)
    for made in (models, later_models):
        write(made())
    write_step()
    for made in (latest_models, last_models, hybrid_models, latent_models, spanning_models):
        write(made())
    write(growing_models())
    write(sandwich_models())
    write_sparse()


@torch.no_grad()
def write(made: dict[str, PreTrainedModel]) -> None:
    for name, model in made.items():
        model = model.float().eval()
        randomize(model)
        token_ids = torch.randint(0, COMMON["vocab_size"], (1, NUM_TOKENS))
        output = model(token_ids, output_hidden_states=True)
        model.save_pretrained(OUT / name)
        (OUT / name / "generation_config.json").unlink()
        np.savez_compressed(
            OUT / name / "outputs.npz",
            token_ids=token_ids[0].numpy(),
            logits=output.logits[0].numpy(),
            hidden_states=np.stack([hidden[0].numpy() for hidden in output.hidden_states]),
        )
        write_greedy(
            OUT / name,
            token_ids,
            lambda text, model=model: model(text, use_cache=False).logits[:, -1],
        )
        if name == "qwen3_moe":
            write_fused(model)


def write_fused(model: PreTrainedModel) -> None:
    """Write the same model with its experts as one tensor for all of a layer."""
    folder = OUT / "qwen3_moe_fused"
    folder.mkdir()
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "outputs.npz"):
        shutil.copy(OUT / "qwen3_moe" / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]


if __name__ == "__main__":
    main()
