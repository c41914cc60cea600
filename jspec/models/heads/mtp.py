"""Layers for multi-token prediction from a checkpoint, usually the target's own. The embedding, and
lm_head unless a layer has its own, are the target's. An unknown unread tensor is refused."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.errors import CheckpointError, ConfigError
from jspec.files.json_files import Fields, in_file, read_fields
from jspec.models.family import Family, MtpFamily
from jspec.models.files.checkpoint import is_inv_freq
from jspec.models.files.kv_scales import is_kv_scale
from jspec.models.files.stored.layouts import check_names
from jspec.models.files.stored.param_reads import Place, on_host
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import HostArray, Tensors, write_checkpoint
from jspec.models.files.w8a8 import open_tensors
from jspec.models.heads.head_files import Params, read_head, refuse_unknown
from jspec.models.heads.head_params import EMBED, HEAD, HeadNames, head_params
from jspec.models.heads.target_copies import Copies, TargetCopy
from jspec.models.params import Form, ParamSpec, ParamTable, Part
from jspec.models.registry import DRAFTS, FAMILIES, family_named
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.layers.attention import HeadGate
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.weight_format import Formats

HIDDEN_FIRST = "mtp_hidden_states_first"  # transformers' key
COUNT = "num_nextn_predict_layers"
_OF_TARGET = re.compile(r"model\.(language_model\.)?layers\.\d")
_EMBED = "embed_tokens.weight"
_HEADS = ("shared_head.head.weight", "shared_head.output.weight", "lm_head.weight")
WRITTEN, WRITTEN_CHAIN = "mimo_v2", "step3p5"  # families in whose layouts layers are written
# The number of the first layer in a written chain, for any target. SGLang's class expects it.
CHAIN_FIRST = 45


def load_mtp_config(
    path: Path, *, target: ModelSpec, num_layers: int
) -> tuple[HeadSpec, HeadNames]:
    """Read the first num_layers layers, or the one recurrent layer, and their names. Raises
    ConfigError for a variant that is not served, CheckpointError for a file that does not fit."""
    fields = read_fields(path / "config.json")
    family = _family(fields, target)
    mtp = DRAFTS.get(fields.architecture(), family.mtp)
    if mtp is None:
        known = ", ".join(each.name for each in FAMILIES if each.mtp is not None) or "none"
        raise ConfigError(
            f"{path}: the target's family is {family.name!r}, whose checkpoints bring no layers "
            f"for multi-token prediction; expected a family that does ({known}), or a checkpoint "
            f"of such a layer alone ({', '.join(DRAFTS)})"
        )
    own = fields.table("text_config") if fields.get("text_config") else fields
    own.integer("num_hidden_layers", target.num_layers)  # checks its bounds for all readers
    with in_file(fields.path):
        spec = mtp.read(fields, target)
        for each in (fields, own):
            refuse_unknown(each, known=mtp.known)
            each.refuse(HIDDEN_FIRST, allowed=(spec.hidden_first,), why="the family's order")
    ours = own.integer("vocab_size"), own.integer("hidden_size")
    theirs = target.vocab_size, target.hidden_size
    if ours != theirs:
        raise CheckpointError(
            f"{fields.path}: vocab_size and hidden_size are {ours}; expected the target's {theirs}"
        )
    names = mtp.names(target)
    if names.is_after_own:
        names = replace(names, first=fields.integer("num_hidden_layers", names.first))
    if not spec.per_level:
        is_after_target = fields.architecture() in DRAFTS and names.around is None
        also = fields.integer("num_hidden_layers", target.num_layers) if is_after_target else None
        return spec, replace(names, also=also)
    if num_layers > spec.num_layers:
        raise ConfigError(
            f"speculative_num_steps is {num_layers}; expected at most {spec.num_layers}, the "
            f"layers that {fields.path} has for it: one a step, none of which this family "
            f"({family.name}) runs again"
        )
    used, further = spec.layer.layers[:num_layers], spec.layer.layers[num_layers:]
    model = replace(spec.layer, layers=used)
    is_counted = fields.get(COUNT) is not None
    return (
        replace(spec, layer=model),
        replace(names, further=further, is_counted=is_counted),
    )


def _family(fields: Fields, target: ModelSpec) -> Family:
    """Return the family of the config's architecture if it has such layers, else the target's."""
    own = fields.architecture()
    bringing = (each for each in FAMILIES if each.mtp is not None and own in each.architectures)
    return next(bringing, None) or family_named(target.family)


def check_mtp(path: Path, spec: HeadSpec, names: HeadNames) -> None:
    """Raise CheckpointError if the headers show layers that do not fit `spec`."""
    with open_tensors(path) as tensors:
        _check(tensors, spec, names)


def load_mtp(
    path: Path,
    spec: HeadSpec,
    names: HeadNames,
    *,
    hot_ids: HostArray | None = None,
    target_params: Params,
    dtype: npt.DTypeLike,
    shards: int = 1,
    place: Place = on_host,
    formats: Formats = (),
) -> Params:
    """Load the layers' params (`dtype`) to where `place` puts them, and add the shared ones. Raises
    CheckpointError. hot_ids: i32[U], the only ids to draft."""
    with open_tensors(path) as tensors:
        every = None if spec.per_level else np.arange(spec.draft_vocab_size, dtype=np.int32)
        return read_head(
            tensors,
            spec,
            _check(tensors, spec, names),
            shares=shared(spec),
            ids=every,
            hot_ids=hot_ids,
            target_params=target_params,
            dtype=dtype,
            shards=shards,
            place=place,
            formats=formats,
        )


def written_config(
    target: ModelSpec, layer: LayerSpec, *, num_layers: int, chained: bool = False
) -> HeadSpec:
    """Return layers that `save_mtp` can write for a target of any family.

    All layers read the target's hidden before its final norm, or if `chained` the output of the
    previous layer, with norms of q and k and gated heads. layer: plain, with heads of one width;
    its window becomes the whole context.
    """
    own, window = layer.softmax_attention, target.max_position
    if chained:
        attention = replace(own, window=window, qk_norm=True, gate=HeadGate.OF_HEADS)
        target = replace(target, tie_word_embeddings=False, family=WRITTEN_CHAIN)
    else:
        attention = replace(own, v_dim=own.head_dim, rotary_dim=own.head_dim, window=window)
    layers = (replace(layer, attention=attention),) * num_layers
    return mtp_spec(
        layer=replace(target, layers=layers),
        target_num_layers=target.num_layers,
        chained=chained,
        reads_normed=False,
        own_head=chained,
    )


def save_mtp(
    path: Path,
    spec: HeadSpec,
    params: Params,
    *,
    target: ModelSpec,
    dtype: npt.DTypeLike,
) -> None:
    """Write unsharded layers alone; a chain with the target's embedding (for other engines)."""
    written = mtp_config_json(spec, target=target, dtype=np.dtype(dtype).name)
    _, family = _written_family(spec)
    names = family.names(target)
    if spec.chained:
        table = (_embedding(spec), *_own_table(spec, replace(names, first=CHAIN_FIRST)))
    else:
        table = _own_table(spec, names)
    write_checkpoint(path, written, stored_tensors(table, params, dtype=dtype))


