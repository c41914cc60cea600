"""EAGLE-1 heads (which EAGLE-2 uses too) in EAGLE's layout. lm_head is the target's, or its columns
of frequent ids (FR-Spec). HASS's `add_para_norm` norms embedding and feature before fc."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.errors import ConfigError
from jspec.files.json_files import Fields, in_file, read_fields
from jspec.models.family import refuse_windows
from jspec.models.files.stored.layouts import check_names
from jspec.models.files.stored.param_reads import Place, on_host
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import HostArray, Tensors, write_checkpoint
from jspec.models.files.w8a8 import check_quantization, open_tensors
from jspec.models.heads.head_files import (
    LAYER,
    Params,
    canonical_name,
    check_target,
    is_stray,
    read_head,
    read_layers,
    refuse_unknown,
    stored_embed,
    stored_names,
)
from jspec.models.heads.head_params import head_params
from jspec.models.params import ParamTable
from jspec.models.registry import family_named
from jspec.spec.head_spec import HeadSpec, eagle1_spec
from jspec.spec.model_spec import ModelSpec
from jspec.spec.weight_format import Formats

ARCHITECTURES = (
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2ForCausalLMEagle",
)
KNOWN = frozenset(
    ("rms_norm_eps", "bias", "qkv_bias", "attention_bias", "mlp_bias", "add_para_norm")
)


def load_eagle1_config(
    path: Path,
    *,
    target: ModelSpec,
    draft_rope_theta: float | None = None,
    reads_names: bool = True,
) -> HeadSpec:
    """Read an EAGLE-1 head's spec from `path`/config.json and check it against its target.

    fc, q, k and v have a bias as config.json or the tensors' names (if reads_names) show; by
    default fc has one. RoPE theta is 10000 by default. Raises ConfigError for an unserved setting,
    CheckpointError for a head of another target.
    """
    fields = read_fields(path / "config.json")
    names = stored_names(path) if reads_names else {}
    _check_kind(fields)
    has_fc_bias = fields.flag("bias", True) and (not names or "fc.bias" in names)
    with in_file(fields.path):
        layer = read_layers(
            fields,
            names,
            target=target,
            qkv_bias=fields.flag("qkv_bias", f"{LAYER}self_attn.q_proj.bias" in names),
            rope_theta=draft_rope_theta,
        )
    check_target(fields, layer, target, hidden_size=layer.hidden_size)
    return eagle1_spec(
        layer=layer,
        draft_vocab_size=layer.vocab_size,
        fc_bias=has_fc_bias,
        norms_inputs=fields.flag("add_para_norm", False),
    )


def _check_kind(fields: Fields) -> None:
    if fields.get("draft_vocab_size") is not None or fields.get("eagle_config") is not None:
        name = "draft_vocab_size" if "draft_vocab_size" in fields.values else "eagle_config"
        fields.refuse(name, allowed=(), why="an EAGLE-3 head: use --speculative-algorithm EAGLE3")
    is_eagle3 = fields.get("speculators_model_type") == "eagle3"
    why = "use --speculative-algorithm EAGLE3" if is_eagle3 else "speculators' layout is not read"
    fields.refuse("speculators_model_type", allowed=(), why=why)
    architecture = fields.architecture()
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{fields.path}: draft architecture is {architecture!r}; expected one of "
            f"{', '.join(ARCHITECTURES)} for an EAGLE-1 or EAGLE-2 head"
        )
    check_quantization(fields)
    refuse_windows(fields)
    refuse_unknown(fields, known=KNOWN)


def check_eagle1(path: Path, spec: HeadSpec) -> bool:
    """Return whether the embedding is the target's (the file lacks it). Raises CheckpointError."""
    with open_tensors(path, canonical=canonical_name) as tensors:
        _check(tensors, spec)
        return "embed_tokens.weight" not in tensors


def load_eagle1(
    path: Path,
    spec: HeadSpec,
    *,
    hot_ids: HostArray | None = None,
    target_params: Params,
    dtype: npt.DTypeLike,
    shards: int = 1,
    place: Place = on_host,
    formats: Formats = (),
) -> Params:
    """Load a head's params (`dtype`; draft_ids int32[U]) to where `place` puts them.

    lm_head is the target's own, or its columns hot_ids i32[U]; so is an absent embedding. Raises
    CheckpointError.
    """
    with open_tensors(path, canonical=canonical_name) as tensors:
        own, shares = list(_check(tensors, spec)), {"embed", "lm_head"}
        if "embed_tokens.weight" in tensors:
            own.append(stored_embed(head_params(spec)[0]))
            shares.remove("embed")
        return read_head(
            tensors,
            spec,
            own,
            shares=shares,
            ids=np.arange(spec.draft_vocab_size, dtype=np.int32),
            hot_ids=hot_ids,
            target_params=target_params,
            dtype=dtype,
            shards=shards,
            place=place,
            formats=formats,
        )


def save_eagle1(path: Path, spec: HeadSpec, params: Params, *, dtype: npt.DTypeLike) -> None:
    """Write unsharded params as a LlamaForCausalLMEagle; embedding and lm_head are the target's."""
    written = eagle1_config_json(spec, dtype=np.dtype(dtype).name)
    own = tuple(each for each in head_params(spec) if each.layouts)
    write_checkpoint(path, written, stored_tensors(own, params, dtype=dtype))


def eagle1_config_json(spec: HeadSpec, *, dtype: str) -> dict[str, Any]:
    """Return config.json as a LlamaForCausalLMEagle. Raises ConfigError if q and k are normed."""
    attention = spec.layer.one_layer.softmax_attention
    if attention.qk_norm:
        raise ConfigError(
            "the head norms q and k; expected it not to: the layout has no key for it"
        )
    written = family_named("llama").to_json(replace(spec.layer, tie_word_embeddings=False)) | {
        "torch_dtype": dtype,
        "architectures": ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"],  # SGLang's, vLLM's
        "attention_bias": attention.out_bias,
    }
    if not spec.fc_bias:  # vLLM would read a true `bias` as attention's
        written["bias"] = False
    unusual = {
        "qkv_bias": attention.qkv_bias and not attention.out_bias,
        "add_para_norm": spec.norms_pair,
    }
    return written | {k: v for k, v in unusual.items() if v}


def _check(tensors: Tensors, spec: HeadSpec) -> ParamTable:
    """Check the file and return the weights it must have; any lm_head in it is ignored."""
    required = tuple(each for each in head_params(spec) if each.layouts)
    table = (spec.layer.vocab_size, spec.layer.hidden_size)
    check_names(
        tensors,
        required,
        optional={"embed_tokens.weight": table},
        is_stray=lambda name: is_stray(name) or name.startswith("lm_head") or name in _UNREAD,
    )
    return required


# EAGLE's first layer has no such norm; files made from a decoder's template have its weight anyway.
_UNREAD = (f"{LAYER}input_layernorm.weight",)
