"""Parameter tables of whole decoders, and of the attention kinds that only targets have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jspec.models.layer_params import (
    attention_params,
    ffn_params,
    kv_scales,
    lm_head,
    norm,
    product,
)
from jspec.models.params import FLOAT32, Form, Init, Order, ParamSpec, ParamTable, Part, prefixed
from jspec.spec.layers.attention import LatentAttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.model_spec import Mixer, ModelSpec
from jspec.spec.weight_format import Op


def decoder_params(
    spec: ModelSpec,
    *,
    ffn: Callable[..., ParamTable] = ffn_params,
    delta: Callable[..., ParamTable] | None = None,
    sinks: tuple[str, ...] = ("sinks",),
) -> ParamTable:
    """Declare a decoder under transformers' Llama names. ffn, delta: (spec, size=E) -> the table of
    a feed-forward, of a gated delta net."""
    V, E = spec.vocab_size, spec.hidden_size
    table_part = Part(name="model.embed_tokens.weight", shape=(V, E), size=E, form=Form.AS_IS)
    table: list[ParamSpec] = [
        ParamSpec(path=("embed", "table"), shape=(V, E), layouts=((table_part,),), init=Init.TABLE)
    ]
    for i, layer in enumerate(spec.layers):
        own = (
            norm("input_norm", "input_layernorm", E),
            *mixer_params(layer.attention, size=E, sinks=sinks, delta=delta),
            norm("post_norm", "post_attention_layernorm", E),
            *ffn(layer.ffn, size=E),
        )
        table += prefixed(own, path=("layers", i), stored=f"model.layers.{i}.")
    table.append(norm("norm", "model.norm", E))
    table.append(lm_head(E, V, tied=spec.tie_word_embeddings))
    return tuple(table)


def mixer_params(
    spec: Mixer,
    *,
    size: int,
    sinks: tuple[str, ...],
    in_size: int | None = None,
    delta: Callable[..., ParamTable] | None = None,
) -> ParamTable:
    """Declare the `attention` of a layer, of any kind. in_size: input size of plain attention.
    delta: declares a gated delta net; None: as in Qwen3.5."""
    if isinstance(spec, DeltaNetSpec):
        return (delta or delta_params)(spec, size=size)
    if isinstance(spec, LatentAttentionSpec):
        return latent_params(spec, size=size)
    return attention_params(spec, in_size=in_size or size, out_size=size, sinks=sinks)


def latent_params(spec: LatentAttentionSpec, *, size: int) -> ParamTable:
    """Declare latent attention under DeepSeek-V2's names. kv_b_proj has K, then V, per head."""
    H, D, rank = spec.num_heads, spec.head_dim, spec.kv_rank
    of_head = spec.nope_dim + spec.value_dim
    queries: ParamTable
    if spec.q_rank is None:
        queries = product(("q",), size, (("q_proj", H * D, H),), axes=("embed", "heads"))
    else:
        queries = (
            *product(("q_a",), size, (("q_a_proj", spec.q_rank, 1),), axes=("embed", "latent")),
            norm("q_a_norm", "q_a_layernorm", spec.q_rank),
            *product(("q",), spec.q_rank, (("q_b_proj", H * D, H),), axes=("latent", "heads")),
        )
    ups = tuple(
        ParamSpec(
            path=(path, "kernel"),
            shape=(rank, H * width),
            layouts=(
                (
                    Part(
                        name="kv_b_proj.weight",
                        shape=(H * of_head, rank),
                        size=H * width,
                        num_blocks=H,
                        first=first,
                        stride=of_head,
                    ),
                ),
            ),
            axes=("latent", "heads"),
            order=Order.COLUMNS,  # by heads, as the absorbed products are
        )
        for path, first, width in (
            ("k_up", 0, spec.nope_dim),
            ("v_up", spec.nope_dim, spec.value_dim),
        )
    )
    table = (
        *queries,
        *product(
            ("kv_a",),
            size,
            (("kv_a_proj_with_mqa", rank + spec.rope_dim, 1),),
            axes=("embed", "latent"),
        ),
        norm("kv_a_norm", "kv_a_layernorm", rank),
        *ups,
        *product(("out",), H * spec.value_dim, (("o_proj", size, 1),), axes=("heads", "embed")),
        *kv_scales(spec),
        *indexer_params(spec, size=size),
    )
    return prefixed(table, path=("attention",), stored="self_attn.")


def indexer_params(spec: LatentAttentionSpec, *, size: int) -> ParamTable:
    """Declare a layer's indexer under DeepSeek-V3.2's names; every shard has all of it."""
    indexer, rank = spec.indexer, spec.q_rank
    if indexer is None or rank is None:
        return ()
    H, D = indexer.num_heads, indexer.head_dim
    bias = Part(name="k_norm.bias", shape=(D,), size=D, form=Form.AS_IS)
    (weights,) = product(("weights",), size, (("weights_proj", H, 1),), op=None)
    table = (
        *product(("q",), rank, (("wq_b", H * D, 1),)),
        *product(("k",), size, (("wk", D, 1),)),
        norm("k_norm", "k_norm", D),
        ParamSpec(path=("k_norm", "bias"), shape=(D,), layouts=((bias,),), init=Init.ZEROS),
        replace(weights, format=FLOAT32),  # the published code computes them in float32
    )
    return prefixed(table, path=("indexer",), stored="indexer.")


def delta_params(spec: DeltaNetSpec, *, size: int) -> ParamTable:
    H = spec.num_heads
    keys, values = spec.num_key_heads * spec.key_dim, H * spec.value_dim
    blocks = ((keys, spec.num_key_heads), (keys, spec.num_key_heads), (values, H))

    def channels(name: str, *widths: int) -> tuple[Part, ...]:
        """Return queries, keys and values as parts of one tensor [C, *widths]."""
        firsts = (0, keys, 2 * keys)
        return tuple(
            Part(
                name=name,
                shape=(spec.conv_dim, *widths),
                size=count,
                num_blocks=num_blocks,
                first=first,
            )
            for first, (count, num_blocks) in zip(firsts, blocks, strict=True)
        )

    def of_heads(path: str, name: str) -> ParamSpec:
        part = Part(name=name, shape=(H,), size=H, num_blocks=H, form=Form.AS_IS)
        return ParamSpec(
            path=("decay", path),
            shape=(H,),
            layouts=((part,),),
            axes=("heads",),
            init=Init.ZEROS,
            format=FLOAT32,
        )

    table = (
        ParamSpec(
            path=("qkv", "kernel"),
            shape=(size, spec.conv_dim),
            layouts=(channels("in_proj_qkv.weight", size),),
            axes=("embed", "heads"),
            op=Op.LINEAR,
        ),
        *product(("gate",), size, (("in_proj_z", values, H),), axes=("embed", "heads")),
        *product(
            ("steps",),
            size,
            (("in_proj_b", H, H), ("in_proj_a", H, H)),
            axes=("embed", "heads"),
            op=None,
        ),
        ParamSpec(
            path=("conv", "kernel"),
            shape=(spec.conv_size, spec.conv_dim),
            layouts=(channels("conv1d.weight", 1, spec.conv_size),),
            axes=(None, "heads"),
            format=FLOAT32,  # as the convolution reads it
        ),
        of_heads("log", "A_log"),
        of_heads("bias", "dt_bias"),
        norm("norm", "norm", spec.value_dim),
        *product(("out",), values, (("out_proj", size, 1),), axes=("heads", "embed")),
    )
    return prefixed(table, path=("attention",), stored="linear_attn.")
