"""Gemma 4, text only: 12B, 26B-A4B, 31B, E2B and E4B (Gemma4ForCausalLM and variants).

Five layers with a window alternate with one of full attention, which has wider heads, its own
number of kv heads, in large models one projection for K and V, and RoPE on a quarter of its pairs.
Queries and keys are normed with a scale, values without; scores are not scaled. Each sub-layer has
a norm before and after it. Some models have an MoE in parallel to each MLP (26B-A4B), or token
embeddings for each layer and last layers that read an earlier layer's cache (E2B, E4B).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.families.gemma4_params import spare, table
from jspec.models.family import FULL, SLIDING, Family, bos_id, eos_ids, read_windows, text_fields
from jspec.models.files.w8a8 import check_quantization
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import DenseSpec, Gate, MoESpec, Routing
from jspec.spec.model_spec import ModelSpec
from jspec.spec.rope import RopeConfig
from jspec.spec.rope_io import read_rope, rope_json
from jspec.spec.sandwich import SandwichSpec

PLAIN, UNIFIED = "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"
WITH_MEDIA = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
EVERY = 6  # by default every sixth layer has full attention
PROPORTIONAL = "proportional"
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
GELU = "gelu_pytorch_tanh"
FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_activation": (GELU,),
    "use_bidirectional_attention": ("vision", False),  # among image tokens only
}
OWN_OF_LAYERS = ("head_dim", "num_key_value_heads")  # in per_layer_config
UNREAD = tuple(
    f"model.{name}."
    for name in ("vision_tower", "embed_vision", "vision_embedder", "audio_tower", "embed_audio")
)


def read(fields: Fields) -> ModelSpec:
    is_unified = fields.architecture().startswith("Gemma4Unified")
    fields = text_fields(fields)
    kinds = kinds_of(fields)
    layers = read_layers(fields, kinds, _sources(fields, kinds), is_unified=is_unified)
    for layer in layers:
        source = layer.attention.kv_of
        if source is not None and layer.attention.cache_entry != (
            wanted := layers[source].attention.cache_entry
        ):
            raise ConfigError(
                f"{fields.path}: a layer caches {layer.attention.cache_entry}; expected {wanted}, "
                f"the entry of layer {source}, whose cache it reads"
            )
    size, cap = fields.integer("hidden_size"), "final_logit_softcapping"
    return ModelSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=size,
        layers=layers,
        rms_norm_eps=layers[0].eps,
        embed_scale=size**0.5,
        logit_cap=None if fields.get(cap) is None else fields.number(cap),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        max_position=fields.integer("max_position_embeddings", 131072),
        eos_token_ids=eos_ids(fields),
        bos_token_id=bos_id(fields),
        family=FAMILY.name,
    )


def read_layers(
    fields: Fields,
    kinds: tuple[str, ...],
    sources: tuple[int | None, ...],
    *,
    is_unified: bool,
) -> tuple[SandwichSpec, ...]:
    """Read the layers of these kinds. sources: AttentionSpec.kv_of of each layer."""
    check_quantization(fields)
    for name, allowed in FIXED.items():
        fields.refuse(name, allowed=allowed, why="this family is served as it is published")
    window = fields.integer("sliding_window", 1024 if is_unified else 512)
    inner, doubled = fields.integer("intermediate_size"), fields.flag("use_double_wide_mlp", False)
    common: dict[str, Any] = {
        "eps": fields.number("rms_norm_eps", 1e-6),
        "experts": _experts(fields),
        "token_size": _token_size(fields, default=0 if is_unified else 256),
    }
    return tuple(
        SandwichSpec(
            attention=replace(
                _attention(fields, i, kind),
                window=window if kind == SLIDING else None,
                kv_of=source,
            ),
            ffn=DenseSpec(inner=inner * (2 if doubled and source is not None else 1), gelu=True),
            **common,
        )
        for i, (kind, source) in enumerate(zip(kinds, sources, strict=True))
    )


def kinds_of(fields: Fields) -> tuple[str, ...]:
    """Return the layers' kinds. The last layer is always full, as in transformers."""
    windows = read_windows(
        fields, window=1, default=lambda i: FULL if (i + 1) % EVERY == 0 else SLIDING
    )
    return (*(FULL if window is None else SLIDING for window in windows[:-1]), FULL)


def _sources(fields: Fields, kinds: tuple[str, ...]) -> tuple[int | None, ...]:
    """Return the layer whose cache a last layer shares: the last earlier one of its kind."""
    name = "num_kv_shared_layers"
    shared = fields.integer(name) if fields.get(name) else 0
    first = len(kinds) - shared
    owners = {kind: i for i, kind in enumerate(kinds[: max(first, 0)])}
    if set(owners) != set(kinds):
        raise ConfigError(
            f"{fields.path}: {name} is {shared}; expected fewer, so that a layer of each kind in "
            f"{shown(sorted(set(kinds)))} has a cache"
        )
    return tuple(owners[kind] if i >= first else None for i, kind in enumerate(kinds))


def _attention(fields: Fields, layer: int, kind: str) -> AttentionSpec:
    own = _of_layer(fields, layer, kind)
    head_dim = own.integer("head_dim", 256)
    return AttentionSpec(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=own.integer("num_key_value_heads"),
        head_dim=head_dim,
        rope=_rope(fields, kind),
        qk_norm=True,
        v_norm=True,
        k_is_v=kind == FULL and fields.flag("attention_k_eq_v", False),
        scale=1.0,
    )


