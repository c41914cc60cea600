"""DeepSeek V3, V3.1 and R1, and Kimi K2 (DeepseekV3ForCausalLM): latent attention, grouped experts.

The first layers have dense MLPs, the others an MoE (sigmoid scores, router bias, the best groups of
experts) plus a shared expert. With YaRN, mscale_all_dim changes the softmax scale. One layer for
multi-token prediction reads the target's hidden after the final norm, and every draft level runs it
again on its output after its final norm (as in SGLang and transformers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jspec.files.json_files import Fields
from jspec.models.family import (
    FULL,
    OF_RECURRENT_LAYERS,
    Family,
    MtpFamily,
    check_one_mtp_layer,
    decoder_json,
    feeds_normed,
    masks_first,
    read_decoder,
    read_dense,
    refuse_windows,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.models.heads.head_params import HeadNames
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.layers.attention import IndexerSpec, LatentAttentionSpec
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward, MoESpec, Routing
from jspec.spec.model_spec import ModelSpec
from jspec.spec.rope import RopeConfig
from jspec.spec.rope_io import read_rope, yarn_mscale

NAMES = HeadNames(prefix="model.layers.{}.", norm=("shared_head.norm",))
FeedForwardOf = Callable[[int], FeedForward]  # by layer index


def _layers(fields: Fields, numbers: range) -> ModelSpec:
    return read_latent_decoder(
        fields, numbers, family=FAMILY.name, ffn=sigmoid_moe(fields, default_dense=3)
    )


def read_latent_decoder(
    fields: Fields,
    numbers: range,
    *,
    family: str,
    ffn: FeedForwardOf,
    indexer: IndexerSpec | None = None,
) -> ModelSpec:
    """Read layers with latent attention. indexer: of each; None: config.json may have none."""
    check_quantization(fields)
    fields.refuse("moe_layer_freq", allowed=(1,), why="all layers after the dense ones are MoE")
    return read_decoder(
        fields,
        family=family,
        attention=read_latent(fields, indexer),
        ffn=lambda i: ffn(numbers[i]),
        windows=(None,) * len(numbers),
        default_max_position=4096,
    )


def read_latent(fields: Fields, indexer: IndexerSpec | None = None) -> LatentAttentionSpec:
    if indexer is None:
        fields.refuse("index_topk", allowed=(), why="this family has no sparse attention")
    fields.refuse("attention_bias", allowed=(False,), why="latent attention has no biases here")
    num_heads = fields.integer("num_attention_heads")
    rope_dim = fields.integer("qk_rope_head_dim")
    head_dim, rope = fields.integer("qk_nope_head_dim") + rope_dim, read_rope(fields)
    return LatentAttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary_dim=rope_dim,
        v_dim=fields.integer("v_head_dim"),
        kv_rank=fields.integer("kv_lora_rank"),
        q_rank=None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        interleaved=fields.flag("rope_interleave", True),
        rope=rope,
        scale=_scale(head_dim, rope),
        indexer=indexer,
    )


def _scale(head_dim: int, rope: RopeConfig) -> float | None:
    if rope.yarn is None or not rope.yarn.mscale_all_dim:
        return None
    mscale = yarn_mscale(rope.factor, rope.yarn.mscale_all_dim)
    return float(head_dim**-0.5 * mscale * mscale)


def sigmoid_moe(fields: Fields, *, default_dense: int) -> FeedForwardOf:
    """Read the feed-forwards: `first_k_dense_replace` dense ones, then MoE with DeepSeek's keys."""
    fields.refuse("scoring_func", allowed=("sigmoid",), why="this family's router has sigmoids")
    fields.refuse("topk_method", allowed=("noaux_tc",), why="this family's router has a bias")
    is_normalized = fields.flag("norm_topk_prob", True)
    routing = Routing.SIGMOID_THEN_TOP_NORMALIZED if is_normalized else Routing.SIGMOID_THEN_TOP

    def moe() -> MoESpec:
        return replace(
            read_moe(fields, routing),
            num_groups=fields.integer("n_group", 1),
            top_groups=fields.integer("topk_group", 1),
        )

    return after_dense(fields, moe, default_dense=default_dense)


