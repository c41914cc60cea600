"""Configurations from files and back: Hugging Face `config.json`, and TOML of engine arguments.

Knows the names that checkpoints use and nothing about tensors (models/hf_weights reads those).
Every setting that would change the arithmetic is either understood or refused by name; what only
matters to training (dropout, initializer_range, use_cache, ...) is not looked at.

ConfigError: a well-formed setting that jspec does not serve. CheckpointError: a file that is
missing, unreadable, or does not fit the target.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jspec.core.config import Eagle3Config, RopeConfig, TransformerConfig
from jspec.core.errors import CheckpointError, ConfigError

TARGET_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class _Fields:
    """One JSON object and the file it came from; null counts as absent, types are checked."""

    path: Path
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.path}: {name} is {value!r}; expected a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self.path}: {name} is {value!r}; expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name} is {value!r}; expected true or false")
        return value

    def table(self, name: str) -> _Fields:
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}: {name} is {value!r}; expected an object")
        return _Fields(self.path, value)

    def architecture(self) -> str:
        names = self.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise CheckpointError(
                f"{self.path}: architectures is {names!r}; expected a list of one name"
            )
        return names[0]

    def refuse(self, name: str, *, allowed: tuple[Any, ...], why: str) -> None:
        """ConfigError unless the field is absent or one of the `allowed` values."""
        value = self.get(name)
        if value is not None and value not in allowed:
            expected = " or ".join(repr(item) for item in allowed) or "no such key"
            raise ConfigError(f"{self.path}: {name} is {value!r}; expected {expected}: {why}")


def load_transformer_config(path: Path) -> TransformerConfig:
    """The target's shape from `path`/config.json, in the layout of transformers 4 or 5.

    End-of-sequence ids come from generation_config.json where it names some, else from
    config.json; a checkpoint that names none has none.
    Raises ConfigError (architecture, rope type, activation, ... not served), CheckpointError.
    """
    fields = _read_json(path / "config.json")
    architecture = fields.architecture()
    if architecture not in TARGET_ARCHITECTURES:
        raise ConfigError(
            f"{fields.path}: architecture is {architecture!r}; expected one of "
            f"{', '.join(TARGET_ARCHITECTURES)}"
        )
    if (
        architecture == "MistralForCausalLM"
        and fields.values.get("sliding_window", 4096) is not None
    ):
        raise ConfigError(
            f"{fields.path}: sliding_window is {fields.values.get('sliding_window', 'absent')!r} "
            "(absent means 4096); expected null: window attention is not served"
        )
    config = _transformer(fields)
    generation = path / "generation_config.json"
    if not generation.exists():
        return config
    overrides = _read_json(generation)
    if overrides.get("eos_token_id") is not None:
        config = replace(config, eos_token_ids=_eos_ids(overrides))
    return config


def load_default_temperature(path: Path) -> float:
    """What `path`/generation_config.json samples at: 0 if it does not sample, 1 if it is silent.

    Raises CheckpointError.
    """
    generation = path / "generation_config.json"
    if not generation.exists():
        return 1.0
    fields = _read_json(generation)
    if fields.get("do_sample") is False or fields.get("temperature") == 0:
        return 0.0
    return fields.number("temperature", 1.0)


def load_eagle3_config(
    path: Path, *, target: TransformerConfig, draft_rope_theta: float | None = None
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
    fields = _read_json(path / "config.json")
    speculators = fields.get("transformer_layer_config") is not None
    layer_fields = fields.table("transformer_layer_config") if speculators else fields
    _check_eagle3_variant(fields, layer_fields, speculators=speculators)
    layer = replace(_transformer(layer_fields), num_layers=1, tie_word_embeddings=False)
    if draft_rope_theta is not None:
        layer = replace(layer, rope=replace(layer.rope, theta=draft_rope_theta))
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
    )


def transformer_config_json(config: TransformerConfig, *, dtype: str) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM (transformers 4's keys, which version 5 reads too)."""
    rope = config.rope
    scaling = None
    if rope.factor > 1.0:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    eos = list(config.eos_token_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
    }


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
    layer = replace(config.layer, num_layers=1, tie_word_embeddings=False)
    return transformer_config_json(layer, dtype=dtype) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {AUX_IDS: list(config.aux_layer_ids), "use_aux_hidden_state": True},
    }


