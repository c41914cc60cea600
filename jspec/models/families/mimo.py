"""MiMo-7B (MiMoForCausalLM): Qwen2 layers, and one more for multi-token prediction, which every
draft level runs. It reads [the target's hidden after the final norm; embedding, 0 at position
0]."""

from __future__ import annotations

from typing import Any

from jspec.files.json_files import Fields
from jspec.models.families.qwen2 import qwen_json, qwen_windows
from jspec.models.family import (
    OF_RECURRENT_LAYERS,
    Family,
    MtpFamily,
    check_one_mtp_layer,
    feeds_normed,
    masks_first,
    read_attention,
    read_decoder,
    read_dense,
    refuse_windows,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.models.heads.head_params import HeadNames
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.model_spec import ModelSpec

NAMES = HeadNames(
    prefix="model.mtp_layers.{}.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    fuse="input_proj",
)


def read(fields: Fields) -> ModelSpec:
    check_quantization(fields)
    dense = read_dense(fields)
    return read_decoder(
        fields,
        family=FAMILY.name,
        attention=read_attention(fields, qkv_bias=fields.flag("attention_bias", True)),
        ffn=lambda _: dense,
        windows=qwen_windows(fields),
        default_max_position=32768,
    )


def read_mtp(fields: Fields, target: ModelSpec) -> HeadSpec:
    return mtp_spec(
        layer=mtp_layer(fields),
        target_num_layers=target.num_layers,
        recurrent=True,
        hidden_first=True,
        feeds_back_normed=feeds_normed(fields),
        zeroes_first=masks_first(fields, True),
    )


def mtp_layer(fields: Fields) -> ModelSpec:
    check_one_mtp_layer(fields)
    refuse_windows(fields)
    own = {"num_hidden_layers": 1, "layer_types": None, "use_sliding_window": False}
    return read(Fields(fields.path, {**fields.values, **own}))


def to_json(spec: ModelSpec) -> dict[str, Any]:
    written = qwen_json(spec, architecture="MiMoForCausalLM", model_type="mimo")
    return written | {"attention_bias": spec.layers[0].softmax_attention.qkv_bias}


FAMILY = Family(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    read=read,
    to_json=to_json,
    mtp=MtpFamily(read=read_mtp, names=lambda _: NAMES, known=OF_RECURRENT_LAYERS),
)
