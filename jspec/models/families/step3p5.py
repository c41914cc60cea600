"""Step-3.5-Flash (Step3p5ForCausalLM): sliding windows, gated heads, MoE with a shared expert.

Sliding layers have more heads than full ones, another RoPE theta, and RoPE on whole heads. In full
layers RoPE rotates a part of each head and may be scaled. Heads of q and k are normed, every head's
output is gated, and all norms are stored minus one. The first layers have dense MLPs, the others
MoE (sigmoid scores, router bias) plus a shared expert; in some layers the gates are clamped.

Layers for multi-token prediction are numbered from the target's number of layers, or from 0 in a
separate checkpoint. The first reads the target's hidden before its final norm, each other one the
output of the previous one. Each has an lm_head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.decoder_params import decoder_params
from jspec.models.family import (
    FULL,
    OF_MTP_LAYERS,
    SLIDING,
    Family,
    MtpFamily,
    bos_id,
    decoder_json,
    eos_ids,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.models.heads.head_params import HeadNames
from jspec.models.layer_params import dense_params, product, zero_centred
from jspec.models.params import (
    FLOAT32,
    Form,
    Init,
    ParamSpec,
    ParamTable,
    Part,
    of_experts,
    prefixed,
)
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.layers.attention import AttentionSpec, HeadGate
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward, Gate, MoESpec, Routing
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.rope_io import read_rope, rope_json

NAMES = HeadNames(
    prefix="model.layers.{}.",
    norm=("transformer.shared_head.norm", "shared_head.norm"),
    head=(
        *("transformer.shared_head.output", "transformer.shared_head.head"),
        *("shared_head.output", "shared_head.head"),
    ),
    infix="transformer.",
    zero_centred=True,
    is_after_own=True,
)
NO_MOE = "-1"  # SGLang and vLLM parse moe_layers_enum as numbers even if it is empty
EXPERT_LIMIT = 7.0  # the limit of Gate.SILU_WITHIN_7
# Published values of keys whose other values would change the computation.
FIXED: dict[str, tuple[Any, ...]] = {
    "att_impl_type": ("GQA",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "moe_router_activation": ("sigmoid",),
    "norm_expert_weight": (True,),
    "sink": (False,),
    "sparse_config": (),
    "sparse_attention_config": (),
    "use_head_wise_attn_gate": (True,),
    "use_moe": (True,),
    "use_moe_router_bias": (True,),
    "use_qk_norm": (True,),
    "use_rope_layers": ([],),
    "zero_centered": (True,),
}


def read(fields: Fields) -> ModelSpec:
    return _layers(fields, range(fields.integer("num_hidden_layers")))


def _layers(fields: Fields, numbers: Iterable[int]) -> ModelSpec:
    check_quantization(fields)
    for name, allowed in FIXED.items():
        fields.refuse(name, allowed=allowed, why="this family is served as it is published")
    fields.refuse("hidden_act", allowed=("silu", "swish"), why="only SwiGLU MLPs are served")
    eps = fields.number("rms_norm_eps", 1e-5)
    context = "max_seq_len" if fields.get("max_seq_len") else "max_position_embeddings"
    return ModelSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=tuple(
            LayerSpec(attention=_attention(fields, i), ffn=_feed_forward(fields, i), eps=eps)
            for i in numbers
        ),
        rms_norm_eps=eps,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position=fields.integer(context),
        eos_token_ids=eos_ids(fields),
        bos_token_id=bos_id(fields),
        family=FAMILY.name,
    )


def _entry(fields: Fields, name: str, layer: int) -> Any:
    value = fields.get(name)
    if not isinstance(value, list):
        return value
    if layer >= len(value):
        raise CheckpointError(
            f"{fields.path}: {name} has {len(value)} entries; expected one for layer {layer}"
        )
    return value[layer]


def _number(fields: Fields, name: str, layer: int, default: float | None = None) -> float:
    return Fields(fields.path, {name: _entry(fields, name, layer)}).number(name, default)


def _attention(fields: Fields, layer: int) -> AttentionSpec:
    kind = _entry(fields, "layer_types", layer) or FULL
    if kind not in (FULL, SLIDING):
        raise ConfigError(
            f"{fields.path}: layer_types has {shown(kind)}; expected {FULL!r} or {SLIDING!r}"
        )
    head_dim = fields.integer("head_dim", 128)
    own = fields.table("attention_other_setting") if kind == SLIDING else fields
    own.refuse("head_dim", allowed=(head_dim,), why="sliding layers have the others' head_dim here")
    kinds = "yarn_only_types"
    if fields.get("rope_scaling") is not None and fields.get(kinds) is None:
        raise CheckpointError(
            f"{fields.path}: rope_scaling is {shown(fields.get('rope_scaling'))} without {kinds}; "
            "expected the types of layers that are scaled"
        )
    rope = {
        "rope_theta": _number(fields, "rope_theta", layer, 10000.0),
        "rope_scaling": fields.get("rope_scaling") if kind in fields.strings(kinds) else None,
        "max_position_embeddings": fields.get("max_position_embeddings"),
    }
    rotary = int(head_dim * _number(fields, "partial_rotary_factors", layer, 1.0))
    groups = fields.integer("num_attention_groups")
    return AttentionSpec(
        num_heads=own.integer("num_attention_heads", fields.integer("num_attention_heads")),
        num_kv_heads=own.integer("num_attention_groups", groups),
        head_dim=head_dim,
        rope=read_rope(Fields(fields.path, rope)),
        window=fields.integer("sliding_window") if kind == SLIDING else None,
        qk_norm=True,
        rotary_dim=None if rotary == head_dim else rotary,
        gate=HeadGate.OF_HEADS,
    )


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    limits = [
        _number(fields, name, layer) if _entry(fields, name, layer) else None
        for name in ("swiglu_limits", "swiglu_limits_shared")
    ]
    if layer not in _moe_layers(fields):
        return DenseSpec(inner=fields.integer("intermediate_size"), limit=limits[1])
    if limits[0] not in (None, EXPERT_LIMIT):
        raise ConfigError(
            f"{fields.path}: swiglu_limits has {limits[0]} for layer {layer}; expected 0 or "
            f"{EXPERT_LIMIT}"
        )
    return MoESpec(
        num_experts=fields.integer("moe_num_experts"),
        top_k=fields.integer("moe_top_k"),
        inner=fields.integer("moe_intermediate_size"),
        routing=Routing.SIGMOID_THEN_TOP_NORMALIZED,
        gate=Gate.SILU if limits[0] is None else Gate.SILU_WITHIN_7,
        weight_scale=fields.number("moe_router_scaling_factor", 1.0),
        shared=DenseSpec(inner=fields.integer("share_expert_dim"), limit=limits[1]),
    )


def _moe_layers(fields: Fields) -> frozenset[int]:
    value = fields.get("moe_layers_enum")
    items = value.split(",") if isinstance(value, str) else value
    try:
        return frozenset(int(item) for item in items if str(item).strip())
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{fields.path}: moe_layers_enum is {shown(value)}; expected numbers of layers"
        ) from error


def read_mtp(fields: Fields, target: ModelSpec) -> HeadSpec:
    first = fields.integer("num_hidden_layers", target.num_layers)
    count = fields.integer("num_nextn_predict_layers")
    model = _layers(fields, range(first, first + count))
    MoEs = [i for i, layer in enumerate(model.layers) if isinstance(layer.ffn, MoESpec)]
    if MoEs:
        raise ConfigError(
            f"{fields.path}: moe_layers_enum has {first + MoEs[0]}, a layer for multi-token "
            f"prediction; expected those to have dense MLPs"
        )
    return mtp_spec(
        layer=model,
        target_num_layers=target.num_layers,
        chained=True,
        reads_normed=False,
        own_head=True,
    )


def table(spec: ModelSpec) -> ParamTable:
    return zero_centred(decoder_params(spec, ffn=_ffn_params))


def _ffn_params(spec: FeedForward, *, size: int) -> ParamTable:
    if isinstance(spec, DenseSpec):
        return dense_params(spec, size=size)
    assert spec.shared is not None
    X, inner = spec.num_experts, spec.inner
    gate, up = (
        Part(name=f"{name}.weight", shape=(X, inner, size), size=inner, num_blocks=inner)
        for name in ("gate_proj", "up_proj")
    )
    down = Part(name="down_proj.weight", shape=(X, size, inner), size=size)
    bias = Part(name="router_bias", shape=(X,), size=X, form=Form.AS_IS)
    experts = (
        *product(("router",), size, (("gate", X, 1),), op=None),
        ParamSpec(
            path=("router", "router_bias"),
            shape=(X,),
            layouts=((bias,),),
            init=Init.ZEROS,
            format=FLOAT32,
        ),
        ParamSpec(
            path=("experts", "gate_up"),
            shape=(X, size, 2 * inner),
            layouts=((gate, up),),
            axes=("experts", "embed", "expert_mlp"),
        ),
        ParamSpec(
            path=("experts", "down"),
            shape=(X, inner, size),
            layouts=((down,),),
            axes=("experts", "expert_mlp", "embed"),
        ),
    )
    return (
        *prefixed(of_experts(experts, spec), path=("moe",), stored="moe."),
        *dense_params(spec.shared, size=size, path=("moe", "shared"), stored="share_expert."),
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    attentions = [layer.softmax_attention for layer in spec.layers]
    full = next((a for a in attentions if a.window is None), attentions[0])
    sliding = next((a for a in attentions if a.window is not None), full)
    scaled = [a for a in attentions if rope_json(a.rope)["rope_scaling"] is not None]
    moe = next((x.ffn for x in spec.layers if isinstance(x.ffn, MoESpec)), None)
    dense = next((x.ffn for x in spec.layers if isinstance(x.ffn, DenseSpec)), None)
    written = decoder_json(spec, architecture="Step3p5ForCausalLM", model_type="step3p5")
    del written["num_key_value_heads"]
    written |= {
        "num_attention_heads": full.num_heads,
        "num_attention_groups": full.num_kv_heads,
        "attention_other_setting": {
            "attention_type": SLIDING,
            "num_attention_heads": sliding.num_heads,
            "num_attention_groups": sliding.num_kv_heads,
            "head_dim": sliding.head_dim,
        },
        "layer_types": [_kind(a) for a in attentions],
        "sliding_window": sliding.window,
        "rope_theta": [a.rope.theta for a in attentions],
        "rope_scaling": rope_json((scaled or [full])[0].rope)["rope_scaling"],
        "yarn_only_types": sorted({_kind(a) for a in scaled} or {FULL}),
        "partial_rotary_factors": [
            1.0 if a.rotary_dim is None else (a.rotary_dim + 0.5) / a.head_dim for a in attentions
        ],
        "moe_layers_enum": ",".join(
            str(i) for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoESpec)
        )
        or NO_MOE,
        "swiglu_limits": [_limits(layer.ffn)[0] for layer in spec.layers],
        "swiglu_limits_shared": [_limits(layer.ffn)[1] for layer in spec.layers],
        "intermediate_size": dense.inner if dense else spec.hidden_size,
        # not read here, but required by other engines' classes
        "use_head_wise_attn_gate": True,
        "max_seq_len": spec.max_position,
    }
    if moe is not None and moe.shared is not None:
        written |= {
            "moe_num_experts": moe.num_experts,
            "moe_top_k": moe.top_k,
            "moe_intermediate_size": moe.inner,
            "moe_router_scaling_factor": moe.weight_scale,
            "share_expert_dim": moe.shared.inner,
        }
    return written


def _kind(attention: AttentionSpec) -> str:
    return FULL if attention.window is None else SLIDING


def _limits(ffn: FeedForward) -> tuple[float, float]:
    """Return (limit of the experts, limit of the MLP or shared expert); 0 is no limit."""
    if isinstance(ffn, DenseSpec):
        return 0.0, ffn.limit or 0.0
    limit = EXPERT_LIMIT if ffn.gate is Gate.SILU_WITHIN_7 else 0.0
    return limit, (ffn.shared.limit if ffn.shared else None) or 0.0


FAMILY = Family(
    name="step3p5",
    architectures=("Step3p5ForCausalLM",),
    read=read,
    to_json=to_json,
    table=table,
    mtp=MtpFamily(
        read=read_mtp,
        names=lambda spec: replace(NAMES, first=spec.num_layers),
        known=OF_MTP_LAYERS | FIXED.keys() | {"need_fp32_gate"},  # gates are float32 here
    ),
)
