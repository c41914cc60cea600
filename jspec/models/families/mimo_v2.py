"""MiMo-V2-Flash (MiMoV2FlashForCausalLM): sliding windows with sinks, narrow values, MoE.

Sliding layers have a window, sinks, and their own RoPE theta and number of kv heads. Values are
scaled, and RoPE rotates a part of each head. The first layer's MLP is dense, the others are MoE
(sigmoid scores, router bias). Three layers for multi-token prediction, sliding and dense, read the
target's hidden before its final norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jspec.errors import CheckpointError, shown
from jspec.files.json_files import Fields
from jspec.models.decoder_params import decoder_params
from jspec.models.family import (
    CHAINS_NORMED,
    FULL,
    OF_MTP_LAYERS,
    SLIDING,
    Family,
    MtpFamily,
    decoder_json,
    read_attention,
    read_decoder,
    read_dense,
    read_windows,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.models.heads.head_params import HeadNames
from jspec.models.params import ParamTable
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward, MoESpec, Routing
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.rope_io import TABLES

SINKS = ("attention_sink_bias", "sinks")  # published, transformers 5
NAMES = HeadNames(prefix="model.mtp.layers.{}.", post_norm="pre_mlp_layernorm", sinks=SINKS)
KNOWN = OF_MTP_LAYERS | {
    *("add_full_attention_sink_bias", "add_swa_attention_sink_bias", "attention_value_scale"),
    "layernorm_epsilon",
    CHAINS_NORMED,  # no effect: these layers are not chained
}
DENSE, SPARSE = "dense", "sparse"
ROTARY, VALUE_SCALE = 0.334, 0.707
THETAS = {FULL: 5e6, SLIDING: 1e4}
NUM_MTP_LAYERS = 3


def read(fields: Fields) -> ModelSpec:
    check_quantization(fields)
    _refuse_others(fields)
    kinds, ffns = _kinds(fields), _feed_forward(fields)
    attention = {kind: _attention(fields, kind) for kind in (FULL, SLIDING)}
    plain = _without_rope(fields, theta=THETAS[FULL])
    windows = read_windows(
        Fields(plain.path, {**plain.values, "layer_types": list(kinds)}),
        window=_window(fields),
        default=lambda _: FULL,
    )
    spec = read_decoder(
        plain,
        family=FAMILY.name,
        attention=attention[FULL],
        ffn=lambda i: ffns[i],
        windows=windows,
        default_eps=_eps(fields, 1e-5),
        default_max_position=131072,
    )
    layers = (
        replace(layer, attention=replace(attention[kind], window=layer.attention.window))
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _refuse_others(fields: Fields) -> None:
    for name, value in (("n_group", 1), ("topk_group", 1)):
        fields.refuse(name, allowed=(value,), why="groups of experts are not served")
    fields.refuse("n_shared_experts", allowed=(0,), why="shared experts are not served")
    fields.refuse("scoring_func", allowed=("sigmoid",), why="this family's router has sigmoids")
    fields.refuse("topk_method", allowed=("noaux_tc",), why="this family's router has a bias")
    for name in ("head_dim", "v_head_dim", "num_attention_heads"):
        same = fields.get(name)
        fields.refuse(f"swa_{name}", allowed=(same,), why=f"sliding layers have {name} here, too")


def _kinds(fields: Fields) -> tuple[str, ...]:
    count = fields.integer("num_hidden_layers")
    pattern = _switches(fields, "hybrid_layer_pattern")
    given = fields.strings("layer_types") or tuple(SLIDING if i else FULL for i in pattern)
    rule = (FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(count))
    return given or tuple(rule)


def _feed_forward(fields: Fields) -> tuple[FeedForward, ...]:
    count = fields.integer("num_hidden_layers")
    frequency = _switches(fields, "moe_layer_freq")
    given = fields.strings("mlp_layer_types") or tuple(SPARSE if i else DENSE for i in frequency)
    kinds = given or (DENSE, *[SPARSE] * (count - 1))
    if len(kinds) != count or set(kinds) - {DENSE, SPARSE}:
        raise CheckpointError(
            f"{fields.path}: the layers' MLPs are {shown(list(kinds))}; expected {count} of "
            f"{DENSE!r} or {SPARSE!r}"
        )
    normalized = fields.flag("norm_topk_prob", True)
    moe = MoESpec(
        num_experts=fields.integer("n_routed_experts", 256),
        top_k=fields.integer("num_experts_per_tok", 8),
        inner=fields.integer("moe_intermediate_size", 2048),
        routing=(Routing.SIGMOID_THEN_TOP_NORMALIZED if normalized else Routing.SIGMOID_THEN_TOP),
        weight_scale=fields.number("routed_scaling_factor", 1.0),
    )
    dense = read_dense(fields)
    return tuple(moe if kind == SPARSE else dense for kind in kinds)


def _switches(fields: Fields, name: str) -> tuple[int, ...]:
    value = [] if fields.get(name) is None else fields.get(name)
    if not isinstance(value, list) or not all(item in (0, 1) for item in value):
        raise CheckpointError(f"{fields.path}: {name} is {shown(value)}; expected zeros and ones")
    return tuple(value)


def _window(fields: Fields) -> int:
    """Return the window. The published size excludes the query, transformers' includes it."""
    if fields.get("sliding_window_size") is not None:
        return fields.integer("sliding_window_size") + 1
    return fields.integer("sliding_window", 129)


