"""The weights of a draft head under the names of its checkpoint, as host data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jspec.models.decoder_params import mixer_params
from jspec.models.layer_params import (
    ffn_params,
    lm_head,
    norm,
    product,
    zero_centred,
)
from jspec.models.params import (
    INTEGERS,
    Form,
    Init,
    ParamPath,
    ParamSpec,
    ParamTable,
    Part,
    or_fused,
    prefixed,
)
from jspec.spec.axes import Axes
from jspec.spec.head_spec import FeatureNorm, HeadSpec, Join
from jspec.spec.model_spec import LayerSpec

EMBED, HEAD, DRAFT_IDS = ("embed", "table"), ("lm_head", "kernel"), ("draft_ids",)
MASK_FEATURE = ("mask_hidden",)
# Serving engines fuse each of these products of a layer into one tensor.
FUSED = {"qkv": "qkv_proj", "gate_up": "gate_up_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNames:
    """Stored names of a head's parts, without ".weight"; if several are given, a file has one."""

    prefix: str = "model.mtp.layers.{}."  # "{}" is the layer's number
    first: int = 0  # the number of layer 0
    also: int | None = None  # another number of layer 0, in files that do not use `first`
    is_after_own: bool = False  # `first` is num_hidden_layers of the layers' own config, if any
    embed_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    fuse: str = "eh_proj"
    input_norm: tuple[str, ...] = ("input_layernorm",)
    post_norm: str = "post_attention_layernorm"
    norm: tuple[str, ...] = ("final_layernorm",)
    head: tuple[str, ...] = ("shared_head.output",)  # of a layer with its own lm_head
    zero_centred: bool = False  # norms are stored minus one
    # Prefix of the two input norms, the fusion, the final norm and the head; None: the layer's.
    around: str | None = None
    sinks: tuple[str, ...] = ("sinks",)
    is_fused: bool = False  # products may also be stored as in FUSED
    further: tuple[LayerSpec, ...] = ()  # unused layers that the same file may have
    is_counted: bool = False  # config.json specifies the number of layers
    infix: str = ""  # may follow the prefix in every name that does not contain it

    def of_layer(self, layer: int) -> str:
        return self.prefix.format(self.first + layer)

    def around_layer(self, layer: int) -> str:
        return self.of_layer(layer) if self.around is None else self.around

    def is_layers(self, name: str) -> bool:
        if self.around is not None and name.startswith(self.around):
            return True
        return self.number(name) is not None

    def number(self, name: str) -> int | None:
        """Return the index of the layer that a stored name belongs to; None for other tensors."""
        before, after = (re.escape(part) for part in self.prefix.split("{}"))
        found = re.match(f"{before}(\\d+){after}", name)
        number = -1 if found is None else int(found[1]) - self.first
        return number if number >= 0 else None


EAGLE1_NAMES = HeadNames(
    prefix="layers.{}.",
    around="",
    embed_norm="embedding_layernorm",
    hidden_norm="hidden_states_layernorm",
    fuse="fc",
    is_fused=True,
)
EAGLE3_NAMES = HeadNames(  # speculators'; SGLang calls a further layer's input norm hidden_norm
    prefix="layers.{}.",
    around="",
    embed_norm="layers.0.input_layernorm",
    hidden_norm="layers.0.hidden_norm",
    input_norm=("input_layernorm", "hidden_norm"),
    norm=("norm",),
    head=("lm_head",),
    is_fused=True,
)


def head_params(spec: HeadSpec, names: HeadNames | None = None) -> ParamTable:
    """Declare a head. names: by default those of its kind. The embedding, a shared lm_head and
    draft_ids (target ids [U]; all ids, if layers draft one level each) have no layout."""
    if names is None:
        plain = HeadNames() if spec.input_norm else EAGLE1_NAMES
        names = EAGLE3_NAMES if spec.join is Join.WIDE else plain
    model, E, U = spec.layer, spec.layer.hidden_size, spec.draft_vocab_size
    table: list[ParamSpec] = [ParamSpec(path=EMBED, shape=(model.vocab_size, E), init=Init.TABLE)]
    if not spec.own_head:
        table.append(replace(lm_head(E, U, tied=False), layouts=()))
    table += (*_feature_params(spec), *_mask_params(spec))
    for i, layer in enumerate(model.layers):
        is_first, path = spec.per_level or i == 0, ("layers", i)
        around = [*(_pair_params(spec, names) if is_first else ())]
        around += _end_params(spec, names) if spec.per_level else ()
        own = _layer_params(spec, names, layer, is_first=is_first)
        table += _stored(around, names, path=path, under=names.around_layer(i))
        table += _stored(own, names, path=path, under=names.of_layer(i))
    if not spec.per_level:
        table += _stored(_end_params(spec, names), names, path=(), under=names.around_layer(0))
        table.append(draft_ids(U))
    return or_fused(table, FUSED) if names.is_fused else tuple(table)


