"""An EAGLE-3 head's config.json: reading its variants against a target, and writing it.

Raises ConfigError for an unserved variant, CheckpointError for a file that is not of this target's
head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields, in_file, read_fields
from jspec.models.family import refuse_windows
from jspec.models.files.w8a8 import check_quantization
from jspec.models.heads.head_files import (
    LAYER,
    check_target,
    read_layers,
    refuse_unknown,
    stored_names,
)
from jspec.models.registry import family_named
from jspec.spec.head_spec import FeatureNorm, HeadSpec, default_aux_layer_ids, eagle3_spec
from jspec.spec.model_spec import ModelSpec

PARALLEL = "PEagleDraftModel"
EAGLE3_ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    PARALLEL,
)
MASKS = ("mask_token_id", "pard_token")  # speculators', vLLM's
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_STYLES = ("llama", "qwen3")
# Keys that are read, by their table; a config without a nested table has the first two in one.
# Others are refused if they may change the forward (head_files.refuse_unknown).
OF_LAYERS = frozenset(("rms_norm_eps", "attention_bias", "qkv_bias", "bias", "mlp_bias"))
OF_HEAD = frozenset(
    (
        *("bias", "logit_scale", "norm_before_residual", "norm_before_fc", "fc_norm"),
        *("norm_output", "use_last_layernorm", "use_input_layernorm_in_first_layer"),
        *("draft_vocab_size", "truncated_vocab_size", "eagle_config", AUX_IDS),
        *("use_aux_hidden_state", "num_aux_hidden_states", "use_mtp_layernorm"),
        *("parallel_drafting", "parallel_draft_step", *MASKS),
    )
)
OF_EAGLE_CONFIG = frozenset(
    (
        *("norm_before_residual", "norm_before_fc", "fc_norm"),
        *("use_last_layernorm", "use_input_layernorm_in_first_layer"),
        *("use_aux_hidden_state", "num_aux_hidden_states", AUX_IDS),
        *("use_mtp_layernorm", "parallel_draft_step", "parallel_draft_heads_num_layers"),
    )
)
# Flags that change the forward when false.
USUALLY_TRUE = frozenset(
    (
        *("norm_before_residual", "use_last_layernorm", "use_aux_hidden_state"),
        "use_input_layernorm_in_first_layer",
    )
)


def load_eagle3_config(
    path: Path,
    *,
    target: ModelSpec,
    draft_rope_theta: float | None = None,
    reads_names: bool = True,
) -> HeadSpec:
    """Read an EAGLE-3 head's spec from `path`/config.json and check it against its target.

    The plain layout (EAGLE, SpecForge, SGLang, ModelOpt) has the layers' fields at the top level;
    speculators' has them in `transformer_layer_config`, and norm_before_residual is true by
    default. RoPE is the head's own, theta 10000 by default; draft_rope_theta overrides it.

    With reads_names, the tensors' names (if there are weights) decide what config.json leaves open:
    the layers of a `midlayer` head, the tensor that `bias` is about, and a norm before lm_head.
    """
    fields = read_fields(path / "config.json")
    names = stored_names(path) if reads_names else {}
    with in_file(fields.path):
        return _read_config(fields, names, target=target, draft_rope_theta=draft_rope_theta)


def _read_config(
    fields: Fields,
    names: Mapping[str, str],
    *,
    target: ModelSpec,
    draft_rope_theta: float | None,
) -> HeadSpec:
    nested = fields.get("transformer_layer_config") is not None
    speculators = nested or fields.get("speculators_model_type") is not None
    layer_fields = fields.table("transformer_layer_config") if nested else fields
    _check_eagle3_variant(fields, layer_fields, names, speculators=speculators)
    layer = _layers_of(
        layer_fields,
        names,
        target=target,
        draft_rope_theta=draft_rope_theta,
        speculators=speculators,
        has_own_bias=nested,
    )
    aux_layer_ids = _aux_layer_ids(fields, target.num_layers, speculators=speculators)
    hidden_size = fields.integer("target_hidden_size", layer.hidden_size)
    check_target(fields, layer, target, hidden_size=hidden_size)
    draft_vocab_size = _draft_vocab_size(fields, layer)
    has_norm = speculators or _norms_before_head(fields, names)
    feeds_back_normed = fields.flag("norm_output", False)
    if feeds_back_normed and not has_norm:
        raise ConfigError(
            f"{fields.path}: norm_output is True, but the head has no norm before lm_head "
            "(use_last_layernorm is False); expected one of them"
        )
    return eagle3_spec(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=hidden_size,
        aux_layer_ids=aux_layer_ids,
        norm_before_residual=_stated(
            fields, "norm_before_residual", speculators and not _is_parallel(fields)
        ),
        feature_norm=_feature_norm(fields),
        fc_bias=_bias_of(fields, names, "fc.bias", default=bool(aux_layer_ids)),
        norm_before_head=has_norm,
        feeds_back_normed=feeds_back_normed,
        logit_scale=fields.number("logit_scale", 1.0),
        mask_token_id=_mask_token_id(fields),
    )


def eagle3_config_json(spec: HeadSpec, *, dtype: str) -> dict[str, Any]:
    """Return config.json of a head in the plain layout, as SGLang and vLLM read it. Aux ids are
    written twice: at the top level as inputs of layers, in eagle_config as outputs, one less."""
    layer = replace(spec.layer, tie_word_embeddings=False)
    attention = layer.one_layer.softmax_attention
    written = family_named("llama").to_json(layer) | {
        "torch_dtype": dtype,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        "norm_before_residual": spec.norm_before_residual,
        "attention_bias": attention.out_bias,
        AUX_IDS: list(spec.aux_layer_ids),
        "eagle_config": {
            AUX_IDS: [each - 1 for each in spec.aux_layer_ids],
            "use_aux_hidden_state": bool(spec.aux_layer_ids),
        },
    }
    unusual = {
        "model_type": "qwen3" if attention.qk_norm else "llama",
        "qkv_bias": attention.qkv_bias and not attention.out_bias,
        "norm_before_fc": spec.feature_norm is FeatureNorm.WHOLE,
        "fc_norm": spec.feature_norm is FeatureNorm.EACH,
        "norm_output": spec.feeds_back_normed,
        "bias": spec.fc_bias,
        "logit_scale": None if spec.logit_scale == 1.0 else spec.logit_scale,
    }
    if not spec.norm_before_head:
        written["use_last_layernorm"] = False
    return written | {name: value for name, value in unusual.items() if value}


def _is_parallel(fields: Fields) -> bool:
    if fields.get("speculators_model_type") == "peagle":
        return True
    names = fields.strings("architectures")
    return fields.flag("parallel_drafting", PARALLEL in names[:1])


def _mask_token_id(fields: Fields) -> int | None:
    if not _is_parallel(fields):
        return None
    values = [fields.get(name) for name in MASKS if fields.get(name) is not None]
    if len(set(values)) != 1 or type(values[0]) is not int:
        raise CheckpointError(
            f"{fields.path}: {' and '.join(MASKS)} are {shown(values)}; expected one token id in a "
            f"head that drafts in parallel"
        )
    return values[0]


def _draft_vocab_size(fields: Fields, layer: ModelSpec) -> int:
    older = fields.integer("truncated_vocab_size", layer.vocab_size)
    size = fields.integer("draft_vocab_size", older)
    if fields.get("truncated_vocab_size") is not None and older != size:
        raise CheckpointError(
            f"{fields.path}: draft_vocab_size is {size} and truncated_vocab_size is {older}; "
            f"expected one number"
        )
    if size > layer.vocab_size:
        raise CheckpointError(
            f"{fields.path}: draft_vocab_size is {size}; "
            f"expected at most the target's {layer.vocab_size}"
        )
    return size


def _layers_of(
    fields: Fields,
    names: Mapping[str, str],
    *,
    target: ModelSpec,
    draft_rope_theta: float | None,
    speculators: bool,
    has_own_bias: bool,
) -> ModelSpec:
    """Read the head's identical layers. has_own_bias: `bias` in these fields is not fc's."""
    check_quantization(fields)
    refuse_windows(fields)
    qk_norm = fields.get("model_type") == "qwen3" and (
        speculators or f"{LAYER}self_attn.q_norm.weight" in names
    )
    name = f"{LAYER}self_attn.q_proj.bias"
    own_bias = _bias_of(fields, names, name, default=has_own_bias)
    return read_layers(
        fields,
        names,
        target=target,
        qkv_bias=fields.flag("qkv_bias", False) or own_bias,
        qk_norm=qk_norm,
        rope_theta=draft_rope_theta,
    )


def _bias_of(fields: Fields, names: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return whether `bias` is about tensor `name`: SGLang applies it to fc, vLLM to q, k, v."""
    if not fields.flag("bias", False):
        return False
    if not names:
        return default
    biases = ("fc.bias", f"{LAYER}self_attn.q_proj.bias")
    if not any(found in names for found in biases):
        raise CheckpointError(
            f"{fields.path}: bias is True, but the weights beside it have none; expected "
            f"{' or '.join(biases)}"
        )
    return name in names


