"""The declaration of a model family, and readers of Hugging Face fields that most families have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.decoder_params import decoder_params
from jspec.models.heads.head_params import HeadNames
from jspec.models.params import ParamTable
from jspec.spec.head_spec import HeadSpec
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import DenseSpec, FeedForward
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.rope_io import TABLES, read_rope, rope_json

FULL, SLIDING = "full_attention", "sliding_attention"
CHAINS_NORMED, MASKS_FIRST = "chain_hidden_post_norm", "mask_first_embedding"
# For MtpFamily.known: keys read for most layers, and ignored keys of training losses.
OF_MTP_LAYERS = frozenset(("rms_norm_eps", "attention_bias", "aux_loss_alpha", "seq_aux"))
# For a single layer that every draft level runs again.
OF_RECURRENT_LAYERS = OF_MTP_LAYERS | {CHAINS_NORMED, MASKS_FIRST}

# Keys of text_config that a config with images may have outside of it.
OUTSIDE = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "quantization_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpFamily:
    """The layers for multi-token prediction in a family's checkpoints: their config and names."""

    read: Callable[[Fields, ModelSpec], HeadSpec]
    names: Callable[[ModelSpec], HeadNames]
    # config.json keys that `read` handles or that do not change the forward. Other keys that seem
    # to change it are refused (head_files.refuse_unknown).
    known: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A target family: reads and writes its config.json and declares its weights."""

    name: str
    architectures: tuple[str, ...]
    read: Callable[[Fields], ModelSpec]
    to_json: Callable[[ModelSpec], dict[str, Any]]
    table: Callable[[ModelSpec], ParamTable] = decoder_params
    mtp: MtpFamily | None = None  # if its checkpoints include a draft
    unread: tuple[str, ...] = ()  # prefixes of ignored tensors of other modalities
    # Prefixes of the text model's stored tensors that are unused.
    spare: Callable[[ModelSpec], tuple[str, ...]] = lambda _: ()

    def is_draft(self, spec: ModelSpec, name: str) -> bool:
        return self.mtp is not None and self.mtp.names(spec).is_layers(name)


def text_fields(fields: Fields) -> Fields:
    """Return the fields of the text model: text_config, if the model also reads images."""
    if fields.get("text_config") is None:
        return fields
    own, outer = fields.table("text_config"), fields.values
    tied = "tie_word_embeddings"
    if None not in (own.get(tied), fields.get(tied)) and own.get(tied) != fields.get(tied):
        raise CheckpointError(
            f"{fields.path}: {tied} is {shown(fields.get(tied))}, and in text_config "
            f"{shown(own.get(tied))}; expected one value"
        )
    outside = {name: outer[name] for name in OUTSIDE if own.get(name) is None and name in outer}
    return Fields(fields.path, {**own.values, **outside})


def read_decoder(
    fields: Fields,
    *,
    family: str,
    attention: AttentionSpec,
    ffn: Callable[[int], FeedForward],
    windows: tuple[int | None, ...],
    default_eps: float = 1e-6,
    default_max_position: int = 2048,
) -> ModelSpec:
    """Read the fields that decoders share. ffn: by layer index. windows: one per layer."""
    refuse_common(fields)
    eps = fields.number("rms_norm_eps", default_eps)
    return ModelSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=tuple(
            LayerSpec(attention=replace(attention, window=window), ffn=ffn(i), eps=eps)
            for i, window in enumerate(windows)
        ),
        rms_norm_eps=eps,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position=_max_position(fields, attention, default_max_position),
        eos_token_ids=eos_ids(fields),
        bos_token_id=bos_id(fields),
        family=family,
    )


def _max_position(fields: Fields, attention: AttentionSpec, default: int) -> int:
    """Return the longest context. Vicuna's 16k models have it in max_sequence_length."""
    context = fields.integer("max_position_embeddings", default)
    return fields.integer("max_sequence_length", context) if attention.rope.is_linear else context


def read_attention(
    fields: Fields,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    sinks: bool = False,
    default_head_dim: int | None = None,
) -> AttentionSpec:
    """Read heads, sizes and RoPE. Without num_key_value_heads every head has its own K and V."""
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if fields.get("head_dim") is None and default_head_dim is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.path}: hidden_size is {hidden_size}; expected head_dim as well, or a "
            f"multiple of num_attention_heads {num_heads}"
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", default_head_dim or hidden_size // num_heads),
        rope=read_rope(fields),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        sinks=sinks,
    )


