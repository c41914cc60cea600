"""gpt-oss: 20b, 120b (transformers' GptOssForCausalLM).

Attention has sinks, and a sliding window on every other layer from the first. There are biases
everywhere except in norms and lm_head. Every layer is an MoE of clamped gated MLPs with a softmax
over the selected experts, published as mxfp4, or unpacked with alternating gate and up columns.
"""

from __future__ import annotations

from typing import Any

from jspec.errors import ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.decoder_params import decoder_params
from jspec.models.family import (
    FULL,
    SLIDING,
    Family,
    decoder_json,
    read_attention,
    read_decoder,
    read_windows,
)
from jspec.models.layer_params import product
from jspec.models.params import Form, Init, ParamSpec, ParamTable, Part, of_experts, prefixed
from jspec.spec.layers.feed_forward import FeedForward, Gate, MoESpec, Routing
from jspec.spec.model_spec import ModelSpec
from jspec.spec.rope_io import TABLES
from jspec.spec.weight_format import MXFP4, Op

# The values of absent keys.
DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "rope_theta": 150000.0,
}
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ALPHA, LIMIT = 1.702, 7.0  # constants of Gate.CLAMPED


def read(fields: Fields) -> ModelSpec:
    fields = _with_defaults(fields)
    _refuse_other_quantization(fields)
    for name, value in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        fields.refuse(name, allowed=(value,), why="the experts' gate has this one here")
    bias = fields.flag("attention_bias", True)
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    moe = MoESpec(
        num_experts=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("intermediate_size"),
        routing=Routing.TOP_THEN_SOFTMAX,
        gate=Gate.CLAMPED,
        bias=True,
    )
    return read_decoder(
        fields,
        family=FAMILY.name,
        attention=read_attention(fields, qkv_bias=bias, out_bias=bias, sinks=True),
        ffn=lambda _: moe,
        windows=read_windows(fields, window=window, default=lambda i: FULL if i % 2 else SLIDING),
        default_eps=1e-5,
        default_max_position=131072,
    )


def _with_defaults(fields: Fields) -> Fields:
    """Return the fields over DEFAULTS. A null window is kept, since it means full attention."""
    kept = {
        name: value
        for name, value in fields.values.items()
        if value is not None or name == "sliding_window"
    }
    if not any(kept.get(name) for name in TABLES):
        kept["rope_parameters"] = DEFAULT_ROPE
    return Fields(fields.path, DEFAULTS | kept)


def _refuse_other_quantization(fields: Fields) -> None:
    table = fields.table("quantization_config")
    method = table.get("quant_method")
    if table.values and method != "mxfp4":
        raise ConfigError(
            f"{fields.path}: quantization_config has quant_method {shown(method)}; expected "
            "'mxfp4', or no such key: these quantized weights are not served"
        )


def table(spec: ModelSpec) -> ParamTable:
    return decoder_params(spec, ffn=expert_params)


def expert_params(spec: FeedForward, *, size: int) -> ParamTable:
    assert isinstance(spec, MoESpec)
    X, inner = spec.num_experts, spec.inner
    gate_up, down = "experts.gate_up_proj", "experts.down_proj"
    packs = MXFP4() if size % MXFP4.group == inner % MXFP4.group == 0 else None
    declared = (
        *product(("router",), size, (("router", X, 1),), bias=True, op=None),
        ParamSpec(
            path=("experts", "gate_up"),
            shape=(X, size, 2 * inner),
            layouts=(
                _halves(gate_up, (X, size, 2 * inner)),
                *((_halves(gate_up, (X, 2 * inner, size), packs),) if packs else ()),
            ),
            axes=("experts", "embed", "expert_mlp"),
            op=Op.EXPERTS,
        ),
        ParamSpec(
            path=("experts", "gate_up_bias"),
            shape=(X, 2 * inner),
            layouts=(_halves("experts.gate_up_proj_bias", (X, 2 * inner)),),
            axes=("experts", "expert_mlp"),
            init=Init.ZEROS,
        ),
        ParamSpec(
            path=("experts", "down"),
            shape=(X, inner, size),
            layouts=(
                (_whole(down, (X, inner, size)),),
                *(((_whole(down, (X, size, inner), packs),),) if packs else ()),
            ),
            axes=("experts", "expert_mlp", "embed"),
            op=Op.EXPERTS,
        ),
        ParamSpec(
            path=("experts", "down_bias"),
            shape=(X, size),
            layouts=((_whole("experts.down_proj_bias", (X, size)),),),
            axes=(None, "embed"),  # added after the sum over all shards
            init=Init.ZEROS,
        ),
    )
    return prefixed(of_experts(declared, spec), path=("moe",), stored="mlp.")


def _halves(name: str, shape: tuple[int, ...], format: MXFP4 | None = None) -> tuple[Part, ...]:
    """Return gate and up: even and odd entries of the output axis (the last one, if unpacked)."""
    inner = shape[-2 if format else -1] // 2
    return tuple(
        Part(
            name=name,
            shape=shape,
            size=inner,
            num_blocks=inner,
            first=first,
            step=2,
            form=Form.OUT_IN if format else Form.AS_IS,
            format=format,
        )
        for first in (0, 1)
    )


def _whole(name: str, shape: tuple[int, ...], format: MXFP4 | None = None) -> Part:
    form = Form.OUT_IN if format else Form.AS_IS
    return Part(name=name, shape=shape, size=shape[-2 if format else -1], form=form, format=format)


def to_json(spec: ModelSpec) -> dict[str, Any]:
    layer = spec.layers[0]
    assert isinstance(layer.ffn, MoESpec)
    windows = [layer.attention.window for layer in spec.layers]
    return decoder_json(spec, architecture="GptOssForCausalLM", model_type="gpt_oss") | {
        "attention_bias": layer.softmax_attention.qkv_bias,
        "intermediate_size": layer.ffn.inner,
        "num_local_experts": layer.ffn.num_experts,
        "num_experts_per_tok": layer.ffn.top_k,
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "swiglu_alpha": ALPHA,
        "swiglu_limit": LIMIT,
    }


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    read=read,
    to_json=to_json,
    table=table,
)
