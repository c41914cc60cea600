"""Qwen3-Next (Qwen3NextForCausalLM): gated delta nets, and full attention in every fourth layer.

Full attention has a gate for each dimension of a head, norms of q and k, and RoPE on a part of each
head. The feed-forward is an MoE with a gated shared expert, or dense. All norms are stored minus
one, except those of the delta nets' heads. A delta net's projections are fused per key head.

One layer for multi-token prediction, with full attention, is in the same checkpoint or a separate
one. It reads the target's hidden after the final norm; every draft level runs it
(family.feeds_normed).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.decoder_params import decoder_params, delta_params
from jspec.models.families.qwen3_moe import feed_forward
from jspec.models.family import (
    FULL,
    OF_RECURRENT_LAYERS,
    Family,
    MtpFamily,
    bos_id,
    decoder_json,
    eos_ids,
    feeds_normed,
    masks_first,
    read_attention,
    read_dense,
    text_fields,
    without_partial_rotary,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.models.heads.head_params import HeadNames
from jspec.models.layer_params import zero_centred
from jspec.models.params import ParamTable, Part
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.layers.attention import AttentionSpec, HeadGate
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward, MoESpec, Routing
from jspec.spec.model_spec import LayerSpec, Mixer, ModelSpec

NAMES = HeadNames(
    prefix="mtp.layers.{}.",
    around="mtp.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    fuse="fc",
    norm=("norm",),
    zero_centred=True,
)
LINEAR = "linear_attention"
ROTARY = 0.25
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "only SwiGLU MLPs are served"),
    "attn_output_gate": ((True,), "full attention has a gate here"),
    "output_gate_type": (("swish", "silu"), "delta nets are gated by SiLU, attention by a sigmoid"),
    "mamba_ssm_dtype": (("float32",), "recurrent states are float32"),
    "use_sliding_window": ((False,), "no layer has a window"),
}


def read(fields: Fields) -> ModelSpec:
    return read_hybrid(fields, family=FAMILY.name)


def read_hybrid(fields: Fields, *, family: str) -> ModelSpec:
    own = text_fields(fields)
    check_quantization(own)
    _refuse_others(own)
    mixers: dict[str, Mixer] = {FULL: _attention(own), LINEAR: _delta_net(own)}
    ffn, eps = _feed_forward(own), own.number("rms_norm_eps", 1e-6)
    return ModelSpec(
        vocab_size=own.integer("vocab_size"),
        hidden_size=own.integer("hidden_size"),
        layers=tuple(
            LayerSpec(attention=mixers[kind], ffn=ffn[i], eps=eps)
            for i, kind in enumerate(_kinds(own))
        ),
        rms_norm_eps=eps,
        tie_word_embeddings=own.flag("tie_word_embeddings", False),
        max_position=own.integer("max_position_embeddings", 32768),
        eos_token_ids=eos_ids(own),
        bos_token_id=bos_id(own),
        family=family,
    )


def _refuse_others(fields: Fields) -> None:
    for name, (allowed, why) in FIXED.items():
        fields.refuse(name, allowed=allowed, why=why)


def _kinds(fields: Fields) -> tuple[str, ...]:
    count = fields.integer("num_hidden_layers")
    interval = fields.integer("full_attention_interval", 4)
    rule = tuple(LINEAR if (i + 1) % interval else FULL for i in range(count))
    kinds = _given_kinds(fields) or rule
    if len(kinds) != count:
        raise CheckpointError(
            f"{fields.path}: layer_types has {len(kinds)} entries; expected num_hidden_layers "
            f"{count}"
        )
    if FULL not in kinds:
        raise ConfigError(
            f"{fields.path}: none of the {count} layers is {FULL!r}; expected at least one"
        )
    return kinds


def _given_kinds(fields: Fields) -> tuple[str, ...]:
    kinds = fields.strings("layer_types")
    if unknown := sorted(set(kinds) - {FULL, LINEAR}):
        raise ConfigError(
            f"{fields.path}: layer_types has {shown(unknown)}; expected {FULL!r} or {LINEAR!r}"
        )
    return kinds


def _attention(fields: Fields) -> AttentionSpec:
    plain, factor = without_partial_rotary(fields, default=ROTARY)
    bias = fields.flag("attention_bias", False)
    spec = read_attention(plain, qk_norm=True, qkv_bias=bias, out_bias=bias, default_head_dim=256)
    turned = int(spec.head_dim * factor)
    rotary_dim = None if turned == spec.head_dim else turned
    return replace(spec, gate=HeadGate.OF_NUMBERS, rotary_dim=rotary_dim)


def _delta_net(fields: Fields) -> DeltaNetSpec:
    return DeltaNetSpec(
        num_heads=fields.integer("linear_num_value_heads", 32),
        num_key_heads=fields.integer("linear_num_key_heads", 16),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_size=fields.integer("linear_conv_kernel_dim", 4),
    )


def _feed_forward(fields: Fields) -> tuple[FeedForward, ...]:
    numbers = range(fields.integer("num_hidden_layers"))
    moe = _experts(fields)
    if moe is None:
        return (read_dense(fields),) * len(numbers)
    return tuple(map(feed_forward(fields, moe), numbers))


def _experts(fields: Fields) -> MoESpec | None:
    if not fields.get("num_experts"):
        return None
    normalized = fields.flag("norm_topk_prob", True)
    return MoESpec(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        inner=fields.integer("moe_intermediate_size", 512),
        routing=Routing.SOFTMAX_THEN_TOP_NORMALIZED if normalized else Routing.SOFTMAX_THEN_TOP,
        shared=DenseSpec(inner=fields.integer("shared_expert_intermediate_size", 512)),
        shared_gate=True,
    )


def read_mtp(fields: Fields, target: ModelSpec) -> HeadSpec:
    own = text_fields(fields)
    check_quantization(own)
    _refuse_others(own)
    name = "mtp_num_hidden_layers"
    if own.integer(name, 1) != 1:
        raise ConfigError(f"{own.path}: {name} is {own.get(name)}; expected 1, run at every level")
    own.refuse(
        "mtp_use_dedicated_embeddings", allowed=(False,), why="the target's embedding is used"
    )
    _given_kinds(own)  # the target's
    eps = own.number("rms_norm_eps", 1e-6)
    layer = LayerSpec(attention=_attention(own), ffn=_experts(own) or read_dense(own), eps=eps)
    model = ModelSpec(
        vocab_size=own.integer("vocab_size"),
        hidden_size=own.integer("hidden_size"),
        layers=(layer,),
        rms_norm_eps=eps,
        max_position=own.integer("max_position_embeddings", 32768),
        family=target.family,
    )
    return mtp_spec(
        layer=model,
        target_num_layers=target.num_layers,
        recurrent=True,
        feeds_back_normed=feeds_normed(own),
        zeroes_first=masks_first(own, False),
    )


def table(spec: ModelSpec) -> ParamTable:
    return less_one(decoder_params(spec, delta=_fused_params))


def less_one(table: ParamTable) -> ParamTable:
    """Declare all norms as stored minus one, except those of the delta nets' heads."""
    of_heads = ("attention", "norm", "scale")
    return tuple(
        plain if plain.path[-3:] == of_heads else centred
        for plain, centred in zip(table, zero_centred(table), strict=True)
    )


