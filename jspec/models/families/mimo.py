"""MiMo-7B (MiMoForCausalLM): Qwen2 layers, and one more for multi-token prediction.

The layer reads the target's hidden behind its final norm, in front of the embedding; the embedding
of the first row is zero. Embedding and lm_head are the target's.
"""

from __future__ import annotations

from typing import Any

from jspec.core.errors import ConfigError
from jspec.core.json_files import Fields
from jspec.core.model_spec import ModelSpec, MtpConfig
from jspec.models.families.qwen2 import qwen_json, qwen_windows
from jspec.models.family import (
    Family,
    MtpFamily,
    read_attention,
    read_decoder,
    read_dense,
    refuse_quantized,
)
from jspec.models.mtp_params import MtpNames

NAMES = MtpNames(
    prefix="model.mtp_layers.{}.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    fuse="input_proj",
)
COUNT = "num_nextn_predict_layers"


def read(fields: Fields) -> ModelSpec:
    refuse_quantized(fields)
    dense = read_dense(fields)
    return read_decoder(
        fields,
        family=FAMILY.name,
        attention=read_attention(fields, qkv_bias=fields.flag("attention_bias", True)),
        ffn=lambda _: dense,
        windows=qwen_windows(fields),
        default_max_position=32768,
    )


def read_mtp(fields: Fields, target: ModelSpec) -> MtpConfig:
    return MtpConfig(
        model=mtp_layers(fields),
        target_num_layers=target.num_layers,
        hidden_first=True,
        zeroes_first=True,
    )


def mtp_layers(fields: Fields) -> ModelSpec:
    """As many layers like the config's others as it has for multi-token prediction."""
    count = fields.get(COUNT)
    if not count:
        raise ConfigError(
            f"{fields.path}: {COUNT} is {count!r}; expected at least 1 layer for multi-token "
            "prediction"
        )
    own = {"num_hidden_layers": count, "layer_types": None, "use_sliding_window": False}
    return read(Fields(fields.path, {**fields.values, **own}))


def to_json(spec: ModelSpec) -> dict[str, Any]:
    written = qwen_json(spec, architecture="MiMoForCausalLM", model_type="mimo")
    return written | {"attention_bias": spec.layers[0].attention.qkv_bias}


FAMILY = Family(
    name="mimo",
    architectures=("MiMoForCausalLM",),
    read=read,
    to_json=to_json,
    mtp=MtpFamily(read=read_mtp, names=lambda _: NAMES),
)
