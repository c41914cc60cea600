"""Gemma 4's parameter table, under transformers' names or those of a model with media."""

from __future__ import annotations

from jspec.models.layer_params import attention_params, dense_params, lm_head, norm, product
from jspec.models.params import (
    FLOAT32,
    Form,
    Init,
    ParamPath,
    ParamSpec,
    ParamTable,
    Part,
    of_experts,
    or_nested,
    prefixed,
)
from jspec.spec.layers.feed_forward import DenseSpec, MoESpec
from jspec.spec.model_spec import ModelSpec
from jspec.spec.sandwich import SandwichSpec
from jspec.spec.weight_format import Op

NESTED = {"model.": "model.language_model."}


def table(spec: ModelSpec) -> ParamTable:
    V, E = spec.vocab_size, spec.hidden_size
    declared: list[ParamSpec] = [_embeddings(("embed", "table"), "model.embed_tokens", V, E)]
    layers = [layer for layer in spec.layers if isinstance(layer, SandwichSpec)]
    if size := sum(layer.token_size for layer in layers):
        name = "model.per_layer_{}"
        declared += [
            _embeddings(("tokens", "table"), "model.embed_tokens_per_layer", V, size),
            *product(
                ("tokens", "project"), E, ((name.format("model_projection"), size, 1),), op=None
            ),
            *prefixed(
                (norm("norm", name.format("projection_norm"), layers[0].token_size),),
                path=("tokens",),
                stored="",
            ),
        ]
    for i, layer in enumerate(layers):
        own = layer_params(layer, size=E)
        declared += prefixed(own, path=("layers", i), stored=f"model.layers.{i}.")
    declared.append(norm("norm", "model.norm", E))
    declared.append(lm_head(E, V, tied=spec.tie_word_embeddings))
    return or_nested(declared, NESTED)


def _embeddings(path: ParamPath, name: str, vocab_size: int, size: int) -> ParamSpec:
    shape = (vocab_size, size)
    part = Part(name=f"{name}.weight", shape=shape, size=size, form=Form.AS_IS)
    return ParamSpec(path=path, shape=shape, layouts=((part,),), init=Init.TABLE)


def _vector(path: ParamPath, name: str, size: int) -> ParamSpec:
    part = Part(name=name, shape=(size,), size=size, form=Form.AS_IS)
    return ParamSpec(path=path, shape=(size,), layouts=((part,),), init=Init.ONES, format=FLOAT32)


def layer_params(layer: SandwichSpec, *, size: int) -> ParamTable:
    P, after = layer.token_size, "post_feedforward_layernorm"
    assert isinstance(layer.ffn, DenseSpec)
    declared: ParamTable = (
        norm("input_norm", "input_layernorm", size),
        *attention_params(layer.softmax_attention, in_size=size, out_size=size),
        norm("attention_norm", "post_attention_layernorm", size),
        norm("post_norm", "pre_feedforward_layernorm", size),
        *dense_params(layer.ffn, size=size),
        norm("ffn_norm", after, size),
        _vector(("factor",), "layer_scalar", 1),
    )
    if layer.experts is not None:
        declared += (
            norm("mlp_out_norm", f"{after}_1", size),
            norm("experts_out_norm", f"{after}_2", size),
            norm("experts_norm", "pre_feedforward_layernorm_2", size),
            *prefixed(_expert_params(layer.experts, size=size), path=("moe",), stored=""),
        )
    if P:
        declared += (
            *product(("token_gate",), size, (("per_layer_input_gate", P, 1),), op=None),
            *product(("token_out",), P, (("per_layer_projection", size, 1),), op=None),
            norm("token_norm", "post_per_layer_input_norm", size),
        )
    return declared


def _expert_params(spec: MoESpec, *, size: int) -> ParamTable:
    X, inner = spec.num_experts, spec.inner
    gate_up = tuple(
        Part(
            name="experts.gate_up_proj",
            shape=(X, 2 * inner, size),
            size=inner,
            num_blocks=inner,
            first=first,
        )
        for first in (0, inner)
    )
    down = Part(name="experts.down_proj", shape=(X, size, inner), size=size)
    declared = (
        *product(("router",), size, (("router.proj", X, 1),), op=None),
        _vector(("router", "scale"), "router.scale", size),
        _vector(("router", "factors"), "router.per_expert_scale", X),
        ParamSpec(
            path=("experts", "gate_up"),
            shape=(X, size, 2 * inner),
            layouts=(gate_up,),
            axes=("experts", "embed", "expert_mlp"),
            op=Op.EXPERTS,
        ),
        ParamSpec(
            path=("experts", "down"),
            shape=(X, inner, size),
            layouts=((down,),),
            axes=("experts", "expert_mlp", "embed"),
            op=Op.EXPERTS,
        ),
    )
    return of_experts(declared, spec)


def spare(spec: ModelSpec) -> tuple[str, ...]:
    """Return prefixes of the stored K and V tensors of layers that read another layer's cache."""
    return tuple(
        f"{prefix}layers.{i}.self_attn.{name}."
        for prefix in ("model.", NESTED["model."])
        for i, layer in enumerate(spec.layers)
        if layer.attention.kv_of is not None
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
