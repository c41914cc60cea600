"""EAGLE-3 heads in the layouts of EAGLE, SpecForge, SGLang and speculators, to and from params.

Canonical names are speculators' (`layers.0.*`); `midlayer.*` and a leading `model.` mean the same.
The vocabulary map is stored as an offset: target id = draft id + d2t[draft id]. t2d is the mask of
target ids that have a draft id. For V = 6 and draft ids of targets 1, 2, 5:
d2t = [1, 1, 3], t2d = [0, 1, 1, 0, 0, 1], draft_ids = [1, 2, 5].
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.core.errors import CheckpointError
from jspec.core.model_spec import Eagle3Config
from jspec.models.checkpoint import is_inv_freq
from jspec.models.eagle3 import LAYER, eagle3_params
from jspec.models.eagle3_config import eagle3_config_json
from jspec.models.hf_weights import (
    HostArray,
    Shape,
    Tensors,
    listed,
    open_tensors,
    write_checkpoint,
)
from jspec.models.params import Form, ParamSpec, ParamTable, Part
from jspec.models.params import Path as ParamPath
from jspec.models.placement import nested
from jspec.models.stored import (
    ParamRead,
    Place,
    check_names,
    on_host,
    param_reads,
    stored_tensors,
)

Params = dict[str, Any]
EMBED, HEAD = ("embed", "table"), ("lm_head", "kernel")
VARIANTS = {
    "fc_norm.": "norms of the aux features before fc",
    "input_norm.": "a norm of the concatenated aux features before fc",
    "fc.bias": "a bias in fc",
    "layers.0.self_attn.q_norm.": "a norm of q",
    "layers.0.self_attn.k_norm.": "a norm of k",
    "layers.0.self_attn.qkv_proj.": "q, k and v in one tensor",
    "mask_hidden": "parallel drafting",
}
_SECOND_LAYER = re.compile(r"layers\.[1-9]")


def load_eagle3(
    path: Path,
    config: Eagle3Config,
    *,
    target_params: Params,
    dtype: npt.DTypeLike,
    shards: int = 1,
    place: Place = on_host,
) -> Params:
    """Params (`dtype`; draft_ids int32[U], absolute target ids) of a head, where `place` puts them.

    Where the file has no embedding, `embed.table` is the target's very array. Where it has no
    lm_head and U = V, `lm_head.kernel` is the target's likewise. On the host, all others are numpy.
    Raises CheckpointError for a file that is unreadable, does not fit `config`, is a variant that
    is not served, or whose d2t and t2d contradict each other.
    """
    specs = {spec.path: spec for spec in eagle3_params(config)}
    with open_tensors(path, canonical=canonical_name) as tensors:
        required = _check(tensors, config)
        own = [spec for spec in specs.values() if spec in required]
        shared: dict[ParamPath, Any] = {}
        if specs[HEAD] not in required and "lm_head.weight" in tensors:
            own.append(specs[HEAD])
        elif specs[HEAD] not in required:
            shared[HEAD] = _shared_head(tensors, config, target_params)
        if "embed_tokens.weight" in tensors:
            own.append(_stored_embed(specs[EMBED]))
        else:
            shared[EMBED] = _shared_embed(tensors, config, target_params)
        ids = _draft_ids(tensors, config)
        reads = param_reads(tensors, tuple(own), dtype=dtype, shards=shards)
        reads.append(ParamRead(spec=specs["draft_ids",], host_bytes=ids.nbytes, read=lambda: ids))
        return nested({**place(reads), **shared}.items())


def check_eagle3(path: Path, config: Eagle3Config) -> None:
    """Reads the headers alone: CheckpointError for a head that `load_eagle3` would refuse by them.

    For a caller that would load the target first.
    """
    with open_tensors(path, canonical=canonical_name) as tensors:
        _check(tensors, config)


def _check(tensors: Tensors, config: Eagle3Config) -> ParamTable:
    """What the file must hold, which it does: all of a head, or all but lm_head, where U = V."""
    _refuse_variants(tensors)
    is_midlayer = any("midlayer." in stored_name for _, stored_name in tensors.sources.values())
    if config.stated_num_layers != 1 and not is_midlayer:
        raise CheckpointError(
            f"{tensors.path}: num_hidden_layers is {config.stated_num_layers}; expected 1, a head "
            "of more than one layer is not served (the number counts for nothing only where the "
            "tensors are named midlayer)"
        )
    required = _own_table(config)
    if config.draft_vocab_size == config.layer.vocab_size:  # it may be the target's
        required = tuple(spec for spec in required if spec.path != HEAD)
    check_names(
        tensors,
        required,
        optional=_optional_shapes(config),
        is_stray=_is_stray,
        integers=("d2t", "t2d"),
    )
    return required


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
    that readers would misread (see eagle3_config.eagle3_config_json).
    """
    own = stored_tensors(_own_table(config), params, dtype=dtype)
    tensors = {
        f"midlayer.{name.removeprefix(LAYER)}" if name.startswith(LAYER) else name: value
        for name, value in own.items()
    }
    if include_embed:
        table = np.asarray(params["embed"]["table"])
        tensors["embed_tokens.weight"] = np.ascontiguousarray(table, dtype=dtype)
    tensors |= _stored_vocabulary(np.asarray(params["draft_ids"]), config)
    write_checkpoint(path, eagle3_config_json(config, dtype=np.dtype(dtype).name), tensors)


