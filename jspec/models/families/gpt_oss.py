"""gpt-oss: 20b, 120b (transformers' GptOssForCausalLM).

Attention with sinks and with a sliding window on every other layer, starting with the first; biases
everywhere except in norms and lm_head; every layer is an MoE of clamped gated MLPs with a softmax
over the selected experts. Published checkpoints store the experts as mxfp4, which stays packed if
the kernels can read it and is otherwise unpacked while loading. transformers writes them unpacked,
with gate and up in alternate columns. Both are read, the second is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jspec.errors import ConfigError
from jspec.files.json_files import Fields, shown
from jspec.models.family import (
    FULL,
    SLIDING,
    Family,
    decoder_json,
    read_attention,
    read_decoder,
    read_windows,
)
from jspec.models.files.mxfp4 import BLOCK
from jspec.models.layer_params import decoder_params, product
from jspec.models.params import Codec, Form, Init, ParamSpec, ParamTable, Part, Split, prefixed
from jspec.pallas_kernels.experts.packed import CODES, PARTS, SCALES, num_groups
from jspec.spec.model_spec import FeedForward, Gate, LayerSpec, ModelSpec, MoESpec, Routing
from jspec.spec.rope_io import TABLES

# Values of absent keys.
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
    """Return the fields over DEFAULTS. A null window is kept: it means full attention."""
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
    """Declare a layer's `moe`, under gpt-oss's names after `mlp.`. size: E."""
    assert isinstance(spec, MoESpec)
    X, inner = spec.num_experts, spec.inner
    declared = (
        *product(("router",), size, (("router", X, 1),), bias=True),
        *_gate_up(spec, size=size),
        ParamSpec(
            path=("experts", "gate_up_bias"),
            shape=(X, 2 * inner),
            layouts=(_halves("experts.gate_up_proj_bias", (X, 2 * inner)),),
            split=Split.OUT,
            init=Init.ZEROS,
        ),
        *_down(spec, size=size),
        ParamSpec(
            path=("experts", "down_bias"),
            shape=(X, size),
            layouts=((_whole("experts.down_proj_bias", (X, size)),),),
            init=Init.ZEROS,
        ),
    )
    return prefixed(declared, path=("moe",), stored="mlp.")


def _gate_up(spec: MoESpec, *, size: int) -> ParamTable:
    X, columns, name = spec.num_experts, 2 * spec.inner, "experts.gate_up_proj"
    stored = (X, columns, size)
    if spec.is_packed:
        return _packed("gate_up", (X, size, columns), lambda codec: _halves(name, stored, codec))
    layouts = _layouts(_halves(name, (X, size, columns)), packed=_halves(name, stored, Codec.MXFP4))
    path, shape = ("experts", "gate_up"), (X, size, columns)
    return (ParamSpec(path=path, shape=shape, layouts=layouts, split=Split.OUT),)


def _down(spec: MoESpec, *, size: int) -> ParamTable:
    X, inner, name = spec.num_experts, spec.inner, "experts.down_proj"
    stored = (X, size, inner)
    if spec.is_packed:
        return _packed("down", (X, inner, size), lambda codec: (_whole(name, stored, codec),))
    layouts = _layouts(
        (_whole(name, (X, inner, size)),), packed=(_whole(name, stored, Codec.MXFP4),)
    )
    path, shape = ("experts", "down"), (X, inner, size)
    return (ParamSpec(path=path, shape=shape, layouts=layouts, split=Split.IN),)


def _packed(
    name: str, shape: tuple[int, int, int], parts: Callable[[Codec], tuple[Part, ...]]
) -> ParamTable:
    """Declare codes and scales of a product [X, K, N] that stays packed, unsharded."""
    X, length, columns = shape
    groups = num_groups(length)
    return (
        ParamSpec(
            path=("experts", name, CODES),
            shape=(X, groups * BLOCK, columns),
            layouts=(parts(Codec.MXFP4_CODES),),
            init=Init.BITS,
            num_bits=16,
        ),
        ParamSpec(
            path=("experts", name, SCALES),
            shape=(X, groups * PARTS, columns),
            layouts=(parts(Codec.MXFP4_SCALES),),
            init=Init.SCALES,
            num_bits=8,
        ),
    )


def stays_packed(fields: Fields, spec: ModelSpec) -> ModelSpec | None:
    """Return the spec with packed experts; None if the checkpoint does not pack them."""
    packed = fields.table("quantization_config").get("quant_method") == "mxfp4"
    layers = [_with_packed(layer, size=spec.hidden_size) for layer in spec.layers]
    if not packed or None in layers:
        return None
    return replace(spec, layers=tuple(layer for layer in layers if layer is not None))


def _with_packed(layer: LayerSpec, *, size: int) -> LayerSpec | None:
    assert isinstance(layer.ffn, MoESpec)
    if size % BLOCK or layer.ffn.inner % BLOCK:
        return None
    return replace(layer, ffn=replace(layer.ffn, is_packed=True))


def _halves(name: str, shape: tuple[int, ...], codec: Codec | None = None) -> tuple[Part, ...]:
    """Return gate and up: even and odd entries of the output axis (the last, if unpacked)."""
    inner = shape[-2 if codec else -1] // 2
    return tuple(
        Part(
            name=name,
            shape=shape,
            size=inner,
            units=inner,
            first=first,
            step=2,
            form=Form.OUT_IN if codec else Form.AS_HELD,
            codec=codec,
        )
        for first in (0, 1)
    )


def _whole(name: str, shape: tuple[int, ...], codec: Codec | None = None) -> Part:
    form = Form.OUT_IN if codec else Form.AS_HELD
    return Part(name=name, shape=shape, size=shape[-2 if codec else -1], form=form, codec=codec)


def _layouts(held: tuple[Part, ...], *, packed: tuple[Part, ...]) -> tuple[tuple[Part, ...], ...]:
    """Return the unpacked layout, and the packed one if it has whole blocks."""
    return (held,) if packed[0].shape[-1] % BLOCK else (held, packed)


def to_json(spec: ModelSpec) -> dict[str, Any]:
    layer = spec.layers[0]
    assert isinstance(layer.ffn, MoESpec)
    windows = [layer.attention.window for layer in spec.layers]
    packed = {"quantization_config": {"quant_method": "mxfp4"}} if layer.is_moe_packed else {}
    return decoder_json(spec, architecture="GptOssForCausalLM", model_type="gpt_oss") | {
        "attention_bias": layer.attention.qkv_bias,
        "intermediate_size": layer.ffn.inner,
        "num_local_experts": layer.ffn.num_experts,
        "num_experts_per_tok": layer.ffn.top_k,
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "swiglu_alpha": ALPHA,
        "swiglu_limit": LIMIT,
        **packed,
    }


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    read=read,
    to_json=to_json,
    table=table,
    stays_packed=stays_packed,
)
