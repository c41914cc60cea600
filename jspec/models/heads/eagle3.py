"""EAGLE-3 heads to and from params, in the layouts of EAGLE, SpecForge, SGLang and speculators.

The vocabulary map is stored as offsets: target id = draft id + d2t[draft id]. t2d is the mask of
target ids that have a draft id. For V = 6 and draft ids of targets 1, 2, 5: d2t = [1, 1, 3], t2d =
[0, 1, 1, 0, 0, 1], draft_ids = [1, 2, 5].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.errors import CheckpointError
from jspec.models.files.stored.param_reads import Place, on_host
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import HostArray, Tensors, listed, write_checkpoint
from jspec.models.files.w8a8 import open_tensors
from jspec.models.heads.eagle3_config import AUX_IDS, PARALLEL, eagle3_config_json
from jspec.models.heads.head_files import (
    LAYER,
    Params,
    canonical_name,
    check_vocabulary_names,
    is_stray,
    read_draft_ids,
    read_head,
    shared_with_target,
    speculators_json,
    stored_embed,
)
from jspec.models.heads.head_params import head_params
from jspec.models.params import ParamTable
from jspec.spec.head_spec import FeatureNorm, HeadSpec
from jspec.spec.weight_format import Formats

PARALLEL_STEPS = 8  # proposed in its file; any S can be served
# Tensors of variants, with what config.json must have for them. additional_layers is not served.
VARIANTS = {
    "fc_norm.": "an RMSNorm of each aux feature before fc; expected fc_norm true in config.json",
    "input_norm.": "an RMSNorm of all aux features before fc; expected norm_before_fc true in "
    "config.json",
    "fc.bias": "a bias in fc; expected bias true in config.json",
    "layers.0.self_attn.q_norm.": "a norm of q; expected model_type 'qwen3' in config.json",
    "layers.0.self_attn.k_norm.": "a norm of k; expected model_type 'qwen3' in config.json",
    "additional_layers.": "further layers of an earlier SGLang, whose forward drops the first "
    "layer's residual; expected layers.1 and so on, as its 0.5.23 reads them",
    "mask_hidden": "parallel drafting (P-EAGLE); expected parallel_drafting true and mask_token_id "
    "in config.json",
}


def load_eagle3(
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
    """Load a head's params (`dtype`; draft_ids int32[U], target ids) to where `place` puts them. An
    absent embedding is the target's own, and so is lm_head if U = V. Raises CheckpointError."""
    with open_tensors(path, canonical=canonical_name) as tensors:
        _check(tensors, spec)
        shares = shared_with_target(tensors, spec)
        own = [each for each in _own_table(spec) if each.path[0] not in shares]
        if "embed" not in shares:
            own.append(stored_embed(head_params(spec)[0]))
        return read_head(
            tensors,
            spec,
            own,
            shares=shares,
            ids=read_draft_ids(tensors, spec),
            hot_ids=hot_ids,
            target_params=target_params,
            dtype=dtype,
            shards=shards,
            place=place,
            formats=formats,
        )


def check_eagle3(path: Path, spec: HeadSpec) -> tuple[str, ...]:
    """Return the params that the file lacks, which are the target's. Raises CheckpointError."""
    with open_tensors(path, canonical=canonical_name) as tensors:
        _check(tensors, spec)
        return shared_with_target(tensors, spec)


def _check(tensors: Tensors, spec: HeadSpec) -> None:
    """Check the file's names and shapes; lm_head is optional if U = V."""
    _refuse_variants(tensors, spec)
    check_vocabulary_names(
        tensors,
        spec,
        head_params(spec),
        is_stray=lambda name: is_stray(name) or _is_unread(name, spec),
    )


def save_eagle3(
    path: Path,
    spec: HeadSpec,
    params: Params,
    *,
    dtype: npt.DTypeLike,
    include_embed: bool = False,
) -> None:
    """Write unsharded params as a LlamaForCausalLMEagle3, or a P-EAGLE head as a PEagleDraftModel.

    Names start with `midlayer.`, or with `layers.0.` for several layers or P-EAGLE. Raises
    CheckpointError for draft_ids that do not ascend within [0, V).
    """
    own = stored_tensors(_own_table(spec), params, dtype=dtype)
    first = "midlayer." if spec.layer.num_layers == 1 and spec.mask_token_id is None else LAYER
    tensors = {
        first + name.removeprefix(LAYER) if name.startswith(LAYER) else name: value
        for name, value in own.items()
    }
    if include_embed:
        table = np.asarray(params["embed"]["table"])
        tensors["embed_tokens.weight"] = np.ascontiguousarray(table, dtype=dtype)
    tensors |= _stored_vocabulary(np.asarray(params["draft_ids"]), spec)
    config_of = eagle3_config_json if spec.mask_token_id is None else parallel_json
    write_checkpoint(path, config_of(spec, dtype=np.dtype(dtype).name), tensors)


def parallel_json(spec: HeadSpec, *, dtype: str) -> dict[str, Any]:
    """Return config.json of a head that drafts in parallel (P-EAGLE), in speculators' layout."""
    layers = "qwen3" if spec.layer.layers[0].softmax_attention.qk_norm else "llama"
    return speculators_json(
        "peagle", spec.layer, layers=layers, num_steps=PARALLEL_STEPS, dtype=dtype
    ) | {
        "architectures": [PARALLEL],
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden_size,
        "mask_token_id": spec.mask_token_id,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.feature_norm is FeatureNorm.WHOLE,
        "fc_norm": spec.feature_norm is FeatureNorm.EACH,
        AUX_IDS: list(spec.aux_layer_ids),
    }


def _own_table(spec: HeadSpec) -> ParamTable:
    return tuple(each for each in head_params(spec) if each.layouts)


def _refuse_variants(tensors: Tensors, spec: HeadSpec) -> None:
    declared = {
        name
        for each in head_params(spec)
        for layout in each.layouts
        for part in layout
        for name in part.names
    }
    lines = [
        f"tensor {name} of shape {tensors.shape(name)} means {reason}"
        for name in tensors.sources
        if name not in declared and (reason := _variant(name)) is not None
    ]
    if lines:
        raise CheckpointError(f"{tensors.path}: {listed({'of such a head': lines})}")


def _variant(name: str) -> str | None:
    return next((reason for start, reason in VARIANTS.items() if name.startswith(start)), None)


def _is_unread(name: str, spec: HeadSpec) -> bool:
    """Match fc of a head that reads the last hidden, and a norm that config.json turns off."""
    is_fc = name == "fc.weight" and not spec.aux_layer_ids
    return is_fc or (name == "norm.weight" and not spec.norm_before_head)


def _stored_vocabulary(ids: HostArray, spec: HeadSpec) -> dict[str, HostArray]:
    V, U = spec.layer.vocab_size, spec.draft_vocab_size
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
