"""Mistral 7B and later models with the same layer (transformers' MistralForCausalLM).

Every layer has the window `sliding_window`: null for full attention, 4,096 if absent.
"""

from __future__ import annotations

from typing import Any

from jspec.files.json_files import Fields
from jspec.models.family import (
    FULL,
    SLIDING,
    Family,
    decoder_json,
    read_attention,
    read_decoder,
    read_dense,
    read_windows,
)
from jspec.models.files.fp8 import check_quantization
from jspec.spec.model_spec import ModelSpec


def read(fields: Fields) -> ModelSpec:
    check_quantization(fields)
    window = None
    if fields.values.get("sliding_window", 4096) is not None:
        window = fields.integer("sliding_window", 4096)
    dense = read_dense(fields)
    return read_decoder(
        fields,
        family=FAMILY.name,
        attention=read_attention(fields),
        ffn=lambda _: dense,
        windows=read_windows(fields, window=window, default=lambda _: SLIDING if window else FULL),
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    return decoder_json(spec, architecture="MistralForCausalLM", model_type="mistral") | {
        "sliding_window": spec.one_layer.attention.window
    }


FAMILY = Family(name="mistral", architectures=("MistralForCausalLM",), read=read, to_json=to_json)
