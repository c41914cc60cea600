"""Llama checkpoints in Hugging Face's layout, to and from jspec's params.

Source of names and shapes: transformers' LlamaForCausalLM and MistralForCausalLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.core.config import TransformerConfig
from jspec.core.config_io import transformer_config_json
from jspec.core.errors import CheckpointError
from jspec.models.hf_weights import (
    HostArray,
    Shape,
    Tensors,
    check_stored,
    fuse_bias,
    fuse_kernel,
    gate_up_placements,
    kernel,
    open_tensors,
    qkv_placements,
    stored,
    unfuse,
    vector_or_table,
    write_checkpoint,
)
from jspec.models.llama import Params


def load_llama(
    path: Path, config: TransformerConfig, *, dtype: npt.DTypeLike, shards: int = 1
) -> Params:
    """Host params (numpy, `dtype`) of a Llama checkpoint, fused for `shards` tensor shards.

    With tied embeddings lm_head's kernel is a transposed view of the table: no second copy.
    Raises CheckpointError for a file that is unreadable or does not fit `config`, ConfigError
    where `shards` does not divide the heads or the MLP.
    """
    expected = llama_shapes(config)
    tied = config.tie_word_embeddings
    optional = _output_bias_shapes(config)
    if tied:
        optional["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    with open_tensors(path) as tensors:
        tensors.check(expected, optional=optional, is_stray=is_inv_freq)
        table = vector_or_table(tensors, "model.embed_tokens.weight", dtype=dtype)
        if tied:
            _check_tied(tensors, table)
        layers = {
            i: {
                "input_norm": norm(tensors, f"model.layers.{i}.input_layernorm", dtype=dtype),
                **read_block(
                    tensors,
                    f"model.layers.{i}.",
                    config,
                    in_size=config.hidden_size,
                    dtype=dtype,
                    shards=shards,
                ),
            }
            for i in range(config.num_layers)
        }
        head = table.T if tied else kernel(tensors, "lm_head.weight", dtype=dtype)
        return {
            "embed": {"table": table},
            "layers": layers,
            "norm": norm(tensors, "model.norm", dtype=dtype),
            "lm_head": {"kernel": head},
        }


def save_llama(
    path: Path, config: TransformerConfig, params: Params, *, dtype: npt.DTypeLike
) -> None:
    """Writes unsharded params as a LlamaForCausalLM: config.json and model.safetensors.

    lm_head is left out when embeddings are tied; CheckpointError if it then is not the table.
    """
    table = np.asarray(params["embed"]["table"])
    tensors = {
        "model.embed_tokens.weight": np.ascontiguousarray(table, dtype=dtype),
        "model.norm.weight": stored(params["norm"]["scale"], dtype=dtype),
    }
    for i, layer in params["layers"].items():
        prefix = f"model.layers.{i}."
        tensors[f"{prefix}input_layernorm.weight"] = stored(
            layer["input_norm"]["scale"], dtype=dtype
        )
        tensors |= stored_block(prefix, config, layer, dtype=dtype)
    head = np.asarray(params["lm_head"]["kernel"])
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = stored(head, dtype=dtype)
    elif not np.array_equal(head, table.T):
        raise CheckpointError(
            "tie_word_embeddings is true but lm_head's kernel differs from the embedding table; "
            "expected them equal, since only the table is written"
        )
    check_stored(tensors, llama_shapes(config) | _output_bias_shapes(config))
    write_checkpoint(path, transformer_config_json(config, dtype=np.dtype(dtype).name), tensors)


def llama_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint of `config` must hold."""
    V, E = config.vocab_size, config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, E)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes[f"{prefix}input_layernorm.weight"] = (E,)
        shapes |= block_shapes(prefix, config, in_size=E)
    return shapes


def block_shapes(prefix: str, config: TransformerConfig, *, in_size: int) -> dict[str, Shape]:
    """Attention, its norm after and the MLP: what a decoder layer and an EAGLE-3 head share."""
    E, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        f"{prefix}self_attn.q_proj.weight": (q, in_size),
        f"{prefix}self_attn.k_proj.weight": (kv, in_size),
        f"{prefix}self_attn.v_proj.weight": (kv, in_size),
        f"{prefix}self_attn.o_proj.weight": (E, q),
        f"{prefix}post_attention_layernorm.weight": (E,),
        f"{prefix}mlp.gate_proj.weight": (inner, E),
        f"{prefix}mlp.up_proj.weight": (inner, E),
        f"{prefix}mlp.down_proj.weight": (E, inner),
    }
    if config.attention_bias:
        for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{prefix}self_attn.{name}.bias"] = (size,)
    return shapes


