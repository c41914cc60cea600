"""Qwen3 dense (transformers' Qwen3ForCausalLM): RMSNorm of q and k heads before RoPE."""

from __future__ import annotations

from typing import Any

from jspec.files.json_files import Fields
from jspec.models.families.qwen2 import qwen_json, qwen_windows
from jspec.models.family import (
    Family,
    read_attention,
    read_decoder,
    read_dense,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.spec.model_spec import ModelSpec


def read(fields: Fields) -> ModelSpec:
    check_quantization(fields)
    bias = fields.flag("attention_bias", False)
    dense = read_dense(fields)
    return read_decoder(
        fields,
        family=FAMILY.name,
        attention=read_attention(
            fields, qk_norm=True, qkv_bias=bias, out_bias=bias, default_head_dim=128
        ),
        ffn=lambda _: dense,
        windows=qwen_windows(fields),
        default_max_position=32768,
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    return qwen_json(spec, architecture="Qwen3ForCausalLM", model_type="qwen3") | {
        "attention_bias": spec.layers[0].softmax_attention.qkv_bias
    }


FAMILY = Family(name="qwen3", architectures=("Qwen3ForCausalLM",), read=read, to_json=to_json)
