"""Common parts of all heads' files: names, arrays shared with the target, unknown settings.
Canonical names are speculators' (`layers.0.*`); `midlayer.*` and a leading `model.` are aliases."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jspec.errors import CheckpointError, ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.family import read_attention, read_decoder, read_dense
from jspec.models.files.checkpoint import is_inv_freq
from jspec.models.files.kv_scales import is_kv_scale
from jspec.models.files.stored.layouts import check_names
from jspec.models.files.stored.param_reads import ParamRead, Place, param_reads
from jspec.models.files.stored.tensors import value_at
from jspec.models.files.tensor_files import HostArray, Shape, Tensors, has_tensors, open_tensors
from jspec.models.heads.head_params import DRAFT_IDS, EMBED, HEAD, draft_ids
from jspec.models.params import Form, ParamPath, ParamSpec, ParamTable, Part, with_formats
from jspec.models.placement import nested
from jspec.models.registry import family_named
from jspec.spec.block_spec import BlockSpec
from jspec.spec.head_spec import HeadSpec
from jspec.spec.model_spec import ModelSpec
from jspec.spec.weight_format import Formats

LAYER = "layers.0."
Params = dict[str, Any]
_NUMBER = re.compile(r"layers\.(\d+)\.")
# A key with one of these words may change the forward.
_WORDS = re.compile(
    r"norm|fc|aux|bias|scale|residual|draft|parallel|eagle|multiplier|softcap|gate|sink|mask"
)
# Keys that match _WORDS but do not change the forward.
_NEUTRAL = frozenset(
    (
        "embed_requires_grad",
        "router_aux_loss_coef",  # copied from a target's config
        "norm_topk_prob",
    )
)


def canonical_name(name: str) -> str:
    """Map model.midlayer.x, midlayer.x, model.layers.0.x and layers.0.x to layers.0.x."""
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def stored_names(path: Path) -> dict[str, str]:
    """Return stored names by canonical name; {} without weights. Raises CheckpointError."""
    if not has_tensors(path):
        return {}
    with open_tensors(path, canonical=canonical_name) as tensors:
        return {name: stored for name, (_, stored) in tensors.sources.items()}


def num_stored_layers(fields: Fields, names: Mapping[str, str], *, target: ModelSpec) -> int:
    """Return the number of a head's layers by its tensors' names, or without any by config.json. A
    `midlayer` head has one. Raises CheckpointError if the two disagree otherwise."""
    stated = fields.integer("num_hidden_layers", 1)
    found = {int(match[1]) for name in names if (match := _NUMBER.match(name))}
    if not found:
        return stated
    if found == {0} and any("midlayer." in stored for stored in names.values()):
        if stated not in (1, target.num_layers):
            raise CheckpointError(
                f"{fields.path}: num_hidden_layers is {stated}, but the weights beside it have one "
                f"layer (midlayer); expected 1, or its target's {target.num_layers}"
            )
        return 1
    if found != set(range(stated)):
        raise CheckpointError(
            f"{fields.path}: num_hidden_layers is {stated}, but the weights beside it have "
            f"{len(found)}: {shown(sorted(found))}; expected layers 0 to {stated - 1}"
        )
    return stated


def read_layers(
    fields: Fields,
    names: Mapping[str, str],
    *,
    target: ModelSpec,
    qkv_bias: bool,
    qk_norm: bool = False,
    rope_theta: float | None = None,
) -> ModelSpec:
    """Read a head's equal layers, with RoPE theta 10000 by default. qkv_bias: q, k and v have a
    bias even if o has none."""
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, qk_norm=qk_norm, qkv_bias=bias or qkv_bias, out_bias=bias)
    if rope_theta is not None:
        attention = replace(attention, rope=replace(attention.rope, theta=rope_theta))
    dense = read_dense(fields, bias=fields.flag("mlp_bias", False))
    count = num_stored_layers(fields, names, target=target)
    layer = read_decoder(
        fields, family="llama", attention=attention, ffn=lambda _: dense, windows=(None,) * count
    )
    return replace(layer, tie_word_embeddings=False)


def speculators_json(
    kind: str, layer: ModelSpec, *, layers: str, num_steps: int, dtype: str
) -> dict[str, Any]:
    """Return the keys that every head in speculators' layout has in config.json. layers: the family
    of its decoder layers. num_steps: the S that it is trained for."""
    written = family_named(layers).to_json(replace(layer, tie_word_embeddings=False))
    rope = {"rope_type": "default", "rope_theta": written.pop("rope_theta")}
    left_out = ("architectures", "torch_dtype", "rope_scaling")
    nested = {name: value for name, value in written.items() if name not in left_out}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_steps}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": nested | {"model_type": layers, "rope_parameters": rope},
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def refuse_unknown(fields: Fields, *, known: Collection[str]) -> None:
    """Raise ConfigError for a set key outside `known` that may change the forward."""
    for name, value in fields.values.items():
        if name in known or name in _NEUTRAL or not value or not _WORDS.search(name):
            continue
        raise ConfigError(
            f"{fields.path}: {name} is {shown(value)}; expected no such key: what it would change "
            "in the head's forward is not known here"
        )


def check_target(fields: Fields, layer: ModelSpec, target: ModelSpec, *, hidden_size: int) -> None:
    """Raise CheckpointError for a head of another target. hidden_size: of the features it reads."""
    for name, ours, theirs in (
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("target_hidden_size (or hidden_size)", hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"{fields.path}: {name} is {ours}; expected the target's {theirs}"
            )


def is_stray(name: str) -> bool:
    """Match RoPE tables, cache scales, and speculators' copies of the verifier's norm and head."""
    return is_inv_freq(name) or is_kv_scale(name) or name.startswith("verifier_")


def stored_embed(spec: ParamSpec) -> ParamSpec:
    part = Part(name="embed_tokens.weight", shape=spec.shape, size=spec.shape[-1], form=Form.AS_IS)
    return replace(spec, layouts=((part,),))


def published_specs(table: ParamTable) -> ParamTable:
    """Return a head's embedding and vocabulary map as its file stores them."""
    found = {spec.path: spec for spec in table}
    ids = found[DRAFT_IDS]
    part = Part(name="d2t", shape=ids.shape, size=ids.shape[0], form=Form.AS_IS)
    return (
        stored_embed(found[EMBED]),
        replace(ids, layouts=((part,),), axes=()),
    )


