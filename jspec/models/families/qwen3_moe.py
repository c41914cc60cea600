"""Qwen3-MoE: 30B-A3B, 235B-A22B (transformers' Qwen3MoeForCausalLM). Every `decoder_sparse_step`-th
layer that is not in `mlp_only_layers` is an MoE: softmax over all experts, then the top k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jspec.errors import CheckpointError, shown
from jspec.files.json_files import Fields
from jspec.models.families.qwen2 import qwen_json
from jspec.models.family import (
    FULL,
    SLIDING,
    Family,
    read_attention,
    read_decoder,
    read_dense,
    read_windows,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward, MoESpec, Routing
from jspec.spec.model_spec import ModelSpec


def read(fields: Fields) -> ModelSpec:
    check_quantization(fields)
    bias = fields.flag("attention_bias", False)
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", 4096)
    return read_decoder(
        fields,
        family=FAMILY.name,
        attention=read_attention(fields, qk_norm=True, qkv_bias=bias, out_bias=bias),
        ffn=feed_forward(fields, _experts(fields)),
        windows=read_windows(fields, window=window, default=lambda _: SLIDING if window else FULL),
        default_max_position=32768,
    )


def _experts(fields: Fields) -> MoESpec:
    normalized = fields.flag("norm_topk_prob", False)
    # Checkpoints have either name: transformers 5 maps one to the other.
    name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    return MoESpec(
        num_experts=fields.integer(name, 128),
        top_k=fields.integer("num_experts_per_tok", 8),
        inner=fields.integer("moe_intermediate_size", 768),
        routing=(Routing.SOFTMAX_THEN_TOP_NORMALIZED if normalized else Routing.SOFTMAX_THEN_TOP),
    )


def feed_forward(fields: Fields, moe: MoESpec) -> Callable[[int], FeedForward]:
    """Return the feed-forward by layer index: `moe`, or for layers listed as dense an MLP."""
    step = fields.integer("decoder_sparse_step", 1)
    dense_ids = fields.get("mlp_only_layers") or []
    if not isinstance(dense_ids, list) or not all(type(i) is int for i in dense_ids):
        raise CheckpointError(
            f"{fields.path}: mlp_only_layers is {shown(dense_ids)}; expected a list of layers"
        )

    def of(layer: int) -> FeedForward:
        is_sparse = layer not in dense_ids and (layer + 1) % step == 0
        return moe if is_sparse else read_dense(fields)

    return of


def to_json(spec: ModelSpec) -> dict[str, Any]:
    MoEs = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoESpec)]
    dense = [i for i, layer in enumerate(spec.layers) if not isinstance(layer.ffn, MoESpec)]
    inner = next((x.ffn.inner for x in spec.layers if isinstance(x.ffn, DenseSpec)), None)
    widths = {} if inner is None else {"intermediate_size": inner}
    ffn = MoEs[0]
    return (
        qwen_json(spec, architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe")
        | widths
        | {
            "attention_bias": spec.layers[0].softmax_attention.qkv_bias,
            "num_experts": ffn.num_experts,
            "num_experts_per_tok": ffn.top_k,
            "moe_intermediate_size": ffn.inner,
            "norm_topk_prob": ffn.routing is Routing.SOFTMAX_THEN_TOP_NORMALIZED,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }
    )


FAMILY = Family(
    name="qwen3_moe", architectures=("Qwen3MoeForCausalLM",), read=read, to_json=to_json
)
