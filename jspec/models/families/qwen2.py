"""Qwen2 and Qwen2.5 (transformers' Qwen2ForCausalLM): Llama with biases on q, k and v. With
`use_sliding_window`, layers from `max_window_layers` on have the window."""

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
from jspec.models.files.w8a8 import check_quantization
from jspec.spec.model_spec import ModelSpec


def read(fields: Fields) -> ModelSpec:
    check_quantization(fields)
    dense = read_dense(fields)
    return read_decoder(
        fields,
        family=FAMILY.name,
        attention=read_attention(fields, qkv_bias=True),
        ffn=lambda _: dense,
        windows=qwen_windows(fields),
        default_max_position=32768,
    )


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", 4096)
    first = fields.values.get("max_window_layers", 28)
    first = 0 if first == 0 else fields.integer("max_window_layers", 28)
    return read_windows(
        fields,
        window=window,
        default=lambda i: SLIDING if window is not None and i >= first else FULL,
    )


def qwen_json(spec: ModelSpec, *, architecture: str, model_type: str) -> dict[str, Any]:
    windows = [layer.attention.window for layer in spec.layers]
    window = max((w for w in windows if w is not None), default=None)
    return decoder_json(spec, architecture=architecture, model_type=model_type) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [FULL if w is None else SLIDING for w in windows],
    }


def to_json(spec: ModelSpec) -> dict[str, Any]:
    return qwen_json(spec, architecture="Qwen2ForCausalLM", model_type="qwen2")


FAMILY = Family(name="qwen2", architectures=("Qwen2ForCausalLM",), read=read, to_json=to_json)
