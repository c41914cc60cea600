"""DeepSeek-V3.2 (DeepseekV32ForCausalLM): V3 with an indexer in each layer, also in that for
multi-token prediction. RoPE rotates halves of the indexer's heads, but neighbours of the
attention's."""

from __future__ import annotations

from typing import Any

from jspec.errors import ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.families.latent.deepseek_v3 import (
    latent_json,
    moe_json,
    read_latent_decoder,
    recurrent_family,
    sigmoid_moe,
)
from jspec.models.families.latent.glm4_moe_lite import kinds_json, with_num_dense
from jspec.models.family import OF_RECURRENT_LAYERS
from jspec.spec.layers.attention import IndexerSpec, LatentAttentionSpec
from jspec.spec.model_spec import ModelSpec

INDEXED = "indexed_attention"  # transformers' kind of all layers
INTERLEAVED, TYPES = "indexer_rope_interleave", "indexer_types"
INDEX_KEYS = frozenset(
    (
        *("index_topk", "index_head_dim", "index_n_heads", INTERLEAVED, TYPES),
        *("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"),
        # Ignored: every draft level selects for itself, which costs time and changes no text.
        "index_share_for_mtp_iteration",
    )
)
OF_MTP = OF_RECURRENT_LAYERS | INDEX_KEYS


def _layers(fields: Fields, numbers: range) -> ModelSpec:
    fields.refuse("index_topk_freq", allowed=(1,), why="every layer has an indexer here")
    fields.refuse("index_topk_pattern", allowed=(), why="every layer has an indexer here")
    if set(fields.strings(TYPES)) - {"full"}:
        raise ConfigError(
            f"{fields.path}: {TYPES} is {shown(fields.get(TYPES))}; expected 'full' only: every "
            "layer has an indexer here"
        )
    return read_sparse_decoder(fields, numbers, family=FAMILY.name, interleaved=False)


def read_sparse_decoder(
    fields: Fields, numbers: range, *, family: str, interleaved: bool
) -> ModelSpec:
    """Read layers with an indexer each. interleaved: RoPE of indexers without a key for it."""
    for name, value in fields.values.items():
        if name.startswith("index") and name not in INDEX_KEYS and value:
            raise ConfigError(
                f"{fields.path}: {name} is {shown(value)}; expected no such key: what it would "
                "change in the indexer is not known here"
            )
    others = sorted(set(fields.strings("layer_types")) - {INDEXED})
    if others:
        raise ConfigError(
            f"{fields.path}: layer_types has {shown(others)}; expected {INDEXED!r} only"
        )
    fields.refuse("rope_interleave", allowed=(True,), why="RoPE rotates pairs of neighbours here")
    fields.refuse("mlp_bias", allowed=(False,), why="MLPs have no biases here")
    plain = with_num_dense(fields)
    return read_latent_decoder(
        plain,
        numbers,
        family=family,
        ffn=sigmoid_moe(plain, default_dense=3),
        indexer=IndexerSpec(
            num_heads=fields.integer("index_n_heads"),
            head_dim=fields.integer("index_head_dim"),
            top_k=fields.integer("index_topk"),
            interleaved=fields.flag(INTERLEAVED, interleaved),
        ),
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    return sparse_json(spec, architecture="DeepseekV32ForCausalLM", model_type="deepseek_v32")


def sparse_json(spec: ModelSpec, *, architecture: str, model_type: str) -> dict[str, Any]:
    attention = spec.layers[0].attention
    assert isinstance(attention, LatentAttentionSpec)
    assert attention.indexer is not None
    written = latent_json(spec, architecture=architecture, model_type=model_type)
    return (
        written
        | kinds_json(spec)
        | moe_json(spec)
        | {
            "index_n_heads": attention.indexer.num_heads,
            "index_head_dim": attention.indexer.head_dim,
            "index_topk": attention.indexer.top_k,
            INTERLEAVED: attention.indexer.interleaved,
        }
    )


FAMILY = recurrent_family(
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    layers=_layers,
    to_json=to_json,
    kinds=(INDEXED,),
    known=OF_MTP,
)
