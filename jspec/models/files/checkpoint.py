"""A target's checkpoint: reading and writing its ModelSpec (config.json) and its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.config.expert_placement import ExpertMap
from jspec.errors import CheckpointError, NoCheckpointError, RequestError, reason_of
from jspec.files.json_files import exists, in_file, read_fields
from jspec.messages.request import SamplingParams
from jspec.models.family import eos_ids
from jspec.models.files.kv_scales import is_kv_scale
from jspec.models.files.stored.layouts import check_names, chosen_layout, packed_bytes
from jspec.models.files.stored.param_reads import Place, on_host, param_reads
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import Tensors, write_checkpoint
from jspec.models.files.w8a8 import coded_bytes, open_tensors
from jspec.models.params import ParamTable, with_expert_map, with_formats
from jspec.models.placement import nested
from jspec.models.registry import family_named, family_of, table_of
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import ModelSpec
from jspec.spec.weight_format import W8A8, Formats

GIB = 1 << 30
LAYOUT = "a checkpoint in Hugging Face's layout (config.json, model.safetensors, tokenizer.json)"
MOST_EXPERTS = 1 << 17  # in all layers together, more than any model has
log = logging.getLogger(__name__)


def check_directory(name: str, path: Path) -> None:
    """Raise NoCheckpointError unless `path` is a checkpoint. name: the setting's, for errors."""
    try:
        is_directory, has_config = path.is_dir(), (path / "config.json").exists()
    except OSError as error:  # the name is too long, or access is denied
        raise NoCheckpointError(
            f"{name} is {str(path)!r}: {reason_of(error)}; expected a directory with {LAYOUT}"
        ) from error
    if not is_directory:
        raise NoCheckpointError(f"{name} is {str(path)!r}; expected a directory with {LAYOUT}")
    if not has_config:
        raise NoCheckpointError(
            f"{name} is {str(path)!r}, a directory without config.json; expected one with {LAYOUT}"
        )


def load_model_spec(path: Path) -> ModelSpec:
    """Return config.json's spec; generation_config.json's end-of-sequence ids take precedence."""
    fields = read_fields(path / "config.json")
    with in_file(fields.path):
        spec = family_of(fields.architecture(), fields.path).read(fields)
    _check_experts(spec, fields.path)
    generation = path / "generation_config.json"
    if exists(generation):
        overrides = read_fields(generation)
        if overrides.get("eos_token_id") is not None:
            spec = replace(spec, eos_token_ids=eos_ids(overrides))
    return spec


def _check_experts(spec: ModelSpec, path: Path) -> None:
    ffns = (ffn for layer in spec.layers for ffn in layer.ffns)
    count = sum(ffn.num_experts for ffn in ffns if isinstance(ffn, MoESpec))
    if count > MOST_EXPERTS:
        raise CheckpointError(
            f"{path}: num_hidden_layers is {spec.num_layers} and the layers have {count} experts; "
            f"expected at most {MOST_EXPERTS} in all"
        )


def warn_of_ends(path: Path, spec: ModelSpec) -> None:
    beyond = [token_id for token_id in spec.eos_token_ids if token_id >= spec.vocab_size]
    if beyond:
        log.warning(
            "%s: eos_token_id %s is beyond vocab_size %d: no text will end by it",
            *(path, ", ".join(map(str, beyond)), spec.vocab_size),
        )


def load_sampling_defaults(path: Path) -> dict[str, Any]:
    """Return generation_config.json's parameters by SamplingParams' names; {} without the file."""
    generation = path / "generation_config.json"
    if not exists(generation):
        return {}
    fields = read_fields(generation)
    named: tuple[str, ...] = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    is_greedy = fields.get("do_sample") is False or fields.get("temperature") == 0
    if is_greedy:
        named = ("repetition_penalty",)
    found = {name: fields.get(name) for name in named if fields.get(name) is not None}
    if is_greedy:
        found["temperature"] = 0.0
    if found.get("top_k") == 0:  # transformers' value for no limit
        del found["top_k"]
    try:
        SamplingParams.from_mapping(found)
    except RequestError as error:
        raise CheckpointError(f"{generation}: {error}") from error
    return found


def load_target(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: npt.DTypeLike,
    shards: int = 1,
    place: Place = on_host,
    formats: Formats = (),
    experts: ExpertMap = (),
) -> dict[str, Any]:
    """Load a checkpoint's params (`dtype`), sharded over `shards`, to where `place` puts them.

    formats: of products whose weights are not dense. experts: the map of placed experts. Raises
    CheckpointError if a file does not fit `spec`, ConfigError if a weight cannot be sharded.
    """
    table = with_formats(with_expert_map(table_of(spec), experts), formats)
    with open_tensors(path) as tensors:
        check_names(tensors, table, is_stray=_stray_of(spec))
        _log_unread(tensors, spec)
        packed, unpacked = packed_bytes(tensors, table, dtype=dtype)
        if packed:
            log.info(
                "%s: packed weights of %.2f GiB are unpacked to %s and take %.2f GiB",
                path,
                packed / GIB,
                np.dtype(dtype).name,
                unpacked / GIB,
            )
        for kind, coded in coded_bytes(tensors, without=_kept_packed(tensors, table)).items():
            log.info(
                "%s: weights in %s of %.2f GiB are unpacked to %s and take %.2f GiB",
                path,
                kind,
                coded / GIB,
                np.dtype(dtype).name,
                coded * np.dtype(dtype).itemsize / GIB,
            )
        placed = place(param_reads(tensors, table, dtype=dtype, shards=shards))
        return nested(placed.items())


def _kept_packed(tensors: Tensors, table: ParamTable) -> set[str]:
    kept = (spec for spec in table if isinstance(spec.format, W8A8))
    return {name for spec in kept for part in chosen_layout(tensors, spec) for name in part.names}


def check_target(path: Path, spec: ModelSpec, *, formats: Formats = ()) -> None:
    """Raise one CheckpointError for all tensors whose headers do not fit `spec`."""
    with open_tensors(path) as tensors:
        check_names(tensors, with_formats(table_of(spec), formats), is_stray=_stray_of(spec))


def save_target(
    path: Path,
    spec: ModelSpec,
    params: dict[str, Any],
    *,
    dtype: npt.DTypeLike,
) -> None:
    """Write config.json and model.safetensors of unsharded params, without a tied lm_head."""
    family = family_named(spec.family)
    tensors = stored_tensors(family.table(spec), params, dtype=dtype)
    config = family.to_json(spec) | {"torch_dtype": np.dtype(dtype).name}
    write_checkpoint(path, config, tensors)


def _stray_of(spec: ModelSpec) -> Callable[[str], bool]:
    family = family_named(spec.family)
    ignored = family.unread + family.spare(spec)
    return lambda name: (
        is_inv_freq(name)
        or is_kv_scale(name)
        or name.startswith(ignored)
        or family.is_draft(spec, name)
    )


def _log_unread(tensors: Tensors, spec: ModelSpec) -> None:
    prefixes = family_named(spec.family).unread
    count = sum(name.startswith(prefixes) for name in tensors.sources)
    if count:
        log.info(
            "%s: %d tensors of %s are not read: only text is served",
            *(tensors.path, count, " and ".join(prefixes)),
        )


def is_inv_freq(name: str) -> bool:
    """Match the RoPE tables that old exports store; jspec computes them."""
    return name.endswith("rotary_emb.inv_freq")