def mtp_config_json(spec: HeadSpec, *, target: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return config.json of layers alone, as MiMo-V2-Flash's or, for a chain, Step-3.5-Flash's.
    Raises ConfigError for layers that would not be read back equal."""
    name, family = _written_family(spec)
    model = replace(spec.layer, tie_word_embeddings=False)
    if spec.chained:  # the lists in its config include the target's layers
        before = spec.layer.layers[:1] * CHAIN_FIRST
        model = replace(model, layers=(*before, *spec.layer.layers))
    written = family_named(name).to_json(model) | {
        "num_nextn_predict_layers": spec.num_layers,
        "torch_dtype": dtype,
    }
    if spec.chained:
        written["num_hidden_layers"] = CHAIN_FIRST
    read = family.read(Fields(Path("config.json"), written), target)
    if read != spec:
        raise ConfigError(
            f"the layers are {spec}, which the layout of {name!r} reads as {read}; "
            "expected them equal"
        )
    return written


def _written_family(spec: HeadSpec) -> tuple[str, MtpFamily]:
    name = WRITTEN_CHAIN if spec.chained else WRITTEN
    mtp = family_named(name).mtp
    if mtp is None:
        raise ConfigError(f"family is {name!r}; expected one with layers of its own")
    return name, mtp


def shared(spec: HeadSpec) -> tuple[str, ...]:
    return ("embed",) if spec.own_head else ("embed", "lm_head")


def _embedding(spec: HeadSpec) -> ParamSpec:
    shape = (spec.layer.vocab_size, spec.layer.hidden_size)
    part = Part(name=f"model.{_EMBED}", shape=shape, size=shape[-1], form=Form.AS_IS)
    return ParamSpec(path=EMBED, shape=shape, layouts=((part,),))


def _own_table(spec: HeadSpec, names: HeadNames) -> ParamTable:
    return tuple(spec for spec in head_params(spec, names) if spec.layouts)


def _check(tensors: Tensors, spec: HeadSpec, names: HeadNames) -> ParamTable:
    """Check the file and return the weights to read.

    Unused further layers must be complete, or absent if config.json does not give their number.
    Other tensors are the target's, if it has its layers.
    """
    names = _numbered(tensors, names)
    numbers = {names.number(name) for name in tensors.sources} - {None}
    layers = spec.layer.layers
    used, stated = set(range(len(layers))), set(range(len(layers) + len(names.further)))
    if names.is_counted and used <= numbers and not stated <= numbers:
        raise CheckpointError(
            f"{tensors.path / 'config.json'}: {COUNT} is {len(stated)}, but the weights beside it "
            f"have {len(stated & numbers)} such layers; expected that number"
        )
    for layer in names.further:
        if len(layers) not in numbers:
            break
        layers = (*layers, layer)
    whole = replace(spec, layer=replace(spec.layer, layers=layers))
    has_target = names.also is None and any(
        _OF_TARGET.match(x) and not names.is_layers(x) for x in tensors.sources
    )
    copies = copies_of_target(whole, replace(names, also=None))
    check_names(
        tensors,
        _own_table(whole, names),
        is_stray=lambda name: (
            is_inv_freq(name)
            or is_kv_scale(name)
            or name in copies
            or (has_target and not names.is_layers(name))
        ),
    )
    return _own_table(spec, names)


def _numbered(tensors: Tensors, names: HeadNames) -> HeadNames:
    """Return the names with the layer number that the file uses: exports may start at 0."""
    if names.also is None or any(names.number(name) == 0 for name in tensors.sources):
        return names
    other = replace(names, first=names.also)
    return other if any(other.number(name) == 0 for name in tensors.sources) else names


def copies_of_target(spec: HeadSpec, names: HeadNames) -> Copies:
    """Return the names under which files may store the target's embedding and lm_head, unread."""
    among = (_EMBED,) if spec.own_head else (_EMBED, *_HEADS)
    firsts = {names.first, names.first if names.also is None else names.also}
    found = {f"model.{_EMBED}", _EMBED, "lm_head.weight"}
    for first, infix, layer in itertools.product(firsts, {"", names.infix}, range(spec.num_layers)):
        place = names.prefix.format(first + layer) + infix
        found |= {place + name for name in among}
    if names.around is not None:
        found |= {names.around + name for name in among}
    return {
        name: TargetCopy(path=EMBED if name.endswith(_EMBED) else HEAD, is_read=False)
        for name in sorted(found)
    }
