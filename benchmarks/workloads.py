"""The workloads of the H200 table: model shapes as config.json files, engine arguments, batch
sizes.

Llama-3.1-8B and 70B, Qwen3-8B, Qwen3-30B-A3B and gpt-oss-20b, each with an EAGLE-3 head, and
tiny pairs for a smoke test on a CPU; for Llama-3.1-8B also the other drafters, with Llama-3.2-1B's
shapes for STANDALONE, and for it and Qwen3-8B block drafters of five layers. Weights are random
(load_format "dummy"): no checkpoint is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jspec.errors import ConfigError
from jspec.files.json_files import Fields
from jspec.models.heads.eagle1 import eagle1_config_json
from jspec.models.heads.eagle3_config import eagle3_config_json
from jspec.models.heads.mtp import mtp_config_json, written_config
from jspec.models.registry import family_named
from jspec.pallas_kernels import shapes
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B, LLAMA_3_1_70B, LLAMA_3_2_1B, ModelShape
from jspec.spec.head_spec import HeadSpec, default_aux_layer_ids, eagle1_spec, eagle3_spec
from jspec.spec.layers.feed_forward import DenseSpec, MoESpec
from jspec.spec.model_spec import LayerSpec, ModelSpec, uniform_decoder
from jspec.spec.rope import RopeConfig
from jspec.spec.weight_format import Formats

PACKED = shapes.GPT_OSS_20B_MXFP4.formats  # as gpt-oss is published

# S/K/N of each mode; None decodes plainly.
MODES: Mapping[str, tuple[int, int, int] | None] = {
    "plain": None,
    "chain": (3, 1, 4),
    "tree": (3, 4, 16),
}
DRAFTER_SHAPE = (3, 1, 4)


@dataclass(frozen=True, slots=True)
class OtherDrafter:
    """A drafter other than EAGLE-3: the algorithm, the draft's directory, S/K/N."""

    algorithm: str
    directory: str | None
    shape: tuple[int, int, int] = DRAFTER_SHAPE


