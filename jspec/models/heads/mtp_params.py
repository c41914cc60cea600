"""The weights of layers for multi-token prediction, under the names of their checkpoints.

Host data, like `params`. A family specifies here how its files name the parts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jspec.models.layer_params import (
    attention_params,
    ffn_params,
    lm_head,
    norm,
    product,
    zero_centred,
)
from jspec.models.params import INTEGERS, Init, ParamSpec, ParamTable, prefixed
from jspec.spec.model_spec import LayerSpec, MtpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """Stored names of a layer's parts, without ".weight"; if several are given, a file has one."""

    prefix: str = "model.mtp.layers.{}."  # "{}" is the layer's number
    first: int = 0  # the number of layer 0
    also: int | None = None  # another number of layer 0, in files that do not use `first`
    is_after_own: bool = False  # `first` is num_hidden_layers of the layers' own config, if any
    embed_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    fuse: str = "eh_proj"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    norm: tuple[str, ...] = ("final_layernorm",)
    head: tuple[str, ...] = ("shared_head.output",)  # of a layer with its own lm_head
    zero_centred: bool = False  # norms are stored less one
    # Prefix of the two input norms, the fusion, the final norm and the head; None: as the layer's.
    around: str | None = None
    sinks: tuple[str, ...] = ("sinks",)
    further: tuple[LayerSpec, ...] = ()  # unused layers that the same file may have
    is_counted: bool = False  # config.json specifies the number of layers
    infix: str = ""  # may follow the prefix in every name that does not contain it

    def of_layer(self, layer: int) -> str:
        return self.prefix.format(self.first + layer)

    def is_layers(self, name: str) -> bool:
        """Return whether a stored name belongs to any of these layers."""
        if self.around is not None and name.startswith(self.around):
            return True
        return self.number(name) is not None

    def number(self, name: str) -> int | None:
        """Return the index of the layer that a stored name belongs to; None for other tensors."""
        before, after = (re.escape(part) for part in self.prefix.split("{}"))
        found = re.match(f"{before}(\\d+){after}", name)
        number = -1 if found is None else int(found[1]) - self.first
        return number if number >= 0 else None


def mtp_params(config: MtpConfig, names: MtpNames = MtpNames()) -> ParamTable:
    """Declare all layers. The embedding, and an lm_head shared with the target, have no layout."""
    model = config.model
    V, E = model.vocab_size, model.hidden_size
    table: list[ParamSpec] = [
        ParamSpec(path=("embed", "table"), shape=(V, E), init=Init.TABLE),
    ]
    if not config.own_heads:
        table.append(replace(lm_head(E, V, tied=False), layouts=()))
    for i, layer in enumerate(model.layers):
        around = [
            norm("embed_norm", names.embed_norm, E),
            norm("hidden_norm", names.hidden_norm, E),
            *product(("fuse",), 2 * E, ((names.fuse, E, 1),)),
            _either(norm("norm", name, E) for name in names.norm),
        ]
        if config.own_heads:
            heads = (f"{name}.weight" for name in names.head)
            around.append(_either(lm_head(E, V, tied=False, name=name) for name in heads))
        own = [
            norm("input_norm", names.input_norm, E),
            *attention_params(layer.softmax_attention, in_size=E, out_size=E, sinks=names.sinks),
            norm("post_norm", names.post_norm, E),
            *ffn_params(layer.ffn, size=E),
        ]
        outer = names.of_layer(i) if names.around is None else names.around
        for specs, stored in ((around, outer), (own, names.of_layer(i))):
            centred = zero_centred(specs) if names.zero_centred else specs
            plain = prefixed(centred, path=("layers", i), stored=stored)
            with_infix = prefixed(centred, path=("layers", i), stored=stored + names.infix)
            table += [
                a if not names.infix or _has(a, names.infix) else _either((a, b))
                for a, b in zip(plain, with_infix, strict=True)
            ]
    return tuple(table)


def _has(spec: ParamSpec, infix: str) -> bool:
    return any(infix in part.name for layout in spec.layouts for part in layout)


def _either(specs: Iterable[ParamSpec]) -> ParamSpec:
    first, *others = specs
    return replace(first, layouts=first.layouts + tuple(own for x in others for own in x.layouts))


def draft_ids(vocab_size: int) -> ParamSpec:
    """Declare the target id of each column of lm_head (all ids), for drafters that need it."""
    return ParamSpec(
        path=("draft_ids",), shape=(vocab_size,), axes=("vocab",), init=Init.IDS, format=INTEGERS
    )