def _attention(fields: Fields, kind: str) -> AttentionSpec:
    own = fields.table("rope_parameters").table(kind)
    name = "rope_theta" if kind == FULL else "swa_rope_theta"
    theta = own.number("rope_theta", fields.number(name, THETAS[kind]))
    own.refuse("rope_type", allowed=("default",), why="no scaling of RoPE is served here")
    factor = own.number("partial_rotary_factor", fields.number("partial_rotary_factor", ROTARY))
    plain = _without_rope(fields, theta=theta)
    is_sliding = kind == SLIDING
    default_sinks = fields.flag(
        "add_swa_attention_sink_bias" if is_sliding else "add_full_attention_sink_bias", is_sliding
    )
    spec = read_attention(
        plain,
        qkv_bias=fields.flag("attention_bias", False),
        sinks=default_sinks,
        default_head_dim=192,
    )
    num_kv_heads = spec.num_kv_heads
    if is_sliding:
        num_kv_heads = fields.integer("swa_num_key_value_heads", 2 * num_kv_heads)
    scale = fields.values.get("attention_value_scale", VALUE_SCALE)
    return replace(
        spec,
        num_kv_heads=num_kv_heads,
        v_dim=fields.integer("v_head_dim", 128),
        value_scale=1.0 if scale is None else fields.number("attention_value_scale", VALUE_SCALE),
        rotary_dim=int(spec.head_dim * factor),
    )


def _without_rope(fields: Fields, *, theta: float) -> Fields:
    values = {k: v for k, v in fields.values.items() if k not in (*TABLES, "partial_rotary_factor")}
    return Fields(fields.path, values | {"rope_theta": theta})


def _eps(fields: Fields, default: float) -> float:
    """Return eps under transformers' or the published name; if both are present they must agree."""
    eps = fields.number("rms_norm_eps", fields.number("layernorm_epsilon", default))
    if fields.number("layernorm_epsilon", eps) != eps:
        raise CheckpointError(
            f"{fields.path}: layernorm_epsilon is {fields.get('layernorm_epsilon')}; expected "
            f"rms_norm_eps, which is {eps}"
        )
    return eps


def read_mtp(fields: Fields, target: ModelSpec) -> HeadSpec:
    eps = _eps(fields, target.rms_norm_eps)
    count = fields.integer("num_nextn_predict_layers", NUM_MTP_LAYERS)
    layer = LayerSpec(
        attention=replace(_attention(fields, SLIDING), window=_window(fields)),
        ffn=read_dense(fields),
        eps=eps,
    )
    return mtp_spec(
        layer=replace(target, layers=(layer,) * count, rms_norm_eps=eps),
        target_num_layers=target.num_layers,
        reads_normed=False,
    )


def table(spec: ModelSpec) -> ParamTable:
    return decoder_params(spec, sinks=SINKS)


def to_json(spec: ModelSpec) -> dict[str, Any]:
    kinds = [FULL if layer.attention.window is None else SLIDING for layer in spec.layers]
    of_kind = {
        kind: spec.layers[i].softmax_attention for i, kind in reversed(list(enumerate(kinds)))
    }
    full = of_kind.get(FULL, spec.layers[0].softmax_attention)
    sliding = of_kind.get(SLIDING, full)
    dense = next((x.ffn for x in spec.layers if isinstance(x.ffn, DenseSpec)), None)
    moe = next((x.ffn for x in spec.layers if isinstance(x.ffn, MoESpec)), None)
    written = decoder_json(
        spec, architecture="MiMoV2FlashForCausalLM", model_type="mimo_v2_flash"
    ) | {
        "intermediate_size": dense.inner if dense else 16384,
        "num_key_value_heads": full.num_kv_heads,
        "swa_num_key_value_heads": sliding.num_kv_heads,
        "v_head_dim": full.value_dim,
        "attention_value_scale": full.value_scale,
        "attention_bias": full.qkv_bias,
        "add_swa_attention_sink_bias": sliding.sinks,
        "add_full_attention_sink_bias": full.sinks,
        "rope_theta": full.rope.theta,
        "swa_rope_theta": sliding.rope.theta,
        "swa_num_attention_heads": sliding.num_heads,
        "swa_head_dim": sliding.head_dim,
        "swa_v_head_dim": sliding.value_dim,
        "layernorm_epsilon": spec.rms_norm_eps,
        "partial_rotary_factor": _rotary_factor(full),
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in kinds],
        "moe_layer_freq": [int(isinstance(x.ffn, MoESpec)) for x in spec.layers],
    }
    if sliding.window is not None:
        written["sliding_window_size"] = sliding.window - 1
    if moe is not None:
        written |= {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.inner,
            "norm_topk_prob": moe.routing is Routing.SIGMOID_THEN_TOP_NORMALIZED,
            "routed_scaling_factor": moe.weight_scale,
        }
    return written


def _rotary_factor(attention: AttentionSpec) -> float:
    """Return the rotated share plus half a dimension, which readers truncate; at most 1 (vLLM)."""
    rotated = attention.rotary_dim or attention.head_dim
    return min((rotated + 0.5) / attention.head_dim, 1.0)


FAMILY = Family(
    name="mimo_v2",
    architectures=("MiMoV2FlashForCausalLM",),
    read=read,
    to_json=to_json,
    table=table,
    mtp=MtpFamily(read=read_mtp, names=lambda _: NAMES, known=KNOWN),
)
