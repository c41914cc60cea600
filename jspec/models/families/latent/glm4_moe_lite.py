"""GLM-4.7-Flash (Glm4MoeLiteForCausalLM): GLM-4.5's MoE with DeepSeek-V3's latent attention."""

from __future__ import annotations

from collections.abc import Sequence
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
from jspec.spec.layers.feed_forward import DenseSpec
from jspec.spec.model_spec import ModelSpec

DENSE, SPARSE = "dense", "sparse"


def _layers(fields: Fields, numbers: range) -> ModelSpec:
    plain = with_num_dense(fields)
    return read_latent_decoder(
        plain, numbers, family=FAMILY.name, ffn=sigmoid_moe(plain, default_dense=1)
    )


def with_num_dense(fields: Fields) -> Fields:
    """Return the fields with first_k_dense_replace, which may be given as mlp_layer_types."""
    return Fields(fields.path, {**fields.values, "first_k_dense_replace": _num_dense(fields)})


def _num_dense(fields: Fields) -> Any:
    """Return the number of dense layers, by either of the two published keys."""
    kinds: Sequence[str] = fields.strings("mlp_layer_types")
    if not kinds:
        return fields.get("first_k_dense_replace")
    count, num_dense = fields.integer("num_hidden_layers"), kinds.count(DENSE)
    if list(kinds) != [DENSE] * num_dense + [SPARSE] * (count - num_dense):
        raise ConfigError(
            f"{fields.path}: mlp_layer_types is {shown(list(kinds))}; expected {count} entries, "
            f"{DENSE!r} ones before {SPARSE!r} ones"
        )
    return num_dense


def to_json(spec: ModelSpec) -> dict[str, Any]:
    written = latent_json(spec, architecture="Glm4MoeLiteForCausalLM", model_type="glm4_moe_lite")
    return written | moe_json(spec) | kinds_json(spec)


def kinds_json(spec: ModelSpec) -> dict[str, Any]:
    kinds = [DENSE if isinstance(layer.ffn, DenseSpec) else SPARSE for layer in spec.layers]
    return {"mlp_layer_types": kinds}


FAMILY = recurrent_family(
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    layers=_layers,
    to_json=to_json,
)