def after_dense(fields: Fields, moe: Callable[[], MoESpec], *, default_dense: int) -> FeedForwardOf:
    first = fields.get("first_k_dense_replace")
    dense = 0 if first == 0 else fields.integer("first_k_dense_replace", default_dense)
    has_experts = bool(fields.get("n_routed_experts"))
    return lambda i: moe() if i >= dense and has_experts else read_dense(fields)


def read_moe(fields: Fields, routing: Routing) -> MoESpec:
    inner = fields.integer("moe_intermediate_size")
    num_shared = fields.get("n_shared_experts") and fields.integer("n_shared_experts")
    return MoESpec(
        num_experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok", 8),
        inner=inner,
        routing=routing,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        shared=DenseSpec(inner=inner * num_shared) if num_shared else None,
    )


def recurrent(
    fields: Fields, layer: ModelSpec, target: ModelSpec, *, kinds: tuple[str, ...] = (FULL,)
) -> HeadSpec:
    """Return one layer that every level runs. kinds: the allowed values in layer_types."""
    check_one_mtp_layer(fields)
    refuse_windows(fields, kinds=kinds)
    return mtp_spec(
        layer=layer,
        target_num_layers=target.num_layers,
        recurrent=True,
        feeds_back_normed=feeds_normed(fields),
        zeroes_first=masks_first(fields, False),
    )


def recurrent_family(
    *,
    name: str,
    architecture: str,
    layers: Callable[[Fields, range], ModelSpec],  # reads the layers with these numbers
    to_json: Callable[[ModelSpec], dict[str, Any]],
    kinds: tuple[str, ...] = (FULL,),
    known: frozenset[str] = OF_RECURRENT_LAYERS,
) -> Family:
    """Return a family with one layer for multi-token prediction after the target's. kinds, known:
    the allowed values in layer_types and the allowed keys of that layer."""

    def read(fields: Fields) -> ModelSpec:
        return layers(fields, range(fields.integer("num_hidden_layers")))

    def read_mtp(fields: Fields, target: ModelSpec) -> HeadSpec:
        number = target.num_layers
        return recurrent(fields, layers(fields, range(number, number + 1)), target, kinds=kinds)

    def names(spec: ModelSpec) -> HeadNames:
        return replace(NAMES, first=spec.num_layers)

    return Family(
        name=name,
        architectures=(architecture,),
        read=read,
        to_json=to_json,
        mtp=MtpFamily(read=read_mtp, names=names, known=known),
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    written = latent_json(spec, architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3")
    return written | moe_json(spec)


def latent_json(spec: ModelSpec, *, architecture: str, model_type: str) -> dict[str, Any]:
    attention = spec.layers[0].attention
    assert isinstance(attention, LatentAttentionSpec)
    written = decoder_json(spec, architecture=architecture, model_type=model_type)
    del written["head_dim"]  # transformers' own is that of RoPE
    return written | {
        "attention_bias": False,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "rope_interleave": attention.interleaved,
    }


def moe_json(spec: ModelSpec) -> dict[str, Any]:
    moe = next((x.ffn for x in spec.layers if isinstance(x.ffn, MoESpec)), None)
    dense = [x.ffn for x in spec.layers if isinstance(x.ffn, DenseSpec)]
    written: dict[str, Any] = {"first_k_dense_replace": len(dense)}
    if dense:
        written["intermediate_size"] = dense[0].inner
    if moe is not None:
        written |= {
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": moe.shared.inner // moe.inner if moe.shared else None,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.inner,
            "norm_topk_prob": moe.routing
            in (Routing.SIGMOID_THEN_TOP_NORMALIZED, Routing.SOFTMAX_THEN_TOP_NORMALIZED),
            "routed_scaling_factor": moe.weight_scale,
            "n_group": moe.num_groups,
            "topk_group": moe.top_groups,
        }
    return written


FAMILY = recurrent_family(
    name="deepseek_v3", architecture="DeepseekV3ForCausalLM", layers=_layers, to_json=to_json
)