def _fused_params(spec: DeltaNetSpec, *, size: int) -> ParamTable:
    """Declare a delta net stored as, per key head, its q, k, v and z, and its b and a."""
    heads = spec.num_heads // spec.num_key_heads
    values = heads * spec.value_dim

    def parts(name: str, *widths: int) -> list[Part]:
        stride, count = sum(widths), spec.num_key_heads
        return [
            Part(
                name=f"linear_attn.{name}.weight",
                shape=(count * stride, size),
                size=count * width,
                num_blocks=count,
                first=last - width,
                stride=stride,
            )
            for width, last in zip(widths, accumulate(widths), strict=True)
        ]

    *qkv, z = parts("in_proj_qkvz", spec.key_dim, spec.key_dim, values, values)
    stored = {"qkv": tuple(qkv), "gate": (z,), "steps": tuple(parts("in_proj_ba", heads, heads))}
    return tuple(
        replace(own, layouts=(stored[str(own.path[1])],)) if own.path[1] in stored else own
        for own in delta_params(spec, size=size)
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    return hybrid_json(spec, architecture="Qwen3NextForCausalLM", model_type="qwen3_next")


def hybrid_json(spec: ModelSpec, *, architecture: str, model_type: str) -> dict[str, Any]:
    full = next(x for x in spec.layers if isinstance(x.attention, AttentionSpec))
    attention = full.softmax_attention
    delta_nets = [x.attention for x in spec.layers if isinstance(x.attention, DeltaNetSpec)]
    rotated = attention.rotary_dim or attention.head_dim
    written = decoder_json(
        replace(spec, layers=(full,)), architecture=architecture, model_type=model_type
    ) | {
        "num_hidden_layers": spec.num_layers,
        "attention_bias": attention.qkv_bias,
        # Half a dimension more, which readers truncate.
        "partial_rotary_factor": min((rotated + 0.5) / attention.head_dim, 1.0),
        "layer_types": [
            LINEAR if isinstance(x.attention, DeltaNetSpec) else FULL for x in spec.layers
        ],
    }
    for own in delta_nets[:1]:
        written |= {
            "linear_num_value_heads": own.num_heads,
            "linear_num_key_heads": own.num_key_heads,
            "linear_key_head_dim": own.key_dim,
            "linear_value_head_dim": own.value_dim,
            "linear_conv_kernel_dim": own.conv_size,
        }
    return written | _feed_forward_json(spec)


def _feed_forward_json(spec: ModelSpec) -> dict[str, Any]:
    dense = [x.ffn.inner for x in spec.layers if isinstance(x.ffn, DenseSpec)]
    moe = next((x.ffn for x in spec.layers if isinstance(x.ffn, MoESpec)), None)
    written: dict[str, Any] = {"intermediate_size": dense[0]} if dense else {}
    if moe is None or moe.shared is None:
        return written | {"num_experts": 0}
    return written | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.inner,
        "shared_expert_intermediate_size": moe.shared.inner,
        "norm_topk_prob": moe.routing is Routing.SOFTMAX_THEN_TOP_NORMALIZED,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            i for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, DenseSpec)
        ],
    }


MTP = MtpFamily(
    read=read_mtp,
    names=lambda _: NAMES,
    known=OF_RECURRENT_LAYERS | {"attn_output_gate", "output_gate_type"},
)
FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    read=read,
    to_json=to_json,
    table=table,
    mtp=MTP,
)