DRAFTERS: Mapping[str, OtherDrafter] = {
    "eagle1": OtherDrafter("EAGLE", "draft_eagle1"),
    "mtp": OtherDrafter("NEXTN", "draft_mtp"),  # three layers, one per level, in a directory
    "standalone": OtherDrafter("STANDALONE", "draft_standalone"),
    "ngram": OtherDrafter("NGRAM", None),
    "dflash8": OtherDrafter("DFLASH", "draft_dflash8", (7, 1, 8)),
    "dflash16": OtherDrafter("DFLASH", "draft_dflash16", (15, 1, 16)),
    "dflash8-tree16": OtherDrafter("DFLASH", "draft_dflash8", (7, 4, 16)),
    "dflash8-tree32": OtherDrafter("DFLASH", "draft_dflash8", (7, 8, 32)),
    "dflash8-tree64": OtherDrafter("DFLASH", "draft_dflash8", (7, 8, 64)),
    "dspark7": OtherDrafter("DFLASH", "draft_dspark7", (7, 1, 8)),
}
BLOCK_MODES = tuple(name for name, each in DRAFTERS.items() if each.algorithm == "DFLASH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model pair and its measurements. prefills: (prompts, tokens of each).

    drafters: those of DRAFTERS that are measured
    small: the language model that drafts in mode "standalone"
    formats: of products whose weights the checkpoint packs.
    """

    name: str
    target: ModelSpec
    draft: HeadSpec
    dtype: str
    batches: tuple[int, ...]
    prompt_len: int
    long_run: int
    short_run: int
    prefills: tuple[tuple[int, int], ...]
    engine: Mapping[str, Any] = field(default_factory=dict)
    drafters: tuple[str, ...] = ()
    small: ModelSpec | None = None
    formats: Formats = ()

    def cells(self) -> list[str]:
        """Return the names of all cells: plain/1, ..., prefill/1x128, ..., startup/plain, ..."""
        return [
            *(f"{mode}/{batch}" for mode in MODES for batch in self.batches),
            *(f"prefill/{rows}x{length}" for rows, length in self.prefills),
            *(f"startup/{mode}" for mode in MODES),
        ]

    def write_configs(self, directory: Path) -> None:
        """Write `directory`/target and `directory`/draft with a config.json each, and those of
        `drafters`."""
        target = family_named(self.target.family).to_json(self.target)
        for _, packed in self.formats:
            target["quantization_config"] = {"quant_method": packed.name}
        configs = {
            "target": target | {"torch_dtype": self.dtype},
            "draft": eagle3_config_json(self.draft, dtype=self.dtype),
        }
        if self.small is not None:
            layers = mtp_of(self.target, num_layers=DRAFTER_SHAPE[0])
            small = family_named(self.small.family).to_json(self.small)
            configs |= {
                "draft_eagle1": eagle1_config_json(eagle1_of(self.target), dtype=self.dtype),
                "draft_mtp": mtp_config_json(layers, target=self.target, dtype=self.dtype),
                "draft_standalone": small | {"torch_dtype": self.dtype},
            }
        if set(BLOCK_MODES) & set(self.drafters):
            configs |= {
                "draft_dflash8": block_json(self.target, block_size=8),
                "draft_dflash16": block_json(self.target, block_size=16),
                "draft_dspark7": block_json(
                    self.target, block_size=7, projector_type="dspark", markov_rank=256
                ),
            }
        for name, config in configs.items():
            (directory / name).mkdir(parents=True, exist_ok=True)
            text = json.dumps(config, indent=1)
            (directory / name / "config.json").write_text(text, encoding="utf-8")

    def arguments(self, mode: str, directory: Path, *, acceptance: float) -> dict[str, Any]:
        """Return engine arguments of `mode`, one of MODES or DRAFTERS, for the configs in
        `directory`."""
        shared = {
            "model_path": str(directory / "target"),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "max_running_requests": max(self.batches),
            "disable_radix_cache": True,  # every prompt is computed, as the peers' are
            "compile_at_start": "common",  # a larger program than needed would be timed else
            **self.engine,
        }
        shape = None if mode in DRAFTERS else MODES[mode]
        if mode not in DRAFTERS and shape is None:
            return {**shared, "speculative_algorithm": "NONE"}
        drafter = DRAFTERS.get(mode) or OtherDrafter("EAGLE3", "draft", shape or DRAFTER_SHAPE)
        steps, topk, nodes = drafter.shape
        if drafter.directory is not None:
            shared["speculative_draft_model_path"] = str(directory / drafter.directory)
        return {
            **shared,
            "speculative_algorithm": drafter.algorithm,
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": nodes,
            "simulate_acceptance": acceptance,
        }


def draft_of(target: ModelSpec, *, draft_vocab_size: int, aux: tuple[int, ...]) -> Any:
    """Return a head of the target's widths.

    It is a dense Llama layer with full attention, for an MoE as wide inside as one token's experts.
    """
    layer = target.layers[0]
    attention = replace(
        layer.attention, window=None, sinks=False, qk_norm=False, qkv_bias=False, out_bias=False
    )
    dense = layer.ffn
    if isinstance(dense, MoESpec):
        dense = DenseSpec(inner=dense.inner * dense.top_k)
    layer = replace(layer, attention=attention, ffn=dense)
    return eagle3_spec(
        layer=replace(target, layers=(layer,), family="llama"),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=aux,
    )


def eagle1_of(target: ModelSpec) -> HeadSpec:
    """Return an EAGLE-1 head of a dense target's widths; like Llama 3's, without a bias in fc."""
    layer = replace(target, layers=target.layers[:1], tie_word_embeddings=False)
    return eagle1_spec(layer=layer, draft_vocab_size=target.vocab_size, fc_bias=False)


def block_json(target: ModelSpec, *, block_size: int, **more: Any) -> dict[str, Any]:
    """Return z-lab's config.json of a block drafter: five layers (or the target's, if it has
    fewer) of a dense target's widths, which read five of its layers."""
    attention, dense = target.layers[0].softmax_attention, target.layers[0].ffn
    assert isinstance(dense, DenseSpec)
    count = min(5, target.num_layers)
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "block_size": block_size,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": dense.inner,
        "mask_token_id": target.vocab_size - 1,
        "max_position_embeddings": target.max_position,
        "model_type": "qwen3",
        "num_attention_heads": attention.num_heads,
        "num_hidden_layers": count,
        "num_key_value_heads": attention.num_kv_heads,
        "num_target_layers": target.num_layers,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": attention.rope.theta,
        "target_layer_ids": [
            i * (target.num_layers - 1) // max(count - 1, 1) for i in range(count)
        ],
        "vocab_size": target.vocab_size,
        **more,
    }