def check_vocabulary_names(
    tensors: Tensors,
    spec: HeadSpec | BlockSpec,
    table: ParamTable,
    *,
    is_stray: Callable[[str], bool],
) -> None:
    """Check a head's names and shapes. It may lack its embedding, and its lm_head if U = V."""
    V, U, E = spec.layer.vocab_size, spec.draft_vocab_size, spec.layer.hidden_size
    required = tuple(each for each in table if each.layouts)
    optional: dict[str, Shape] = {"embed_tokens.weight": (V, E), "t2d": (V,), "d2t": (U,)}
    if U == V:
        required = tuple(each for each in required if each.path != HEAD)
        optional["lm_head.weight"] = (U, E)
    check_names(tensors, required, optional=optional, is_stray=is_stray, integers=("d2t", "t2d"))


def shared_with_target(tensors: Tensors, spec: HeadSpec | BlockSpec) -> tuple[str, ...]:
    """Return the names of the params that the file lacks, for which the target's are used."""
    is_full = spec.draft_vocab_size == spec.layer.vocab_size
    embed = () if "embed_tokens.weight" in tensors else ("embed",)
    return (*embed, "lm_head") if is_full and "lm_head.weight" not in tensors else embed


def read_draft_ids(tensors: Tensors, spec: HeadSpec | BlockSpec) -> HostArray:
    """Return i32[U] target ids, distinct and in [0, V): by d2t, or all ids without it."""
    V, U = spec.layer.vocab_size, spec.draft_vocab_size
    ids = np.arange(U, dtype=np.int64)
    if U != V and "d2t" not in tensors:
        raise CheckpointError(f"{tensors.path}: no tensor d2t; expected shape {(U,)}")
    if "d2t" in tensors:
        offsets = tensors.read("d2t")
        if offsets.dtype.kind not in "iu":
            raise CheckpointError(
                f"{tensors.file_of('d2t')}: d2t has dtype {offsets.dtype}; expected integers"
            )
        ids = ids + offsets
    if ids.min() < 0 or ids.max() >= V or np.unique(ids).size != U:
        raise CheckpointError(
            f"{tensors.file_of('d2t')}: d2t gives target ids from {ids.min()} to {ids.max()}, "
            f"{np.unique(ids).size} of them distinct; expected {U} distinct ids in [0, {V})"
        )
    if "t2d" in tensors:
        mask = tensors.read("t2d").astype(bool)
        if mask.sum() != U or not np.array_equal(np.flatnonzero(mask), ids):
            raise CheckpointError(
                f"{tensors.file_of('t2d')}: t2d marks {mask.sum()} target ids that are not the "
                f"{U} of d2t; expected where(t2d) == d2t + arange"
            )
    return ids.astype(np.int32)


