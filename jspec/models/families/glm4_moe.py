"""GLM-4.5 and 4.6 (Glm4MoeForCausalLM), and the NextN drafts of DeepSeek-V3 and GLM.

RoPE rotates half of each head. The first layers have dense MLPs, the others MoE (sigmoid scores,
router bias) plus a shared expert. One layer for multi-token prediction follows the target's layers
by number. It reads the target's hidden after the final norm, and every draft level runs it again on
its output after its final norm (as SGLang and transformers do; vLLM feeds back the output before
that norm).

That layer may have its own checkpoint, as layer 0, for any target that it was trained for; its
config gives attention and feed-forward. DeepSeek's latent attention is not supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jspec.files.json_files import Fields
from jspec.models.family import (
    OF_RECURRENT_LAYERS,
    Family,
    MtpFamily,
    check_one_mtp_layer,
    decoder_json,
    feeds_normed,
    masks_first,
    read_attention,
    read_decoder,
    read_dense,
    refuse_windows,
    without_partial_rotary,
)
from jspec.models.files.fp8 import check_quantization
from jspec.models.heads.head_params import HeadNames
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.model_spec import (
    AttentionSpec,
    DenseSpec,
    FeedForward,
    ModelSpec,
    MoESpec,
    Routing,
)

NAMES = HeadNames(prefix="model.layers.{}.", norm=("shared_head.norm",))
GROUPS = ("n_group", "topk_group")
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "index_topk")
KNOWN = OF_RECURRENT_LAYERS | {"use_qk_norm"}
BEYOND = 1 << 31  # for a layer of unknown number: after all dense ones


def read(fields: Fields) -> ModelSpec:
    return _layers(fields, range(fields.integer("num_hidden_layers")), rotary=0.5)


def _layers(fields: Fields, numbers: range, *, rotary: float) -> ModelSpec:
    """Read the layers with these numbers. rotary: the default share of a head that is rotated."""
    check_quantization(fields)
    for name in GROUPS:
        fields.refuse(name, allowed=(1,), why="groups of experts are not served")
    fields.refuse("scoring_func", allowed=("sigmoid",), why="this family's router has sigmoids")
    fields.refuse("topk_method", allowed=("noaux_tc",), why="this family's router has a bias")
    return read_decoder(
        without_partial_rotary(fields, default=rotary)[0],
        family=FAMILY.name,
        attention=_attention(fields, rotary),
        ffn=lambda i: _feed_forward(fields, numbers[i]),
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


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    dense = 0 if fields.get("first_k_dense_replace") == 0 else None
    dense = fields.integer("first_k_dense_replace", 1) if dense is None else dense
    if layer < dense or not fields.get("n_routed_experts"):
        return read_dense(fields)
    inner = fields.integer("moe_intermediate_size")
    is_normalized = fields.flag("norm_topk_prob", True)
    num_shared = fields.get("n_shared_experts") and fields.integer("n_shared_experts")
    return MoESpec(
        num_experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok", 8),
        inner=inner,
        routing=Routing.SIGMOID_THEN_TOP_NORMALIZED if is_normalized else Routing.SIGMOID_THEN_TOP,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        shared=DenseSpec(inner=inner * num_shared) if num_shared else None,
    )


def read_mtp(fields: Fields, target: ModelSpec) -> HeadSpec:
    check_one_mtp_layer(fields)
    refuse_windows(fields)
    number = target.num_layers
    return _recurrent(fields, _layers(fields, range(number, number + 1), rotary=0.5), target)


def read_alone(fields: Fields, target: ModelSpec) -> HeadSpec:
    for name in LATENT:
        fields.refuse(name, allowed=(), why="latent attention (DeepSeek's MLA) is not served")
    check_one_mtp_layer(fields)
    refuse_windows(fields)
    return _recurrent(fields, _layers(fields, range(BEYOND, BEYOND + 1), rotary=1.0), target)


def _recurrent(fields: Fields, layer: ModelSpec, target: ModelSpec) -> HeadSpec:
    return mtp_spec(
        layer=layer,
        target_num_layers=target.num_layers,
        recurrent=True,
        feeds_back_normed=feeds_normed(fields),
        zeroes_first=masks_first(fields, False),
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    attention = spec.layers[0].softmax_attention
    moe = next((x.ffn for x in spec.layers if isinstance(x.ffn, MoESpec)), None)
    dense = next((x.ffn for x in spec.layers if isinstance(x.ffn, DenseSpec)), None)
    written = decoder_json(spec, architecture="Glm4MoeForCausalLM", model_type="glm4_moe") | {
        "attention_bias": attention.qkv_bias,
        "use_qk_norm": attention.qk_norm,
        "partial_rotary_factor": (
            1.0
            if attention.rotary_dim is None
            else (attention.rotary_dim + 0.5) / attention.head_dim
        ),
        "first_k_dense_replace": sum(isinstance(x.ffn, DenseSpec) for x in spec.layers),
    }
    if dense is not None:
        written["intermediate_size"] = dense.inner
    if moe is not None:
        written |= {
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": moe.shared.inner // moe.inner if moe.shared else None,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.inner,
            "norm_topk_prob": moe.routing is Routing.SIGMOID_THEN_TOP_NORMALIZED,
            "routed_scaling_factor": moe.weight_scale,
            "n_group": 1,
            "topk_group": 1,
        }
    return written


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