def read_block(
    tensors: Tensors,
    prefix: str,
    config: TransformerConfig,
    *,
    in_size: int,
    dtype: npt.DTypeLike,
    shards: int,
) -> dict[str, Any]:
    """`attention`, `post_norm` and `mlp` of one layer."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = qkv_placements(config, shards=shards)
    gate_up = gate_up_placements(config.intermediate_size, shards=shards)
    qkv_params = {"kernel": fuse_kernel(tensors, attention, qkv, in_size=in_size, dtype=dtype)}
    if config.attention_bias:
        qkv_params["bias"] = fuse_bias(tensors, attention, qkv, dtype=dtype)
        _check_output_bias(tensors, f"{attention}o_proj.bias")
    size = config.hidden_size
    return {
        "attention": {
            "qkv": qkv_params,
            "out": {"kernel": kernel(tensors, f"{attention}o_proj.weight", dtype=dtype)},
        },
        "post_norm": norm(tensors, f"{prefix}post_attention_layernorm", dtype=dtype),
        "mlp": {
            "gate_up": {"kernel": fuse_kernel(tensors, mlp, gate_up, in_size=size, dtype=dtype)},
            "down": {"kernel": kernel(tensors, f"{mlp}down_proj.weight", dtype=dtype)},
        },
    }


def stored_block(
    prefix: str, config: TransformerConfig, layer: Params, *, dtype: npt.DTypeLike
) -> dict[str, HostArray]:
    """Inverse of `read_block` for unsharded params."""
    attention, mlp = layer["attention"], layer["mlp"]
    qkv = qkv_placements(config, shards=1)
    gate_up = gate_up_placements(config.intermediate_size, shards=1)
    tensors = unfuse(attention["qkv"]["kernel"], qkv, f"{prefix}self_attn.", dtype=dtype)
    if config.attention_bias:
        tensors |= unfuse(attention["qkv"]["bias"], qkv, f"{prefix}self_attn.", dtype=dtype)
        tensors[f"{prefix}self_attn.o_proj.bias"] = np.zeros(config.hidden_size, dtype)
    tensors |= unfuse(mlp["gate_up"]["kernel"], gate_up, f"{prefix}mlp.", dtype=dtype)
    return tensors | {
        f"{prefix}self_attn.o_proj.weight": stored(attention["out"]["kernel"], dtype=dtype),
        f"{prefix}mlp.down_proj.weight": stored(mlp["down"]["kernel"], dtype=dtype),
        f"{prefix}post_attention_layernorm.weight": stored(
            layer["post_norm"]["scale"], dtype=dtype
        ),
    }


def norm(tensors: Tensors, name: str, *, dtype: npt.DTypeLike) -> dict[str, HostArray]:
    return {"scale": vector_or_table(tensors, f"{name}.weight", dtype=dtype)}


def is_inv_freq(name: str) -> bool:
    """Old exports store the RoPE table; jspec computes it."""
    return name.endswith("rotary_emb.inv_freq")


def _output_bias_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """transformers' attention_bias puts one on o_proj too; jspec's attention has none there."""
    if not config.attention_bias:
        return {}
    return {
        f"model.layers.{i}.self_attn.o_proj.bias": (config.hidden_size,)
        for i in range(config.num_layers)
    }


def _check_output_bias(tensors: Tensors, name: str) -> None:
    if name in tensors and np.any(tensors.weight(name)):
        raise CheckpointError(
            f"{tensors.path}: {name} is not zero; expected zeros, an output bias is not served"
        )


def _check_tied(tensors: Tensors, table: HostArray) -> None:
    name = "lm_head.weight"
    if name in tensors and not np.array_equal(tensors.weight(name).astype(table.dtype), table):
        raise CheckpointError(
            f"{tensors.path}: {name} differs from model.embed_tokens.weight; expected the same, "
            "since config.json ties them"
        )