def load_engine_toml(path: Path, *, known: Collection[str]) -> dict[str, Any]:
    """Flat engine arguments from TOML, `name = value`; the names are `Engine`'s keywords.

    Raises ConfigError for a name outside `known` (naming the nearest one), for a table, and for
    a file that is missing or is not TOML.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            hint = f"did you mean {near[0]!r}?" if near else "no argument is known here"
            raise ConfigError(f"{path}: unknown engine argument {name!r}; {hint}")
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {name} is a table; expected a flat `{name} = value`")
    return values


def _read_json(path: Path) -> _Fields:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}; expected an object")
    return _Fields(path, values)


def _transformer(fields: _Fields) -> TransformerConfig:
    """The fields that a target and a draft's layer share; defaults are transformers' Llama's."""
    for name in ("hidden_act", "hidden_activation"):
        fields.refuse(name, allowed=("silu", "swish"), why="only SwiGLU MLPs are served")
    fields.refuse("mlp_bias", allowed=(False,), why="MLP biases are not served")
    fields.refuse("quantization_config", allowed=(), why="quantized weights are not served")
    fields.refuse("partial_rotary_factor", allowed=(1, 1.0), why="RoPE turns whole heads here")
    layer_types = set(fields.get("layer_types") or ())
    if layer_types - {"full_attention"}:
        raise ConfigError(
            f"{fields.path}: layer_types has {sorted(layer_types)}; expected 'full_attention' only"
        )
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.path}: hidden_size is {hidden_size}; expected head_dim beside it, or a "
            f"multiple of num_attention_heads {num_heads}"
        )
    bos = fields.get("bos_token_id")
    return TransformerConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        max_position=fields.integer("max_position_embeddings", 2048),
        eos_token_ids=_eos_ids(fields),
        bos_token_id=bos[0] if isinstance(bos, list) and bos else bos,
    )


def _rope(fields: _Fields) -> RopeConfig:
    """transformers 5 keeps theta and scaling in `rope_parameters`, 4 in two fields."""
    scaling = fields.table("rope_parameters")
    theta = scaling.get("rope_theta")
    if not scaling.values:
        scaling = fields.table("rope_scaling")
    theta = fields.number("rope_theta", 10000.0) if theta is None else scaling.number("rope_theta")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    nested = [name for name, value in scaling.values.items() if isinstance(value, dict)]
    if kind not in ("default", "llama3") or nested:
        raise ConfigError(
            f"{fields.path}: rope type is {nested or kind!r}; expected 'default' or 'llama3', "
            "one for all layers"
        )
    scaling.refuse("partial_rotary_factor", allowed=(1, 1.0), why="RoPE turns whole heads here")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = scaling.number("factor")
    if factor < 1.0:
        raise ConfigError(f"{fields.path}: rope factor is {factor}; expected at least 1")
    return RopeConfig(
        theta=theta,
        factor=factor,
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.integer("original_max_position_embeddings"),
    )


def _eos_ids(fields: _Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise CheckpointError(
            f"{fields.path}: eos_token_id is {value!r}; expected an integer or a list of them"
        )
    return ids


def _check_eagle3_variant(fields: _Fields, layer: _Fields, *, speculators: bool) -> None:
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


def _check_plain_architecture(fields: _Fields) -> None:
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


def _aux_layer_ids(fields: _Fields, num_layers: int) -> tuple[int, ...]:
    """Input-of-layer ids; a first id of 1 marks the output-of-layer convention.

    L = 32: [2, 16, 29] (inputs) and [1, 15, 28] (outputs) are the same captures.
    """
    value = fields.table("eagle_config").get(AUX_IDS)
    value = fields.get(AUX_IDS) if value is None else value
    if value is None:
        return Eagle3Config.default_aux_layer_ids(num_layers)
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        raise CheckpointError(f"{fields.path}: {AUX_IDS} is {value!r}; expected a list of layers")
    ids = tuple(item + 1 for item in value) if value[0] == 1 else tuple(value)
    if min(ids) < 0 or max(ids) > num_layers:
        raise CheckpointError(
            f"{fields.path}: {AUX_IDS} is {value!r}; expected layers of a target of {num_layers}"
        )
    return ids
