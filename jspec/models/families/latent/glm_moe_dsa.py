"""GLM-5, 5.1 and 5.2 (GlmMoeDsaForCausalLM): DeepSeek-V3.2's attention and MoE.

RoPE rotates neighbours in the indexer, too. From GLM-5.2 on (IndexCache, arXiv:2603.12201) most
layers have no indexer: they attend to what the last layer with one selected. `indexer_types` has
the kind of each layer; without it `index_topk_pattern`, or index_topk_freq and an offset.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jspec.errors import ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.families.latent.deepseek_v3 import recurrent_family
from jspec.models.families.latent.deepseek_v32 import (
    INDEXED,
    OF_MTP,
    TYPES,
    read_sparse_decoder,
    sparse_json,
)
from jspec.spec.layers.attention import LatentAttentionSpec
from jspec.spec.model_spec import LayerSpec, ModelSpec

FULL, SHARED = "full", "shared"
LETTERS = {"F": FULL, "S": SHARED}


def read(fields: Fields) -> ModelSpec:
    count = fields.integer("num_hidden_layers")
    spec, kinds = _layers(fields, range(count)), _kinds(fields, count)
    if len(kinds) != count or set(kinds) - {FULL, SHARED} or kinds[0] != FULL:
        raise ConfigError(
            f"{fields.path}: {TYPES} is {shown(list(kinds))}; expected {count} entries, {FULL!r} "
            f"or {SHARED!r}, the first {FULL!r}"
        )
    layers = (
        _without_indexer(layer) if kind == SHARED else layer
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _layers(fields: Fields, numbers: range) -> ModelSpec:
    return read_sparse_decoder(fields, numbers, family=FAMILY.name, interleaved=True)


def _kinds(fields: Fields, count: int) -> tuple[str, ...]:
    if fields.get(TYPES) is not None:
        return fields.strings(TYPES)
    pattern = fields.get("index_topk_pattern")
    if isinstance(pattern, str):
        return tuple(LETTERS.get(letter, letter) for letter in pattern)
    if pattern is not None:
        return fields.strings("index_topk_pattern")
    period, offset = fields.integer("index_topk_freq", 1), 2
    if fields.get("index_skip_topk_offset") != 0:
        offset = fields.integer("index_skip_topk_offset", offset)
    else:
        offset = 0
    return tuple(SHARED if max(i - offset + 1, 0) % period else FULL for i in range(count))


def _without_indexer(layer: LayerSpec) -> LayerSpec:
    attention = layer.attention
    assert isinstance(attention, LatentAttentionSpec)
    return replace(layer, attention=replace(attention, indexer=None, reuses_selection=True))


def to_json(spec: ModelSpec) -> dict[str, Any]:
    written = sparse_json(spec, architecture="GlmMoeDsaForCausalLM", model_type="glm_moe_dsa")
    attentions = (layer.attention for layer in spec.layers)
    shares = [isinstance(a, LatentAttentionSpec) and a.reuses_selection for a in attentions]
    return written | {TYPES: [SHARED if shared else FULL for shared in shares]}


FAMILY = replace(
    recurrent_family(
        name="glm_moe_dsa",
        architecture="GlmMoeDsaForCausalLM",
        layers=_layers,
        to_json=to_json,
        kinds=(INDEXED,),
        known=OF_MTP,
    ),
    read=read,
)
