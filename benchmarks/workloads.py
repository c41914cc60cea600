"""What the H200 table runs: model shapes as config.json files, engine arguments, batch sizes.

Llama-3.1-8B, Qwen3-30B-A3B and gpt-oss-20b, each with an EAGLE-3 head of its width, and tiny pairs
of all three builds for a smoke test on a CPU. Weights are random (load_format "dummy"): no
checkpoint is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jspec.core.config import RopeConfig
from jspec.core.json_files import Fields
from jspec.core.model_spec import (
    AttentionSpec,
    DenseSpec,
    Eagle3Config,
    LayerSpec,
    ModelSpec,
    MoESpec,
    uniform_decoder,
)
from jspec.models.eagle3_config import eagle3_config_json
from jspec.models.registry import family_named

# S/K/N of each mode; None decodes plainly.
MODES: Mapping[str, tuple[int, int, int] | None] = {
    "plain": None,
    "chain": (3, 1, 4),
    "tree": (3, 4, 16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model pair and what is measured on it. prefills: (prompts, tokens of each)."""

    name: str
    target: ModelSpec
    draft: Eagle3Config
    dtype: str
    batches: tuple[int, ...]
    prompt_len: int
    long_run: int
    short_run: int
    prefills: tuple[tuple[int, int], ...]
    engine: Mapping[str, Any] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """Names of all cells: plain/1, ..., prefill/1x128, ..., startup/plain, ..."""
        return [
            *(f"{mode}/{batch}" for mode in MODES for batch in self.batches),
            *(f"prefill/{rows}x{length}" for rows, length in self.prefills),
            *(f"startup/{mode}" for mode in MODES),
        ]

    def write_configs(self, directory: Path) -> None:
        """`directory`/target and `directory`/draft, each with nothing but its config.json."""
        target = family_named(self.target.family).to_json(self.target)
        for name, config in (
            ("target", target | {"torch_dtype": self.dtype}),
            ("draft", eagle3_config_json(self.draft, dtype=self.dtype)),
        ):
            (directory / name).mkdir(parents=True, exist_ok=True)
            text = json.dumps(config, indent=1)
            (directory / name / "config.json").write_text(text, encoding="utf-8")

    def arguments(self, mode: str, directory: Path, *, acceptance: float) -> dict[str, Any]:
        """Engine arguments of `mode` for the configs in `directory`."""
        shared = {
            "model_path": str(directory / "target"),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "max_running_requests": max(self.batches),
            "disable_radix_cache": True,  # every prompt is computed, as the peers' are
            "compile_at_start": "all",  # a larger program than needed would be timed else
            **self.engine,
        }
        shape = MODES[mode]
        if shape is None:
            return {**shared, "speculative_algorithm": "NONE"}
        steps, topk, nodes = shape
        return {
            **shared,
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(directory / "draft"),
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": nodes,
            "simulate_acceptance": acceptance,
        }


def draft_of(target: ModelSpec, *, draft_vocab_size: int, aux: tuple[int, ...]) -> Any:
    """A head of the target's widths; a mixture's head is a dense Llama layer with full attention,
    as wide inside as the experts of one token together."""
    layer = target.layers[0]
    if isinstance(layer.ffn, MoESpec):
        attention = replace(
            layer.attention,
            window=None,
            sinks=False,
            qk_norm=False,
            qkv_bias=False,
            out_bias=False,
        )
        dense = DenseSpec(inner=layer.ffn.inner * layer.ffn.top_k)
        layer = replace(layer, attention=attention, ffn=dense)
    return Eagle3Config(
        layer=replace(target, layers=(layer,), family="llama"),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=aux,
    )


LLAMA_8B = uniform_decoder(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(theta=500000.0, factor=8.0),
    max_position=131072,
    eos_token_ids=(128001,),
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
QWEN3_30B_A3B = ModelSpec(
    vocab_size=151936,
    hidden_size=2048,
    layers=(
        LayerSpec(
            attention=AttentionSpec(
                num_heads=32,
                num_kv_heads=4,
                head_dim=128,
                rope=RopeConfig(theta=1000000.0),
                qk_norm=True,
            ),
            ffn=MoESpec(num_experts=128, top_k=8, inner=768),
            eps=1e-6,
        ),
    )
    * 48,
    rms_norm_eps=1e-6,
    max_position=40960,
    eos_token_ids=(151645,),
    family="qwen3_moe",
)
# What the published config.json says of the model; its experts in the engine's dtype, not mxfp4.
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


def _of_json(config: Mapping[str, Any]) -> ModelSpec:
    """The spec that the family's own reader makes of a config.json."""
    return family_named("gpt_oss").read(Fields(Path("gpt-oss/config.json"), dict(config)))


GPT_OSS_20B = _of_json(GPT_OSS_20B_JSON)
TINY_GPT_OSS = _of_json(TINY_GPT_OSS_JSON)
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


def _published(name: str, target: ModelSpec) -> Workload:
    """A real model's shapes in bfloat16, as the peers were measured."""
    aux = Eagle3Config.default_aux_layer_ids(target.num_layers)
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
    )


def _tiny(name: str, target: ModelSpec) -> Workload:
    """For a smoke test on a CPU."""
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
    )


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        _published("llama-3.1-8b", LLAMA_8B),
        _published("qwen3-30b-a3b", QWEN3_30B_A3B),
        _published("gpt-oss-20b", GPT_OSS_20B),
        _tiny("tiny", TINY),
        _tiny("tiny-moe", TINY_MOE),
        _tiny("tiny-gpt-oss", TINY_GPT_OSS),
    )
}