def mtp_of(target: ModelSpec, *, num_layers: int) -> HeadSpec:
    """Return layers of a dense target's widths, in the layout in which such layers are written."""
    rope = RopeConfig(theta=target.layers[0].attention.rope.theta)
    attention = replace(target.layers[0].attention, rope=rope)
    return written_config(
        target, replace(target.layers[0], attention=attention), num_layers=num_layers
    )


def decoder_of(
    shape: ModelShape, num_layers: int, *, rope: RopeConfig, eps: float = 1e-5, **fields: Any
) -> ModelSpec:
    """Return a decoder of equal layers. fields: the others of ModelSpec."""
    attention = replace(shape.attention, rope=rope)
    return ModelSpec(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        layers=(LayerSpec(attention=attention, ffn=shape.ffn, eps=eps),) * num_layers,
        rms_norm_eps=eps,
        **fields,
    )


LLAMA: Mapping[str, Any] = {"max_position": 131072, "eos_token_ids": (128001,)}
ROPE_OF_LLAMA = RopeConfig(theta=500000.0, factor=8.0)
LLAMA_8B = decoder_of(LLAMA_3_1_8B, 32, rope=ROPE_OF_LLAMA, **LLAMA)
LLAMA_70B = decoder_of(LLAMA_3_1_70B, 80, rope=ROPE_OF_LLAMA, **LLAMA)
QWEN3_8B = decoder_of(
    shapes.QWEN3_8B,
    36,
    rope=RopeConfig(theta=1000000.0),
    eps=1e-6,
    max_position=40960,
    eos_token_ids=(151645,),
    family="qwen3",
)
LLAMA_1B = decoder_of(
    LLAMA_3_2_1B, 16, rope=replace(ROPE_OF_LLAMA, factor=32.0), tie_word_embeddings=True, **LLAMA
)
QWEN3_30B_A3B = decoder_of(
    shapes.QWEN3_30B_A3B,
    48,
    rope=RopeConfig(theta=1000000.0),
    eps=1e-6,
    max_position=40960,
    eos_token_ids=(151645,),
    family="qwen3_moe",
)
TINY = uniform_decoder(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=512,
    eos_token_ids=(319,),
)
# The published config.json's model, with its experts in the engine's dtype, not mxfp4.
GPT_OSS_20B_JSON: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT_OSS_120B_JSON: Mapping[str, Any] = {
    **GPT_OSS_20B_JSON,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
# Of MiMo-V2-Flash and its three layers for multi-token prediction; in bfloat16, not fp8.
MIMO_V2_FLASH_JSON: Mapping[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "eos_token_id": 151645,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, *[1, 1, 1, 1, 1, 0] * 7],
    "intermediate_size": 16384,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, *[1] * 47],
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "rms_norm_eps": 1e-05,
    "rope_theta": 5000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 152576,
}
GLM_5_2_JSON: Mapping[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
TINY_GPT_OSS_JSON: Mapping[str, Any] = {
    **GPT_OSS_20B_JSON,
    "eos_token_id": 319,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "sliding_window": 16,
    "vocab_size": 320,
}


def _of_json(config: Mapping[str, Any], family: str) -> ModelSpec:
    """Return the spec that the family's own reader makes of a config.json."""
    return family_named(family).read(Fields(Path(f"{family}/config.json"), dict(config)))


QWEN3_5_9B_JSON: Mapping[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "vocab_size": 248320,
}
OF_THEIR_OWN = {"mimo_v2": MIMO_V2_FLASH_JSON, "qwen3_5": QWEN3_5_9B_JSON}


def own_layers_of(target: ModelSpec) -> HeadSpec:
    """Return the family's own layers for a target of its widths, with any number of layers."""
    family = family_named(target.family)
    if family.mtp is None or family.name not in OF_THEIR_OWN:
        raise ConfigError(f"family is {family.name!r}; expected one of {', '.join(OF_THEIR_OWN)}")
    config = dict(OF_THEIR_OWN[family.name])
    return family.mtp.read(Fields(Path("config.json"), config), target)


GPT_OSS_20B = _of_json(GPT_OSS_20B_JSON, "gpt_oss")
GPT_OSS_120B = _of_json(GPT_OSS_120B_JSON, "gpt_oss")
MIMO_V2_FLASH = _of_json(MIMO_V2_FLASH_JSON, "mimo_v2")
QWEN3_5_9B = _of_json(QWEN3_5_9B_JSON, "qwen3_5")
GLM_5_2 = _of_json(GLM_5_2_JSON, "glm_moe_dsa")
TINY_GPT_OSS = _of_json(TINY_GPT_OSS_JSON, "gpt_oss")


TINY_MOE = replace(
    TINY,
    layers=tuple(
        replace(
            layer,
            attention=replace(layer.attention, qk_norm=True),
            ffn=MoESpec(num_experts=4, top_k=2, inner=32),
        )
        for layer in TINY.layers
    ),
    family="qwen3_moe",
)


def _published(
    name: str,
    target: ModelSpec,
    *,
    drafters: tuple[str, ...] = (),
    small: ModelSpec | None = None,
    formats: Formats = (),
) -> Workload:
    """Return a real model's shapes in bfloat16, as the peers were measured."""
    aux = default_aux_layer_ids(target.num_layers)
    return Workload(
        name=name,
        target=target,
        draft=draft_of(target, draft_vocab_size=32000, aux=aux),
        dtype="bfloat16",
        batches=(1, 8, 32, 64),
        prompt_len=1024,
        long_run=288,
        short_run=32,
        prefills=((1, 128), (1, 1024), (1, 8192), (64, 1024)),
        # 64 rows of 1,024 + 288 tokens and their scratch; one row of 8,192.
        engine={"context_length": 8448, "max_total_tokens": 64 * 1408},
        drafters=drafters,
        small=small,
        formats=formats,
    )


def _tiny(
    name: str,
    target: ModelSpec,
    *,
    drafters: tuple[str, ...] = (),
    small: ModelSpec | None = None,
    formats: Formats = (),
) -> Workload:
    """Return sizes for a smoke test on a CPU."""
    return Workload(
        name=name,
        target=target,
        draft=draft_of(target, draft_vocab_size=160, aux=(0, 2, 3)),
        dtype="float32",
        batches=(1, 2),
        prompt_len=24,
        long_run=25,
        short_run=7,
        prefills=((1, 8), (2, 24)),
        engine={"context_length": 128, "max_total_tokens": 512, "chunked_prefill_size": 32},
        drafters=drafters,
        small=small,
        formats=formats,
    )


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        _published("llama-3.1-8b", LLAMA_8B, drafters=tuple(DRAFTERS), small=LLAMA_1B),
        _published("llama-3.1-70b", LLAMA_70B),
        _published("qwen3-8b", QWEN3_8B, drafters=BLOCK_MODES),
        _published("qwen3-30b-a3b", QWEN3_30B_A3B),
        _published("gpt-oss-20b", GPT_OSS_20B),
        _published("gpt-oss-20b-mxfp4", GPT_OSS_20B, formats=PACKED),
        _published("gpt-oss-120b-mxfp4", GPT_OSS_120B, formats=PACKED),
        _tiny(
            "tiny",
            TINY,
            drafters=tuple(DRAFTERS),
            small=replace(TINY, layers=TINY.layers[:1], tie_word_embeddings=True),
        ),
        _tiny("tiny-moe", TINY_MOE),
        _tiny("tiny-gpt-oss", TINY_GPT_OSS),
        _tiny("tiny-gpt-oss-mxfp4", TINY_GPT_OSS, formats=PACKED),
    )
}
