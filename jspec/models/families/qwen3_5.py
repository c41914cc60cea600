"""Qwen3.5, 3.6 and 3.8, dense and MoE: the text models, with Qwen3-Next's layers.

Published checkpoints also read images: the text model is in text_config and under
`model.language_model.`. Text positions are equal in all sections of the multimodal RoPE.
"""

from __future__ import annotations

from typing import Any

from jspec.errors import ConfigError
from jspec.files.json_files import Fields
from jspec.models.decoder_params import decoder_params
from jspec.models.families.qwen3_next import MTP, hybrid_json, less_one, read_hybrid
from jspec.models.family import Family, text_fields
from jspec.models.params import ParamTable, or_nested
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import ModelSpec

DENSE = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MOE = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
NESTED = {"model.": "model.language_model."}


def read(fields: Fields) -> ModelSpec:
    own = text_fields(fields)
    own.refuse("norm_topk_prob", allowed=(True,), why="this family normalises the chosen weights")
    for name, allowed in (("decoder_sparse_step", (1,)), ("mlp_only_layers", ([],))):
        own.refuse(name, allowed=allowed, why="all layers of this family are MoE, or none")
    has_experts = bool(own.get("num_experts"))
    if has_experts != (fields.architecture() in MOE):
        raise ConfigError(
            f"{fields.path}: num_experts is {own.get('num_experts')} for "
            f"{fields.architecture()}; expected experts for {' and '.join(MOE)} alone"
        )
    return read_hybrid(fields, family=FAMILY.name)


def table(spec: ModelSpec) -> ParamTable:
    return or_nested(less_one(decoder_params(spec)), NESTED)


def to_json(spec: ModelSpec) -> dict[str, Any]:
    is_moe = any(isinstance(layer.ffn, MoESpec) for layer in spec.layers)
    kind = "qwen3_5_moe_text" if is_moe else "qwen3_5_text"
    return hybrid_json(spec, architecture=(MOE if is_moe else DENSE)[0], model_type=kind)


FAMILY = Family(
    name="qwen3_5",
    architectures=(*DENSE, *MOE),
    read=read,
    to_json=to_json,
    table=table,
    mtp=MTP,
    unread=("model.visual.",),
)