def read_dense(fields: Fields, *, bias: bool = False) -> DenseSpec:
    return DenseSpec(inner=fields.integer("intermediate_size"), bias=bias)


def read_windows(
    fields: Fields, *, window: int | None, default: Callable[[int], str]
) -> tuple[int | None, ...]:
    """Return each layer's window by layer_types, or if absent by `default` of the layer index."""
    count = fields.integer("num_hidden_layers")
    types = fields.strings("layer_types") or tuple(default(i) for i in range(count))
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise ConfigError(
            f"{fields.path}: layer_types has {shown(unknown)}; expected {FULL!r} or {SLIDING!r}"
        )
    if len(types) != count:
        raise CheckpointError(
            f"{fields.path}: layer_types has {len(types)} entries; expected num_hidden_layers "
            f"{count}"
        )
    if SLIDING in types and window is None:
        raise CheckpointError(
            f"{fields.path}: layer_types has {SLIDING!r}, but there is no sliding_window; expected "
            "one"
        )
    return tuple(window if kind == SLIDING else None for kind in types)


def refuse_common(fields: Fields) -> None:
    for name in ("hidden_act", "hidden_activation"):
        fields.refuse(name, allowed=("silu", "swish"), why="only SwiGLU MLPs are served")
    fields.refuse("partial_rotary_factor", allowed=(1, 1.0), why="RoPE rotates whole heads here")


def refuse_windows(fields: Fields, *, kinds: tuple[str, ...] = (FULL,)) -> None:
    """Raise ConfigError for sliding windows. kinds: the allowed values in layer_types."""
    unknown = sorted(set(fields.strings("layer_types")) - set(kinds))
    if unknown:
        raise ConfigError(
            f"{fields.path}: layer_types has {shown(unknown)}; expected {FULL!r} only, for a draft "
            "without windows"
        )
    fields.refuse("use_sliding_window", allowed=(False,), why="a draft with a window is not served")


def without_partial_rotary(fields: Fields, *, default: float) -> tuple[Fields, float]:
    """Return (the fields without partial_rotary_factor, its value: the rotated share of a head)."""
    name = "partial_rotary_factor"
    factor = fields.table("rope_parameters").number(name, fields.number(name, default))
    values = {key: value for key, value in fields.values.items() if key != name}
    for table in TABLES:
        if values.get(table) is not None:
            kept = fields.table(table).values
            values[table] = {key: value for key, value in kept.items() if key != name}
    return Fields(fields.path, values), factor


def check_one_mtp_layer(fields: Fields) -> None:
    name = "num_nextn_predict_layers"
    if fields.get(name) != 1:
        raise ConfigError(
            f"{fields.path}: {name} is {shown(fields.get(name))}; expected 1: this family drafts "
            f"with one layer for multi-token prediction, which every step runs again"
        )


def feeds_normed(fields: Fields) -> bool:
    """Return whether a recurrent layer reads its own output after its final norm: transformers' key
    `chain_hidden_post_norm`, which no published config has. SGLang does, vLLM does not for
    DeepSeek."""
    return fields.flag(CHAINS_NORMED, True)


def masks_first(fields: Fields, default: bool) -> bool:
    """Return whether a recurrent layer reads zeros for the embedding at position 0: jspec's key
    `mask_first_embedding`. SGLang does so for MiMo-7B, vLLM also for DeepSeek."""
    return fields.flag(MASKS_FIRST, default)


def eos_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    return tuple(fields.token_id("eos_token_id", item) for item in ids)


def bos_id(fields: Fields) -> int | None:
    value = fields.get("bos_token_id")
    first = (value[0] if value else None) if isinstance(value, list) else value
    return None if first is None else fields.token_id("bos_token_id", first)


def decoder_json(spec: ModelSpec, *, architecture: str, model_type: str) -> dict[str, Any]:
    """Return config.json with transformers 4's keys, which version 5 also reads."""
    layer = spec.layers[0]
    attention = layer.softmax_attention
    eos = list(spec.eos_token_ids)
    dense = {"intermediate_size": layer.ffn.inner} if isinstance(layer.ffn, DenseSpec) else {}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        **dense,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        **rope_json(attention.rope),
        "tie_word_embeddings": spec.tie_word_embeddings,
        "max_position_embeddings": spec.max_position,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }
