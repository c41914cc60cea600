"""Llama 2 and 3 (transformers' LlamaForCausalLM)."""

from __future__ import annotations

from typing import Any

from jspec.files.json_files import Fields
from jspec.models.family import (
    FULL,
    Family,
    decoder_json,
    read_attention,
    read_decoder,
    read_dense,
    read_windows,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.spec.layers.feed_forward import DenseSpec
from jspec.spec.model_spec import ModelSpec


def read(fields: Fields) -> ModelSpec:
    check_quantization(fields)
    bias = fields.flag("attention_bias", False)
    dense = read_dense(fields, bias=fields.flag("mlp_bias", False))
    return read_decoder(
        fields,
        family=FAMILY.name,
        attention=read_attention(fields, qkv_bias=bias, out_bias=bias),
        ffn=lambda _: dense,
        windows=read_windows(fields, window=None, default=lambda _: FULL),
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    layer = spec.one_layer
    return decoder_json(spec, architecture="LlamaForCausalLM", model_type="llama") | {
        "attention_bias": layer.softmax_attention.qkv_bias,
        "mlp_bias": isinstance(layer.ffn, DenseSpec) and layer.ffn.bias,
    }


FAMILY = Family(name="llama", architectures=("LlamaForCausalLM",), read=read, to_json=to_json)
