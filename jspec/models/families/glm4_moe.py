"""GLM-4.5 and 4.6 (Glm4MoeForCausalLM), and the NextN drafts of DeepSeek-V3 and GLM.

RoPE rotates half of each head. Feed-forwards and the layer for multi-token prediction are those of
DeepSeek-V3. A checkpoint may have that layer alone, as layer 0; its config specifies the attention
(latent if it has kv_lora_rank) and the feed-forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jspec.files.json_files import Fields
from jspec.models.families.latent.deepseek_v3 import (
    NAMES,
    moe_json,
    read_latent_decoder,
    recurrent,
    sigmoid_moe,
)
from jspec.models.family import (
    OF_RECURRENT_LAYERS,
    Family,
    MtpFamily,
    decoder_json,
    read_attention,
    read_decoder,
    without_partial_rotary,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.spec.head_spec import HeadSpec
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.model_spec import ModelSpec

KNOWN = OF_RECURRENT_LAYERS | {"use_qk_norm"}
BEYOND = 1 << 31  # the index of a layer after all dense ones


def read(fields: Fields) -> ModelSpec:
    return _layers(fields, range(fields.integer("num_hidden_layers")), rotary=0.5)


def _layers(fields: Fields, numbers: range, *, rotary: float) -> ModelSpec:
    """Read the layers with these indices. rotary: default share of a head that RoPE rotates."""
    check_quantization(fields)
    ffn = sigmoid_moe(fields, default_dense=1)
    return read_decoder(
        without_partial_rotary(fields, default=rotary)[0],
        family=FAMILY.name,
        attention=_attention(fields, rotary),
        ffn=lambda i: ffn(numbers[i]),
        windows=(None,) * len(numbers),
        default_eps=1e-5,
        default_max_position=131072,
    )


def _attention(fields: Fields, rotary: float) -> AttentionSpec:
    plain, factor = without_partial_rotary(fields, default=rotary)
    spec = read_attention(
        plain,
        qk_norm=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False),
    )
    turned = int(spec.head_dim * factor)
    return replace(spec, rotary_dim=None if turned == spec.head_dim else turned)


def read_mtp(fields: Fields, target: ModelSpec) -> HeadSpec:
    number = target.num_layers
    layer = _layers(fields, range(number, number + 1), rotary=0.5)
    return recurrent(fields, layer, target)


def read_alone(fields: Fields, target: ModelSpec) -> HeadSpec:
    numbers = range(BEYOND, BEYOND + 1)
    if fields.get("kv_lora_rank") is None:
        return recurrent(fields, _layers(fields, numbers, rotary=1.0), target)
    ffn = sigmoid_moe(fields, default_dense=1)
    layer = read_latent_decoder(fields, numbers, family=FAMILY.name, ffn=ffn)
    return recurrent(fields, layer, target)


def to_json(spec: ModelSpec) -> dict[str, Any]:
    attention = spec.layers[0].softmax_attention
    written = decoder_json(spec, architecture="Glm4MoeForCausalLM", model_type="glm4_moe")
    return (
        written
        | moe_json(spec)
        | {
            "attention_bias": attention.qkv_bias,
            "use_qk_norm": attention.qk_norm,
            "partial_rotary_factor": (
                1.0
                if attention.rotary_dim is None
                else (attention.rotary_dim + 0.5) / attention.head_dim
            ),
        }
    )


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    read=read,
    to_json=to_json,
    mtp=MtpFamily(
        read=read_mtp, names=lambda spec: replace(NAMES, first=spec.num_layers), known=KNOWN
    ),
)
ALONE = MtpFamily(read=read_alone, names=lambda _: NAMES, known=KNOWN)
