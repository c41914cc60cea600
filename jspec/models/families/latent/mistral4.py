"""Mistral Small 4 (Mistral4ForCausalLM): DeepSeek-V3's attention with scaled queries.

The scale of queries is a step function of the position (Llama 4's). Routers are softmaxes without
groups or bias, the selected weights are normalized, and there is a shared expert. Published
checkpoints also read images (mistral.py); transformers stores their experts fused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jspec.errors import CheckpointError, ConfigError
from jspec.files.json_files import Fields
from jspec.models.decoder_params import decoder_params
from jspec.models.families.latent.deepseek_v3 import (
    after_dense,
    latent_json,
    moe_json,
    read_latent,
    read_moe,
)
from jspec.models.family import Family, read_decoder, without_partial_rotary
from jspec.models.files.w8a8 import check_quantization
from jspec.models.layer_params import ffn_params
from jspec.models.params import ParamTable, or_nested
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import FeedForward, Routing
from jspec.spec.model_spec import ModelSpec
from jspec.spec.rope import QueryGrowth
from jspec.spec.rope_io import TABLES

# Names inside a model that reads images: in transformers 4, and in version 5 in memory.
NESTED: tuple[dict[str, str], ...] = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model."},
)
UNREAD = (
    *("vision_tower.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector."),
)
BETA, PERIOD = "llama_4_scaling_beta", "original_max_position_embeddings"


def read(fields: Fields) -> ModelSpec:
    check_quantization(fields)
    for name in ("n_group", "topk_group"):
        fields.refuse(name, allowed=(1,), why="all experts are one group here")
    fields.refuse("norm_topk_prob", allowed=(True,), why="this family normalizes its weights")
    rope_dim = fields.integer("qk_rope_head_dim")
    head_dim = rope_dim + fields.integer("qk_nope_head_dim")
    plain, share = without_partial_rotary(fields, default=rope_dim / head_dim)
    if round(share * head_dim) != rope_dim:
        raise ConfigError(
            f"{fields.path}: partial_rotary_factor is {share}; expected qk_rope_head_dim "
            f"{rope_dim} of {head_dim} dimensions of a head"
        )
    moe = read_moe(fields, Routing.SOFTMAX_THEN_TOP_NORMALIZED)
    return read_decoder(
        plain,
        family=FAMILY.name,
        attention=replace(read_latent(plain), growth=read_growth(fields)),
        ffn=after_dense(fields, lambda: moe, default_dense=0),
        windows=(None,) * fields.integer("num_hidden_layers"),
    )


def read_growth(fields: Fields) -> QueryGrowth:
    rope = next((fields.table(name) for name in reversed(TABLES) if fields.get(name)), None)
    if rope is None or rope.get(BETA) is None:
        raise CheckpointError(
            f"{fields.path}: {BETA} is absent from rope_parameters; expected it, by which queries "
            "grow with the position"
        )
    return QueryGrowth(beta=rope.number(BETA), period=rope.integer(PERIOD))


def growth_json(written: dict[str, Any], attention: AttentionSpec) -> dict[str, Any]:
    growth = attention.growth
    if growth is None:
        return written
    scaling = written["rope_scaling"] or {"rope_type": "default"}
    own = {BETA: growth.beta, PERIOD: growth.period}
    return written | {"rope_scaling": scaling | own}


def table(spec: ModelSpec) -> ParamTable:
    return or_nested(decoder_params(spec, ffn=_fused_first), *NESTED)


def _fused_first(spec: FeedForward, *, size: int) -> ParamTable:
    return tuple(
        replace(own, layouts=own.layouts[::-1]) if own.path[:2] == ("moe", "experts") else own
        for own in ffn_params(spec, size=size)
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    written = latent_json(spec, architecture="Mistral4ForCausalLM", model_type="mistral4")
    attention = spec.layers[0].softmax_attention
    return growth_json(written, attention) | moe_json(spec)


FAMILY = Family(
    name="mistral4",
    architectures=("Mistral4ForCausalLM",),
    read=read,
    to_json=to_json,
    table=table,
    unread=UNREAD,
)
