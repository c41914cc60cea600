"""EAGLE-3 heads in the layouts of EAGLE, SpecForge, SGLang and speculators, to and from params.

Canonical names are speculators' (`layers.0.*`); `midlayer.*` and a leading `model.` mean the same.
The vocabulary map is stored as an offset: target id = draft id + d2t[draft id]. t2d is the mask of
target ids that have a draft id. For V = 6 and draft ids of targets 1, 2, 5:
d2t = [1, 1, 3], t2d = [0, 1, 1, 0, 0, 1], draft_ids = [1, 2, 5].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.core.config import Eagle3Config
from jspec.core.config_io import eagle3_config_json
from jspec.core.errors import CheckpointError
from jspec.models.hf_llama import (
    block_shapes,
    is_inv_freq,
    norm,
    read_block,
    stored_block,
)
from jspec.models.hf_weights import (
    HostArray,
    Shape,
    Tensors,
    check_stored,
    kernel,
    open_tensors,
    stored,
    vector_or_table,
    write_checkpoint,
)
from jspec.models.llama import Params

LAYER = "layers.0."
VARIANTS = {
    "fc_norm.": "norms of the aux features before fc",
    "input_norm.": "a norm of the concatenated aux features before fc",
    "fc.bias": "a bias in fc",
    "layers.1.": "a head of more than one layer",
    "layers.0.self_attn.q_norm.": "a norm of q",
    "layers.0.self_attn.k_norm.": "a norm of k",
    "layers.0.self_attn.qkv_proj.": "q, k and v in one tensor",
    "layers.0.self_attn.o_proj.bias": "a bias in o_proj",
    "mask_hidden": "parallel drafting",
}


def load_eagle3(
    path: Path,
    config: Eagle3Config,
    *,
    target_params: Params,
    dtype: npt.DTypeLike,
    shards: int = 1,
) -> Params:
    """Host params (numpy, `dtype`; draft_ids int32[U], absolute target ids) of a head.

    Where the file has no embedding, `embed.table` is the target's very array (on a device, if
    the target is). Where it has no lm_head and U = V, `lm_head.kernel` is the target's likewise.
    Raises CheckpointError for a file that is unreadable, does not fit `config`, is a variant that
    is not served, or whose d2t and t2d contradict each other.
    """
    expected, optional = _shapes(config)
    with open_tensors(path, canonical=canonical_name) as tensors:
        _refuse_variants(tensors)
        tensors.check(expected, optional=optional, is_stray=_is_stray)
        layer = {
            name: norm(tensors, f"{LAYER}{stored_name}", dtype=dtype)
            for name, stored_name in (
                ("input_norm", "input_layernorm"),
                ("hidden_norm", "hidden_norm"),
            )
        }
        wide = 2 * config.layer.hidden_size
        return {
            "embed": {"table": _embed_table(tensors, config, target_params, dtype=dtype)},
            "fc": {"kernel": kernel(tensors, "fc.weight", dtype=dtype)},
            "layer": layer
            | read_block(tensors, LAYER, config.layer, in_size=wide, dtype=dtype, shards=shards),
            "norm": norm(tensors, "norm", dtype=dtype),
            "lm_head": {"kernel": _lm_head(tensors, config, target_params, dtype=dtype)},
            "draft_ids": _draft_ids(tensors, config),
        }


def save_eagle3(
    path: Path,
    config: Eagle3Config,
    params: Params,
    *,
    dtype: npt.DTypeLike,
    include_embed: bool = False,
) -> None:
    """Writes unsharded params as a LlamaForCausalLMEagle3 (names with `midlayer.`).

    d2t and t2d are left out when U = V, where the map is the identity.
    Raises CheckpointError for draft_ids that do not ascend within [0, V), ConfigError for aux ids
    that readers would misread (see config_io.eagle3_config_json).
    """
    layer, prefix = params["layer"], "midlayer."
    tensors = stored_block(prefix, config.layer, layer, dtype=dtype)
    tensors.pop(f"{prefix}self_attn.o_proj.bias", None)  # heads have it neither stored nor served
    for name, value in (
        ("fc.weight", params["fc"]["kernel"]),
        ("norm.weight", params["norm"]["scale"]),
        ("lm_head.weight", params["lm_head"]["kernel"]),
        (f"{prefix}input_layernorm.weight", layer["input_norm"]["scale"]),
        (f"{prefix}hidden_norm.weight", layer["hidden_norm"]["scale"]),
    ):
        tensors[name] = stored(value, dtype=dtype)
    if include_embed:
        table = np.asarray(params["embed"]["table"])
        tensors["embed_tokens.weight"] = np.ascontiguousarray(table, dtype=dtype)
    tensors |= _stored_vocabulary(np.asarray(params["draft_ids"]), config)
    expected, optional = _shapes(config)
    known = expected | optional
    check_stored(
        {canonical_name(name): value for name, value in tensors.items()},
        {name: known[name] for name in expected.keys() | _optional_names(config, include_embed)},
    )
    write_checkpoint(path, eagle3_config_json(config, dtype=np.dtype(dtype).name), tensors)


def canonical_name(name: str) -> str:
    """model.midlayer.x, midlayer.x, model.layers.0.x and layers.0.x are all layers.0.x."""
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _shapes(config: Eagle3Config) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """(tensors that must be there, tensors that may be)."""
    V, U, E = config.layer.vocab_size, config.draft_vocab_size, config.layer.hidden_size
    required: dict[str, Shape] = {
        "fc.weight": (E, len(config.aux_layer_ids) * config.target_hidden_size),
        "norm.weight": (E,),
        f"{LAYER}input_layernorm.weight": (E,),
        f"{LAYER}hidden_norm.weight": (E,),
        **block_shapes(LAYER, config.layer, in_size=2 * E),
    }
    optional: dict[str, Shape] = {"embed_tokens.weight": (V, E), "t2d": (V,)}
    vocabulary: dict[str, Shape] = {"lm_head.weight": (U, E), "d2t": (U,)}
    if U == V:
        return required, optional | vocabulary
    return required | vocabulary, optional


def _optional_names(config: Eagle3Config, include_embed: bool) -> set[str]:
    """The optional tensors that `save_eagle3` writes."""
    names = {"lm_head.weight"}
    if include_embed:
        names.add("embed_tokens.weight")
    if config.draft_vocab_size != config.layer.vocab_size:
        names.add("t2d")
    return names


def _refuse_variants(tensors: Tensors) -> None:
    for name in tensors.sources:
        for prefix, reason in VARIANTS.items():
            if name.startswith(prefix):
                raise CheckpointError(
                    f"{tensors.path}: tensor {name} of shape {tensors.shape(name)} means "
                    f"{reason}, which is not served; expected a plain EAGLE-3 head"
                )


def _is_stray(name: str) -> bool:
    """RoPE tables, and speculators' copies of the verifier's own norm and lm_head."""
    return is_inv_freq(name) or name.startswith("verifier_")


def _embed_table(
    tensors: Tensors, config: Eagle3Config, target_params: Params, *, dtype: npt.DTypeLike
) -> Any:
    if "embed_tokens.weight" in tensors:
        return vector_or_table(tensors, "embed_tokens.weight", dtype=dtype)
    table = target_params["embed"]["table"]
    expected = (config.layer.vocab_size, config.layer.hidden_size)
    if tuple(table.shape) != expected:
        raise CheckpointError(
            f"{tensors.path}: no tensor embed_tokens.weight; expected shape {expected}, and the "
            f"target's table of shape {tuple(table.shape)} cannot stand in for it"
        )
    return table


def _lm_head(
    tensors: Tensors, config: Eagle3Config, target_params: Params, *, dtype: npt.DTypeLike
) -> Any:
    if "lm_head.weight" in tensors:
        return kernel(tensors, "lm_head.weight", dtype=dtype)
    shared = target_params["lm_head"]["kernel"]
    expected = (config.layer.hidden_size, config.draft_vocab_size)
    if tuple(shared.shape) != expected:
        raise CheckpointError(
            f"{tensors.path}: no tensor lm_head.weight; expected shape {expected[::-1]}, and the "
            f"target's kernel of shape {tuple(shared.shape)} cannot stand in for it"
        )
    return shared


def _draft_ids(tensors: Tensors, config: Eagle3Config) -> HostArray:
    """i32[U] absolute target ids, each in [0, V) and only once."""
    V, U = config.layer.vocab_size, config.draft_vocab_size
    ids = np.arange(U, dtype=np.int64)
    if "d2t" in tensors:
        offsets = tensors.read("d2t")
        if offsets.dtype.kind not in "iu":
            raise CheckpointError(
                f"{tensors.path}: d2t has dtype {offsets.dtype}; expected integers"
            )
        ids = ids + offsets
    if ids.min() < 0 or ids.max() >= V or np.unique(ids).size != U:
        raise CheckpointError(
            f"{tensors.path}: d2t gives target ids from {ids.min()} to {ids.max()}, "
            f"{np.unique(ids).size} of them distinct; expected {U} distinct ids in [0, {V})"
        )
    if "t2d" in tensors:
        mask = tensors.read("t2d").astype(bool)
        if mask.sum() != U or not np.array_equal(np.flatnonzero(mask), ids):
            raise CheckpointError(
                f"{tensors.path}: t2d marks {mask.sum()} target ids that are not the {U} of d2t; "
                "expected where(t2d) == d2t + arange"
            )
    return ids.astype(np.int32)


def _stored_vocabulary(ids: HostArray, config: Eagle3Config) -> dict[str, HostArray]:
    V, U = config.layer.vocab_size, config.draft_vocab_size
    if ids.shape != (U,) or ids[0] < 0 or ids[-1] >= V or np.any(np.diff(ids) <= 0):
        raise CheckpointError(
            f"draft_ids has shape {ids.shape} and runs from {ids[:1]} to {ids[-1:]}; expected "
            f"{U} ascending target ids in [0, {V})"
        )
    if U == V:
        return {}
    mask = np.zeros(V, dtype=bool)
    mask[ids] = True
    return {"d2t": ids.astype(np.int64) - np.arange(U), "t2d": mask}
