"""An EAGLE-3 head's config.json: its variants, read against its target, and written again.

ConfigError: a variant that jspec does not serve. CheckpointError: a file that is missing,
unreadable, or belongs to another target.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jspec.core.errors import CheckpointError, ConfigError
from jspec.core.json_files import Fields, read_fields, shown
from jspec.core.model_spec import Eagle3Config, ModelSpec
from jspec.models.family import (
    FULL,
    read_attention,
    read_decoder,
    read_dense,
    refuse_quantized,
)
from jspec.models.registry import family_named

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
AUX_IDS = "eagle_aux_hidden_state_layer_ids"


def load_eagle3_config(
    path: Path, *, target: ModelSpec, draft_rope_theta: float | None = None
) -> Eagle3Config:
    """An EAGLE-3 head's shape from `path`/config.json, checked against its target.

    Two layouts: the plain one (EAGLE, SpecForge, SGLang: the layer's fields at the top level) and
    speculators' (the layer under `transformer_layer_config`, norm_before_residual true unless it
    says otherwise). RoPE comes from the draft's own config, theta 10000 where it has none: heads
    are trained without their target's theta and scaling. draft_rope_theta overrides theta.
    The target's tying of embeddings does not reach the head, which owns its lm_head.
    Raises ConfigError for variants that are not served, CheckpointError for a head of another
    target.
    """
    fields = read_fields(path / "config.json")
    speculators = fields.get("transformer_layer_config") is not None
    layer_fields = fields.table("transformer_layer_config") if speculators else fields
    _check_eagle3_variant(fields, layer_fields, speculators=speculators)
    stated_num_layers = layer_fields.integer("num_hidden_layers")
    layer = _read_layer(layer_fields, draft_rope_theta=draft_rope_theta)
    target_hidden_size = fields.integer("target_hidden_size", layer.hidden_size)
    for name, ours, theirs in (
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("target_hidden_size (or hidden_size)", target_hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"{fields.path}: {name} is {ours}; expected the target's {theirs}"
            )
    draft_vocab_size = fields.integer("draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise CheckpointError(
            f"{fields.path}: draft_vocab_size is {draft_vocab_size}; "
            f"expected at most the target's {layer.vocab_size}"
        )
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        aux_layer_ids=_aux_layer_ids(fields, target.num_layers),
        norm_before_residual=fields.flag("norm_before_residual", speculators),
        stated_num_layers=stated_num_layers,
    )


def eagle3_config_json(config: Eagle3Config, *, dtype: str) -> dict[str, Any]:
    """config.json of a head in the plain layout, as SGLang and vLLM read it.

    Aux ids are written as `aux_layer_ids` holds them ("input of layer i"). A first id of 1 is
    refused: readers take it for the other convention ("output of layer i") and add one to all.
    """
    if config.aux_layer_ids[0] == 1:
        raise ConfigError(
            f"aux layer ids are {config.aux_layer_ids}; expected a first id other than 1, which "
            "readers of eagle_config take for the output-of-layer convention, one layer off"
        )
    layer = replace(config.layer, tie_word_embeddings=False)
    return family_named("llama").to_json(layer) | {
        "torch_dtype": dtype,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {AUX_IDS: list(config.aux_layer_ids), "use_aux_hidden_state": True},
    }


def _read_layer(fields: Fields, *, draft_rope_theta: float | None) -> ModelSpec:
    """The head's one layer, whatever num_hidden_layers says (published heads copy the target's)."""
    refuse_quantized(fields)
    fields.refuse("mlp_bias", allowed=(False,), why="a head's MLP has no biases")
    if set(fields.strings("layer_types")) - {FULL}:
        raise ConfigError(
            f"{fields.path}: layer_types has {shown(fields.strings('layer_types'))}; expected "
            f"{FULL!r} only"
        )
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, qkv_bias=bias, out_bias=bias)
    if draft_rope_theta is not None:
        attention = replace(attention, rope=replace(attention.rope, theta=draft_rope_theta))
    dense = read_dense(fields)
    layer = read_decoder(
        fields, family="llama", attention=attention, ffn=lambda _: dense, windows=(None,)
    )
    return replace(layer, tie_word_embeddings=False)


def _check_eagle3_variant(fields: Fields, layer: Fields, *, speculators: bool) -> None:
    """Refuses every published variant whose arithmetic models/eagle3 does not do."""
    if speculators:
        fields.refuse("speculators_model_type", allowed=("eagle3",), why="another draft model")
        layer.refuse(
            "model_type", allowed=("llama",), why="its attention norms q and k, or is no Llama's"
        )
        fields.refuse(
            "norm_output", allowed=(False,), why="here it feeds the normed output back, not served"
        )
    else:
        _check_plain_architecture(fields)
        fields.refuse(
            "norm_output", allowed=(True,), why="heads without a norm before lm_head are not served"
        )
    aux = fields.table("eagle_config")
    for table in (fields, aux):
        table.refuse("use_aux_hidden_state", allowed=(True,), why="heads without fc are not served")
        table.refuse("norm_before_fc", allowed=(False,), why="a norm before fc is not served")
        table.refuse("fc_norm", allowed=(False,), why="norms of the aux features are not served")
    fields.refuse("bias", allowed=(False,), why="a bias in fc is not served")
    fields.refuse("logit_scale", allowed=(1, 1.0), why="scaled logits are not served")
    fields.refuse("parallel_drafting", allowed=(False,), why="P-EAGLE heads are not served")


def _check_plain_architecture(fields: Fields) -> None:
    architecture = fields.architecture()
    if architecture not in EAGLE3_ARCHITECTURES:
        raise ConfigError(
            f"{fields.path}: draft architecture is {architecture!r}; expected one of "
            f"{', '.join(EAGLE3_ARCHITECTURES)}, or speculators' transformer_layer_config"
        )
    if architecture == "LlamaForCausalLM" and "draft_vocab_size" not in fields.values:
        raise ConfigError(
            f"{fields.path}: draft_vocab_size is absent; an EAGLE-3 head of architecture "
            "'LlamaForCausalLM' has it, and EAGLE-1 heads and plain drafts are not served"
        )


def _aux_layer_ids(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Input-of-layer ids; a first id of 1 marks the output-of-layer convention.

    L = 32: [2, 16, 29] (inputs) and [1, 15, 28] (outputs) are the same captures.
    """
    value = fields.table("eagle_config").get(AUX_IDS)
    value = fields.get(AUX_IDS) if value is None else value
    if value is None:
        return Eagle3Config.default_aux_layer_ids(num_layers)
    named = f"{fields.path}: {AUX_IDS} is {shown(value)}"
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise CheckpointError(f"{named}; expected a list of layers")
    ids = tuple(item + 1 for item in value) if value[0] == 1 else tuple(value)
    if min(ids) < 0 or max(ids) > num_layers:
        raise CheckpointError(f"{named}; expected layers of a target of {num_layers}")
    return ids