def canonical_name(name: str) -> str:
    """model.midlayer.x, midlayer.x, model.layers.0.x and layers.0.x are all layers.0.x."""
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _own_table(config: Eagle3Config) -> ParamTable:
    """The weights that a head's own file stores."""
    return tuple(spec for spec in eagle3_params(config) if spec.layouts)


def _optional_shapes(config: Eagle3Config) -> dict[str, Shape]:
    """Tensors that may be there beside the table's."""
    V, U, E = config.layer.vocab_size, config.draft_vocab_size, config.layer.hidden_size
    shapes: dict[str, Shape] = {"embed_tokens.weight": (V, E), "t2d": (V,), "d2t": (U,)}
    if U == V:
        shapes["lm_head.weight"] = (U, E)
    return shapes


def _refuse_variants(tensors: Tensors) -> None:
    """CheckpointError that names every tensor of a head that is not served, and what it means."""
    lines = [
        f"tensor {name} of shape {tensors.shape(name)} means {reason}, which is not served; "
        "expected a plain EAGLE-3 head"
        for name in tensors.sources
        if (reason := _variant(name)) is not None
    ]
    if lines:
        raise CheckpointError(f"{tensors.path}: {listed({'of such a head': lines})}")


def _variant(name: str) -> str | None:
    if _SECOND_LAYER.match(name):
        return "a head of more than one layer"
    return next((reason for start, reason in VARIANTS.items() if name.startswith(start)), None)


def _is_stray(name: str) -> bool:
    """RoPE tables, and speculators' copies of the verifier's own norm and lm_head."""
    return is_inv_freq(name) or name.startswith("verifier_")


def _stored_embed(spec: ParamSpec) -> ParamSpec:
    """The embedding as a weight that the head's own file stores."""
    part = Part(
        name="embed_tokens.weight", shape=spec.shape, size=spec.shape[-1], form=Form.AS_HELD
    )
    return replace(spec, layouts=((part,),))


def _shared_embed(tensors: Tensors, config: Eagle3Config, target_params: Params) -> Any:
    table = target_params["embed"]["table"]
    expected = (config.layer.vocab_size, config.layer.hidden_size)
    if tuple(table.shape) != expected:
        raise CheckpointError(
            f"{tensors.path}: no tensor embed_tokens.weight; expected shape {expected}, and the "
            f"target's table of shape {tuple(table.shape)} cannot stand in for it"
        )
    return table


def _shared_head(tensors: Tensors, config: Eagle3Config, target_params: Params) -> Any:
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
    if U != V and "d2t" not in tensors:
        raise CheckpointError(f"{tensors.path}: no tensor d2t; expected shape {(U,)}")
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
