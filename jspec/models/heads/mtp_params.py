"""The weights of layers for multi-token prediction, under the names of their checkpoints.

Host data, as `params` is: a family says here how its files call the parts of a layer.
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
from jspec.models.params import Init, ParamSpec, ParamTable, Split, prefixed
from jspec.spec.model_spec import LayerSpec, MtpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """What checkpoints call the parts of a layer. prefix: holds "{}", the layer's number.

    first: the number of layer 0. also: another that a file may give it, which then has none of
    `first`. is_after_own: the number of layer 0 is the num_hidden_layers of the config.json beside
    the file, or `first` where that says none. Names of weights stand without their ".weight"; of
    several, a file has one. head: of a layer with its own lm_head. zero_centred: norms are stored
    less one. around: in front of what stands around a layer (its two input norms, the fusion, its
    final norm and head), where that is not what stands in front of the layer. further: layers after
    those that are used, which the same file may hold. is_counted: config.json says how many there
    are. infix: may stand between prefix and name, of every name that does not have it here.
    """

    prefix: str = "model.mtp.layers.{}."
    first: int = 0
    also: int | None = None
    is_after_own: bool = False
    embed_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    fuse: str = "eh_proj"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    norm: tuple[str, ...] = ("final_layernorm",)
    head: tuple[str, ...] = ("shared_head.output",)
    zero_centred: bool = False
    around: str | None = None
    sinks: tuple[str, ...] = ("sinks",)
    further: tuple[LayerSpec, ...] = ()
    is_counted: bool = False
    infix: str = ""

    def of_layer(self, layer: int) -> str:
        return self.prefix.format(self.first + layer)

    def is_layers(self, name: str) -> bool:
        """Whether a stored name belongs to one of these layers, whichever."""
        if self.around is not None and name.startswith(self.around):
            return True
        return self.number(name) is not None

    def number(self, name: str) -> int | None:
        """Which of these layers a stored name belongs to, counted from 0; None for no layer's."""
        before, after = (re.escape(part) for part in self.prefix.split("{}"))
        found = re.match(f"{before}(\\d+){after}", name)
        number = -1 if found is None else int(found[1]) - self.first
        return number if number >= 0 else None


def mtp_params(config: MtpConfig, names: MtpNames = MtpNames()) -> ParamTable:
    """The table of all layers. The embedding, and an lm_head that is the target's, have no stored
    form here: they are the target's arrays."""
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
            *attention_params(layer.attention, in_size=E, out_size=E, sinks=names.sinks),
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
    """One weight under any of its names."""
    first, *others = specs
    return replace(first, layouts=first.layouts + tuple(own for x in others for own in x.layouts))


def draft_ids(vocab_size: int) -> ParamSpec:
    """The target's id of each column of lm_head, for a drafter that asks for it: all ids."""
    return ParamSpec(
        path=("draft_ids",), shape=(vocab_size,), split=Split.OUT, init=Init.IDS, is_integer=True
    )