def _of_layer(fields: Fields, layer: int, kind: str) -> Fields:
    """Return head_dim and kv heads of a layer; transformers 5.24 writes them layer by layer."""
    values = {name: fields.get(name) for name in OWN_OF_LAYERS}
    if fields.get("per_layer_config") is not None:
        own = fields.table("per_layer_config").table(str(layer)).values
        if unknown := sorted(set(own) - set(OWN_OF_LAYERS)):
            raise ConfigError(
                f"{fields.path}: per_layer_config has {shown(unknown)} for layer {layer}; expected "
                f"{' and '.join(OWN_OF_LAYERS)} alone"
            )
        return Fields(fields.path, {**values, **own})
    if kind == FULL:
        values["head_dim"] = fields.integer("global_head_dim", 512)
        given = fields.get("num_global_key_value_heads")
        if given is not None and fields.flag("attention_k_eq_v", False):
            values["num_key_value_heads"] = given
    return Fields(fields.path, values)


def _rope(fields: Fields, kind: str) -> RopeConfig:
    tables = fields.table("rope_parameters")
    if tables.values and tables.get(kind) is None:
        raise CheckpointError(
            f"{fields.path}: rope_parameters has no {kind}; expected one table for each kind of "
            "layer"
        )
    own = tables.table(kind).values or ROPES[kind]
    if own.get("rope_type") != PROPORTIONAL:
        inner: dict[str, Any] = {"rope_parameters": own}
        inner["max_position_embeddings"] = fields.get("max_position_embeddings")
        return read_rope(Fields(fields.path, inner))
    table = Fields(fields.path, own)
    factor, turned = table.number("factor", 1.0), table.number("partial_rotary_factor", 1.0)
    if turned > 1.0:
        raise ConfigError(f"{fields.path}: partial_rotary_factor is {turned}; expected at most 1")
    return RopeConfig(
        theta=table.number("rope_theta", 10000.0),
        factor=factor,
        is_linear=factor != 1.0,
        turned=turned,
    )


def _experts(fields: Fields) -> MoESpec | None:
    if not fields.flag("enable_moe_block", False):
        return None
    return MoESpec(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("top_k_experts"),
        inner=fields.integer("moe_intermediate_size"),
        routing=Routing.SOFTMAX_THEN_TOP_NORMALIZED,
        gate=Gate.GELU,
    )


def _token_size(fields: Fields, *, default: int) -> int:
    name = "hidden_size_per_layer_input"
    if fields.get(name) == 0:
        return 0
    size = fields.integer(name, default) if fields.get(name) or default else 0
    if size:
        fields.refuse(
            "vocab_size_per_layer_input",
            allowed=(fields.get("vocab_size"),),
            why="every token has embeddings for the layers",
        )
    return size


def _rope_json(attention: AttentionSpec) -> dict[str, Any]:
    rope = attention.rope
    if rope.turned == 1.0:
        old = rope_json(rope)
        return {"rope_theta": rope.theta, **(old["rope_scaling"] or {"rope_type": "default"})}
    return {
        "rope_type": PROPORTIONAL,
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.turned,
        "factor": rope.factor,
    }


def to_json(spec: ModelSpec) -> dict[str, Any]:
    layers = [layer for layer in spec.layers if isinstance(layer, SandwichSpec)]
    heads = [layer.softmax_attention for layer in layers]
    plain = next((a for a in heads if a.window is not None), heads[0])
    inners = [layer.ffn.inner for layer in layers]
    first, experts = layers[0], layers[0].experts
    written: dict[str, Any] = {
        "architectures": [PLAIN],
        "model_type": "gemma4_text",
        "vocab_size": spec.vocab_size,
        "vocab_size_per_layer_input": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "hidden_size_per_layer_input": first.token_size,
        "hidden_activation": GELU,
        "intermediate_size": inners[0],
        "use_double_wide_mlp": len(set(inners)) > 1,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": plain.num_heads,
        "num_key_value_heads": plain.num_kv_heads,
        "head_dim": plain.head_dim,
        "attention_k_eq_v": any(a.k_is_v for a in heads),
        "num_kv_shared_layers": sum(a.kv_of is not None for a in heads),
        "per_layer_config": {
            str(i): {"head_dim": a.head_dim, "num_key_value_heads": a.num_kv_heads}
            for i, a in enumerate(heads)
            if (a.head_dim, a.num_kv_heads) != (plain.head_dim, plain.num_kv_heads)
        },
        "layer_types": [FULL if a.window is None else SLIDING for a in heads],
        "sliding_window": plain.window,
        "rope_parameters": {FULL if a.window is None else SLIDING: _rope_json(a) for a in heads},
        "rms_norm_eps": spec.rms_norm_eps,
        "final_logit_softcapping": spec.logit_cap,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "max_position_embeddings": spec.max_position,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids) or None,
        "enable_moe_block": experts is not None,
    }
    if experts is None:
        return written
    return written | {
        "num_experts": experts.num_experts,
        "top_k_experts": experts.top_k,
        "moe_intermediate_size": experts.inner,
    }


FAMILY = Family(
    name="gemma4",
    architectures=(PLAIN, UNIFIED, *WITH_MEDIA),
    read=read,
    to_json=to_json,
    table=table,
    unread=UNREAD,
    spare=spare,
)