def _stated(fields: Fields, name: str, default: bool) -> bool:
    return fields.table("eagle_config").flag(name, fields.flag(name, default))


def _norms_before_head(fields: Fields, names: Mapping[str, str]) -> bool:
    """Return whether a plain head has a norm before lm_head.

    norm_output false (not fed back, SGLang) meant none before SpecForge's pull request 879, and
    does if the file has no such norm.
    """
    is_older = fields.get("norm_output") is False and names and "norm.weight" not in names
    return _stated(fields, "use_last_layernorm", True) and not is_older


def _feature_norm(fields: Fields) -> FeatureNorm:
    whole, each = _stated(fields, "norm_before_fc", False), _stated(fields, "fc_norm", False)
    if whole and each:
        raise ConfigError(
            f"{fields.path}: norm_before_fc is True and fc_norm is True; expected one of them"
        )
    return FeatureNorm.WHOLE if whole else FeatureNorm.EACH if each else FeatureNorm.NONE


def _check_eagle3_variant(
    fields: Fields, layer: Fields, names: Mapping[str, str], *, speculators: bool
) -> None:
    if speculators:
        kinds = ("eagle3", "peagle")
        fields.refuse("speculators_model_type", allowed=kinds, why="another draft model")
        if layer is not fields:
            layer.refuse("model_type", allowed=LAYER_STYLES, why="another kind of decoder layer")
    else:
        _check_plain_architecture(fields, names)
    aux = fields.table("eagle_config")
    for table in (fields, aux):
        table.refuse(
            "use_input_layernorm_in_first_layer", allowed=(True,), why="embeddings are normed here"
        )
        table.refuse("use_mtp_layernorm", allowed=(False,), why="MTP's norms are not served")
        table.refuse("next_layer_regular", allowed=(True,), why="later layers are a decoder's")
        table.refuse("parallel_draft_step", allowed=(1,), why="parallel drafting is not served")
    if not _is_parallel(fields):
        for name in MASKS:
            fields.refuse(name, allowed=(), why="the head does not draft in parallel")
    if speculators:
        for table in (fields, aux):
            why = "a head of speculators has a norm before lm_head"
            table.refuse("use_last_layernorm", allowed=(True,), why=why)
    _refuse_unread(aux, known=OF_EAGLE_CONFIG, where="eagle_config")
    if layer is fields:
        refuse_unknown(fields, known=OF_HEAD | OF_LAYERS)
        return
    copied = {name for name, value in fields.values.items() if layer.get(name) == value}
    _refuse_unread(fields, known=OF_HEAD | (OF_LAYERS & copied), where="the top level")
    _refuse_unread(layer, known=OF_LAYERS | (OF_HEAD & copied), where="transformer_layer_config")


def _refuse_unread(table: Fields, *, known: frozenset[str], where: str) -> None:
    """Raise ConfigError for a setting in the wrong table, and for unknown ones."""
    for name in sorted((OF_HEAD | OF_LAYERS | OF_EAGLE_CONFIG) - known):
        value = table.get(name)
        if value or (value is False and name in USUALLY_TRUE):
            raise ConfigError(
                f"{table.path}: {name} is {shown(value)} in {where}; expected no such key there, "
                "since it is not read from there"
            )
    refuse_unknown(table, known=known)


def _check_plain_architecture(fields: Fields, names: Mapping[str, str]) -> None:
    architecture = fields.architecture()
    if architecture not in EAGLE3_ARCHITECTURES:
        raise ConfigError(
            f"{fields.path}: draft architecture is {architecture!r}; expected one of "
            f"{', '.join(EAGLE3_ARCHITECTURES)}, or speculators' transformer_layer_config"
        )
    is_named = f"{LAYER}hidden_norm.weight" in names or "draft_vocab_size" in fields.values
    if architecture == "LlamaForCausalLM" and not is_named:
        raise ConfigError(
            f"{fields.path}: draft_vocab_size is absent; an EAGLE-3 head of architecture "
            "'LlamaForCausalLM' has it; expected --speculative-algorithm EAGLE for an EAGLE-1 or "
            "EAGLE-2 head, STANDALONE for a language model"
        )