def read_head(
    tensors: Tensors,
    spec: HeadSpec | BlockSpec,
    own: Iterable[ParamSpec],
    *,
    shares: Collection[str],
    ids: HostArray | None,
    hot_ids: HostArray | None = None,
    target_params: Params,
    dtype: npt.DTypeLike,
    shards: int,
    place: Place,
    formats: Formats,
) -> Params:
    """Return a head's params: `own` read from its file, and those that it shares with the target.

    ids: i32[U], its `draft_ids`. hot_ids: i32[U], the only columns of the target's lm_head to
    draft.
    """
    ids = ids if hot_ids is None else hot_ids
    reads = param_reads(tensors, with_formats(tuple(own), formats), dtype=dtype, shards=shards)
    if ids is not None:
        reads.append(ParamRead(spec=draft_ids(ids.size), host_bytes=ids.nbytes, read=lambda: ids))
    own_params = nested(place(reads).items())
    for path in (EMBED, HEAD):
        if path[0] in shares:
            _check_shared(tensors, spec, target_params, path)
    params = own_params | {name: target_params[name] for name in shares}
    if hot_ids is None:
        return params
    if "markov" in params:
        after = _columns(params["markov"]["after"], hot_ids)
        params["markov"] = {**params["markov"], "after": after}
    return with_hot_columns(hot_ids, target_params, params)


def with_hot_columns(hot_ids: HostArray, target_params: Params, params: Params) -> Params:
    kernel = _columns(target_params["lm_head"]["kernel"], hot_ids)
    return {**params, "lm_head": {"kernel": kernel}}


def _columns(kernel: Any, ids: HostArray) -> jax.Array:
    chosen = jnp.take(jnp.asarray(kernel), jnp.asarray(ids), axis=1, mode="clip")
    return jax.device_put(chosen, kernel.sharding) if isinstance(kernel, jax.Array) else chosen


def _check_shared(
    tensors: Tensors,
    spec: HeadSpec | BlockSpec,
    target_params: Mapping[str, Any],
    path: ParamPath,
) -> None:
    found = tuple(value_at(target_params, path).shape)
    stored = (spec.layer.vocab_size, spec.layer.hidden_size)
    expected, noun = (stored, "table") if path == EMBED else (stored[::-1], "kernel")
    if found != expected:
        name = "embed_tokens.weight" if path == EMBED else "lm_head.weight"
        raise CheckpointError(
            f"{tensors.path}: no tensor {name}; expected shape {stored}, and the target's {noun} "
            f"of shape {found} cannot stand in for it"
        )