def _feature_params(spec: HeadSpec) -> ParamTable:
    if not spec.fuses_features:
        return ()
    count, size = len(spec.aux_layer_ids), spec.target_hidden_size
    norms: ParamTable = ()
    if spec.feature_norm is FeatureNorm.WHOLE:
        norms = (norm("feature_norm", "input_norm", count * size),)
    elif spec.feature_norm is FeatureNorm.EACH:
        each = (norm(f"norm_{i}", f"fc_norm.{i}", size) for i in range(count))
        norms = prefixed(each, path=("feature_norms",), stored="")
    parts = (("fc", spec.layer.hidden_size, spec.layer.hidden_size),)
    axes: Axes = (None, "mlp")  # its columns are gathered
    return (*norms, *product(("fc",), count * size, parts, axes=axes, bias=spec.fc_bias))


def _mask_params(spec: HeadSpec) -> ParamTable:
    if spec.mask_token_id is None:
        return ()
    shape = (1, 1, max(len(spec.aux_layer_ids), 1) * spec.target_hidden_size)
    part = Part(name="mask_hidden", shape=shape, size=shape[-1], form=Form.AS_IS)
    return (ParamSpec(path=MASK_FEATURE, shape=shape, layouts=((part,),)),)


def _pair_params(spec: HeadSpec, names: HeadNames) -> ParamTable:
    E = spec.layer.hidden_size
    norms: ParamTable = ()
    if spec.norms_pair:
        norms = (norm("embed_norm", names.embed_norm, E), norm("hidden_norm", names.hidden_norm, E))
    if spec.join is Join.WIDE:
        return norms
    return (*norms, *product(("fuse",), 2 * E, ((names.fuse, E, 1),), bias=spec.fc_bias))


def _layer_params(
    spec: HeadSpec, names: HeadNames, layer: LayerSpec, *, is_first: bool
) -> ParamTable:
    E = spec.layer.hidden_size
    has_norm = spec.input_norm or not is_first
    in_size = 2 * E if is_first and spec.join is Join.WIDE else E
    return (
        *((_either(norm("input_norm", x, E) for x in names.input_norm),) if has_norm else ()),
        *mixer_params(layer.attention, size=E, sinks=names.sinks, in_size=in_size),
        norm("post_norm", names.post_norm, E),
        *ffn_params(layer.ffn, size=E),
    )


def _end_params(spec: HeadSpec, names: HeadNames) -> ParamTable:
    E, U = spec.layer.hidden_size, spec.draft_vocab_size
    heads = (lm_head(E, U, tied=False, name=f"{name}.weight") for name in names.head)
    return (
        *((_either(norm("norm", x, E) for x in names.norm),) if spec.norm_before_head else ()),
        *((_either(heads),) if spec.own_head else ()),
    )


def _stored(
    specs: Iterable[ParamSpec], names: HeadNames, *, path: ParamPath, under: str
) -> ParamTable:
    centred = zero_centred(specs) if names.zero_centred else tuple(specs)
    plain = prefixed(centred, path=path, stored=under)
    if not names.infix:
        return plain
    with_infix = prefixed(centred, path=path, stored=under + names.infix)
    return tuple(
        a if _has(a, names.infix) else _either((a, b))
        for a, b in zip(plain, with_infix, strict=True)
    )


def _has(spec: ParamSpec, infix: str) -> bool:
    return any(infix in part.name for layout in spec.layouts for part in layout)


def _either(specs: Iterable[ParamSpec]) -> ParamSpec:
    first, *others = specs
    return replace(first, layouts=first.layouts + tuple(own for x in others for own in x.layouts))


def draft_ids(size: int) -> ParamSpec:
    return ParamSpec(path=DRAFT_IDS, shape=(size,), axes=("vocab",), init=Init.IDS, format=INTEGERS)