def _aux_layer_ids(fields: Fields, num_layers: int, *, speculators: bool) -> tuple[int, ...]:
    """Return aux ids as inputs of layers; () if the head reads the target's last hidden.

    For 32 layers, [2, 16, 29] (inputs) and [1, 15, 28] (outputs) are the same captures.
    speculators' are inputs, eagle_config's outputs; a plain config's at the top level are outputs
    if the first is 1.
    """
    nested, above = fields.table("eagle_config").get(AUX_IDS), fields.get(AUX_IDS)
    if not _stated(fields, "use_aux_hidden_state", True):
        return ()
    value = above if nested is None or nested == [] else nested
    named = f"{fields.path}: {AUX_IDS} is {shown(value)}"
    if value is None:  # ModelOpt writes an empty list in eagle_config for the defaults
        ids = default_aux_layer_ids(num_layers)
        return _counted(fields, ids, named=named)
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise CheckpointError(f"{named}; expected a list of layers")
    plus_one = [item + 1 for item in value]
    if speculators:
        are_outputs = False
    elif value is nested:
        are_outputs = above == plus_one or _are_outputs(value, num_layers)
    else:
        are_outputs = value[0] == 1
    ids = tuple(plus_one if are_outputs else value)
    if min(ids) < 0 or max(ids) > num_layers:
        raise CheckpointError(f"{named}; expected layers of a target of {num_layers}")
    return _counted(fields, ids, named=named)


def _are_outputs(ids: list[int], num_layers: int) -> bool:
    """Return whether ids in eagle_config are outputs of layers, as SGLang reads them. They are
    inputs if they include num_layers or equal the usual inputs."""
    is_usual = tuple(ids) == (2, num_layers // 2, num_layers - 3)
    return max(ids) != num_layers and not is_usual


def _counted(fields: Fields, ids: tuple[int, ...], *, named: str) -> tuple[int, ...]:
    stated = fields.integer("num_aux_hidden_states", len(ids))
    count = fields.table("eagle_config").integer("num_aux_hidden_states", stated)
    if count != len(ids):
        raise CheckpointError(f"{named}; expected num_aux_hidden_states {count} of them")
    return ids
