"""Common parts of all EAGLE heads' files: names, arrays shared with the target, unknown settings.

Canonical names are speculators' (`layers.0.*`); `midlayer.*` and a leading `model.` are aliases.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.files.checkpoint import is_inv_freq
from jspec.models.files.tensor_files import Tensors, has_tensors, open_tensors
from jspec.models.layer_params import attention_params, ffn_params, norm
from jspec.models.params import Form, ParamSpec, ParamTable, Part, or_fused, prefixed
from jspec.spec.model_spec import LayerSpec, ModelSpec

LAYER = "layers.0."
Params = Mapping[str, Any]
_NUMBER = re.compile(r"layers\.(\d+)\.")
# A key with one of these words may change the forward.
_WORDS = re.compile(
    r"norm|fc|aux|bias|scale|residual|draft|parallel|eagle|multiplier|softcap|gate|sink|mask"
)
# Keys that match _WORDS but do not change the forward.
_NEUTRAL = frozenset(
    (
        "embed_requires_grad",
        "router_aux_loss_coef",  # copied from a target's config
        "norm_topk_prob",
    )
)


def canonical_name(name: str) -> str:
    """Map model.midlayer.x, midlayer.x, model.layers.0.x and layers.0.x to layers.0.x."""
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def stored_names(path: Path) -> dict[str, str]:
    """Return stored names by canonical name; {} without weights. Reads headers; CheckpointError."""
    if not has_tensors(path):
        return {}
    with open_tensors(path, canonical=canonical_name) as tensors:
        return {name: stored for name, (_, stored) in tensors.sources.items()}


def num_stored_layers(fields: Fields, names: Mapping[str, str], *, target: ModelSpec) -> int:
    """Return the number of a head's layers by its tensors' names, or without any by config.json.

    A head stored as `midlayer` has one layer; its config.json may specify 1 or, as some do, its
    target's number. Otherwise raise CheckpointError if the two disagree.
    """
    stated = fields.integer("num_hidden_layers", 1)
    found = {int(match[1]) for name in names if (match := _NUMBER.match(name))}
    if not found:
        return stated
    if found == {0} and any("midlayer." in stored for stored in names.values()):
        if stated not in (1, target.num_layers):
            raise CheckpointError(
                f"{fields.path}: num_hidden_layers is {stated}, but the weights beside it have one "
                f"layer (midlayer); expected 1, or its target's {target.num_layers}"
            )
        return 1
    if found != set(range(stated)):
        raise CheckpointError(
            f"{fields.path}: num_hidden_layers is {stated}, but the weights beside it have "
            f"{len(found)}: {shown(sorted(found))}; expected layers 0 to {stated - 1}"
        )
    return stated


def refuse_unknown(fields: Fields, *, known: Collection[str]) -> None:
    """Raise ConfigError, naming key and value, for an unread key that may change the forward.

    known: the keys that the reader handles. null, false and empty values are ignored.
    """
    for name, value in fields.values.items():
        if name in known or name in _NEUTRAL or not value or not _WORDS.search(name):
            continue
        raise ConfigError(
            f"{fields.path}: {name} is {shown(value)}; expected no such key: what it would change "
            "in the head's forward is not known here"
        )


def check_target(fields: Fields, layer: ModelSpec, target: ModelSpec, *, hidden_size: int) -> None:
    """Raise CheckpointError for a head of another target. hidden_size: of the features it reads."""
    for name, ours, theirs in (
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("target_hidden_size (or hidden_size)", hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"{fields.path}: {name} is {ours}; expected the target's {theirs}"
            )


def plain_layer(layer: LayerSpec, *, size: int, input_norm: bool = True) -> ParamTable:
    """Declare a decoder layer of a head under Hugging Face's names, without a prefix."""
    before = (norm("input_norm", "input_layernorm", size),) if input_norm else ()
    return (
        *before,
        *attention_params(layer.softmax_attention, in_size=size, out_size=size),
        norm("post_norm", "post_attention_layernorm", size),
        *ffn_params(layer.ffn, size=size),
    )


def further_layers(model: ModelSpec) -> ParamTable:
    """Declare `layers` 1, 2, ...: the decoder layers after a head's first."""
    return tuple(
        spec
        for i in range(1, model.num_layers)
        for spec in prefixed(
            plain_layer(model.one_layer, size=model.hidden_size),
            path=("layers", i),
            stored=f"layers.{i}.",
        )
    )


def head_layers(table: ParamTable) -> ParamTable:
    """Let the layers' products also be stored fused, as serving engines keep them."""
    return or_fused(table, {"qkv": "qkv_proj", "gate_up": "gate_up_proj"})


def is_stray(name: str) -> bool:
    """Match RoPE tables, and speculators' copies of the verifier's norm and lm_head."""
    return is_inv_freq(name) or name.startswith("verifier_")


def stored_embed(spec: ParamSpec) -> ParamSpec:
    """Return the embedding as a weight stored in the head's own file."""
    part = Part(
        name="embed_tokens.weight", shape=spec.shape, size=spec.shape[-1], form=Form.AS_HELD
    )
    return replace(spec, layouts=((part,),))


def published_specs(table: ParamTable) -> ParamTable:
    """Return a head's embedding and map of ids as their file stores them."""
    found = {spec.path: spec for spec in table}
    ids = found["draft_ids",]
    part = Part(name="d2t", shape=ids.shape, size=ids.shape[0], form=Form.AS_HELD)
    return (
        stored_embed(found["embed", "table"]),
        replace(ids, layouts=((part,),), axes=()),
    )


def shared_embed(tensors: Tensors, layer: ModelSpec, target_params: Params) -> Any:
    """Return the target's table. Raise CheckpointError if its shape does not fit the head."""
    table = target_params["embed"]["table"]
    expected = (layer.vocab_size, layer.hidden_size)
    if tuple(table.shape) != expected:
        raise CheckpointError(
            f"{tensors.path}: no tensor embed_tokens.weight; expected shape {expected}, and the "
            f"target's table of shape {tuple(table.shape)} cannot stand in for it"
        )
    return table


def shared_head(tensors: Tensors, layer: ModelSpec, target_params: Params) -> Any:
    """Return the target's lm_head. Raise CheckpointError if its shape does not fit the head."""
    shared = target_params["lm_head"]["kernel"]
    expected = (layer.hidden_size, layer.vocab_size)
    if tuple(shared.shape) != expected:
        raise CheckpointError(
            f"{tensors.path}: no tensor lm_head.weight; expected shape {expected[::-1]}, and the "
            f"target's kernel of shape {tuple(shared.shape)} cannot stand in for it"
        )
    return shared
