"""MiniMax M2 (MiniMaxM2ForCausalLM): norms that span heads, RoPE on a part of each head, MoE.

All layers are MoE (sigmoid scores, router bias, no shared expert), with float32 routers and
Mixtral's names of experts. A checkpoint with layers for multi-token prediction is refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.decoder_params import decoder_params
from jspec.models.family import (
    Family,
    decoder_json,
    read_attention,
    read_decoder,
    without_partial_rotary,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.models.layer_params import expert_params
from jspec.models.params import FLOAT32, ParamSpec, ParamTable
from jspec.spec.layers.feed_forward import FeedForward, MoESpec, Routing
from jspec.spec.model_spec import ModelSpec

HEAD_DIM, THETA = 128, 5e6  # transformers' defaults
# Published values of keys whose other values would change the computation.
FIXED: dict[str, tuple[Any, ...]] = {
    "attn_window_size": (),
    "layernorm_full_attention_beta": (1.0,),
    "layernorm_mlp_beta": (1.0,),
    "num_expert_group": (1,),
    "qk_norm_type": ("per_layer",),
    "routed_scaling_factor": (1.0,),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "sliding_window": (),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}
STORED = (  # Qwen3-MoE's names, published names
    ("mlp.gate.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"),
    ("mlp.", "block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)


def read(fields: Fields) -> ModelSpec:
    check_quantization(fields)
    for name, allowed in FIXED.items():
        fields.refuse(name, allowed=allowed, why="this family is served as it is published")
    count, kinds = fields.integer("num_hidden_layers"), fields.get("attn_type_list")
    if kinds is not None and kinds != [1] * count:
        raise ConfigError(
            f"{fields.path}: attn_type_list is {shown(kinds)}; expected {count} ones: all layers "
            "have softmax attention"
        )
    moe = MoESpec(
        num_experts=fields.integer("num_local_experts", 256),
        top_k=fields.integer("num_experts_per_tok", 8),
        inner=fields.integer("intermediate_size", 1536),
        routing=Routing.SIGMOID_THEN_TOP_NORMALIZED,
    )
    head_dim = fields.integer("head_dim", HEAD_DIM)
    rotary = fields.integer("rotary_dim", head_dim)
    plain, factor = without_partial_rotary(_with_theta(fields), default=rotary / head_dim)
    turned = int(head_dim * factor)
    if fields.get("rotary_dim") is not None and turned != rotary:
        raise CheckpointError(
            f"{fields.path}: rotary_dim is {rotary}; expected {turned}, partial_rotary_factor "
            f"{factor} of head_dim {head_dim}"
        )
    attention = replace(
        read_attention(plain, qk_norm=True, default_head_dim=HEAD_DIM),
        norms_span_heads=True,
        rotary_dim=None if turned == head_dim else turned,
    )
    return read_decoder(
        plain,
        family=FAMILY.name,
        attention=attention,
        ffn=lambda _: moe,
        windows=(None,) * count,
        default_max_position=196608,
    )


def _with_theta(fields: Fields) -> Fields:
    theta = fields.number("rope_theta", THETA)
    return Fields(fields.path, {**fields.values, "rope_theta": theta})


def _ffn_params(spec: FeedForward, *, size: int) -> ParamTable:
    assert isinstance(spec, MoESpec)
    return tuple(_published(own) for own in expert_params(spec, size=size))


def _published(own: ParamSpec) -> ParamSpec:
    def name_of(name: str) -> str:
        for theirs, stored in STORED:
            name = name.replace(theirs, stored)
        return name

    layout = tuple(replace(part, name=name_of(part.name)) for part in own.layouts[0])
    is_router = "router" in own.path
    return replace(own, layouts=(layout,), format=FLOAT32 if is_router else own.format)


def to_json(spec: ModelSpec) -> dict[str, Any]:
    layer = spec.one_layer
    attention, moe = layer.softmax_attention, layer.ffn
    assert isinstance(moe, MoESpec)
    return decoder_json(spec, architecture="MiniMaxM2ForCausalLM", model_type="minimax_m2") | {
        "rotary_dim": attention.rotary_dim or attention.head_dim,
        "intermediate_size": moe.inner,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        # not read here, but other engines' classes need them
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
    }


FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    read=read,
    to_json=to_json,
    table=partial(decoder_params, ffn=_ffn_params),
)
