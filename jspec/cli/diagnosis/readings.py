"""Readings of a head: common faults of checkpoints and configs, each repaired on its own. One that
agrees with the target far more often than the served one shows the fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jspec.models.layer import Params
from jspec.spec.head_spec import HeadSpec
from jspec.spec.model_spec import ModelSpec
from jspec.training.heads.draft_head import DraftHead
from jspec.training.heads.head_eagle3 import TrainedEagle3

THETAS = (10000.0, 500000.0, 1000000.0)
NORMS = {
    "embed_norm": "input_layernorm",
    "hidden_norm": "hidden_norm",
    "post_norm": "post_attention_layernorm",
    "norm": "norm",
}


def same(params: Params) -> Params:
    return params


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One way to interpret a head."""

    kind: str
    fault: str  # what is wrong if this reading is right
    repair: str
    head: DraftHead
    layer_ids: tuple[int, ...]
    params: Callable[[Params], Params] = same
    shift: int = 0  # as in `measure`


def target_readings(
    head: DraftHead, layer_ids: tuple[int, ...], own: Params, target: Params
) -> Iterator[Reading]:
    """Yield readings with a target's weight in place of the head's own weight of that shape."""
    for part, name, stored in (
        ("embed", "table", "embed_tokens.weight"),
        ("lm_head", "kernel", "lm_head.weight"),
    ):
        if part not in own or part not in target:
            continue
        ours, theirs = own[part][name], target[part][name]
        if ours.shape != theirs.shape:
            continue

        def with_targets(params: Params, part: str = part) -> Params:
            return {**params, part: target[part]}

        yield Reading(
            kind="embedding" if part == "embed" else "lm_head",
            fault=f"the head has its own {stored}, and drafts better with the target's",
            repair=f"leave {stored} out of the head's file, so that the target's is used, or get "
            "the head that was trained for this target",
            head=head,
            layer_ids=layer_ids,
            params=with_targets,
        )


def nearby_layers(layer_ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    near = {i + d for i in layer_ids for d in (-1, 0, 1)} | set(usual_layers(num_layers))
    return tuple(sorted(i for i in near if 0 <= i <= num_layers)) if layer_ids else ()


def usual_layers(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else ()


def eagle3_readings(spec: HeadSpec, target: ModelSpec) -> Iterator[Reading]:
    head = TrainedEagle3(spec)
    yield from _layer_readings(head, target)
    yield from _theta_readings(spec, target)
    yield from shifted_readings(head)
    yield from _norm_readings(head)
    yield from _vocabulary_readings(head)
    other = replace(spec, norm_before_residual=not spec.norm_before_residual)
    yield Reading(
        kind="residual",
        fault=f"norm_before_residual is {spec.norm_before_residual}",
        repair=f"set norm_before_residual to {other.norm_before_residual} in the head's config",
        head=TrainedEagle3(other),
        layer_ids=spec.aux_layer_ids,
    )


def _layer_readings(head: TrainedEagle3, target: ModelSpec) -> Iterator[Reading]:
    """Yield readings with one id shifted by one, with the usual ids, and in reversed order."""
    ids = head.spec.aux_layer_ids
    near = set(nearby_layers(ids, target.num_layers))
    some = itertools.product((0, -1, 1), repeat=len(ids)) if len(ids) <= 3 else ()
    moved = [tuple(i + d for i, d in zip(ids, by, strict=True)) for by in some]
    moved += [tuple(i + d for i in ids) for d in (-1, 1)]
    if len(ids) == 3:
        moved.append(usual_layers(target.num_layers))
    moved.append(ids[::-1])
    for other in dict.fromkeys(moved):
        if other and other != ids and set(other) <= near:
            yield Reading(
                kind="layer_ids",
                fault=f"the aux layer ids are {list(ids)}, and the head was trained with "
                f"{list(other)} (captured at the input of these layers)",
                repair=f"set eagle_aux_hidden_state_layer_ids to {list(other)} in the head's "
                "config (a first id of 1 there means outputs: one less each)",
                head=head,
                layer_ids=other,
            )


def _theta_readings(spec: HeadSpec, target: ModelSpec) -> Iterator[Reading]:
    own = spec.layer.one_layer.softmax_attention.rope
    theirs = target.layers[-1].softmax_attention.rope
    bases = dict.fromkeys((*THETAS, theirs.theta))
    for rope in (*(replace(own, theta=theta) for theta in bases), theirs):
        if rope == own:
            continue
        attention = replace(spec.layer.one_layer.softmax_attention, rope=rope)
        layers = tuple(replace(layer, attention=attention) for layer in spec.layer.layers)
        changed = replace(spec, layer=replace(spec.layer, layers=layers))
        yield Reading(
            kind="rope_theta",
            fault=f"the head's rope_theta is {own.theta:g}, and it was trained with {rope.theta:g}"
            + ("" if rope.theta != own.theta else " and its target's scaling"),
            repair=f"pass --speculative-draft-rope-theta {rope.theta:g}, or set rope_theta in the "
            "head's config",
            head=TrainedEagle3(changed),
            layer_ids=spec.aux_layer_ids,
        )


def shifted_readings(head: DraftHead) -> Iterator[Reading]:
    for shift, which in ((1, "after"), (-1, "before")):
        yield Reading(
            kind="anchor_row",
            fault=f"the head was trained on the feature of the row {which} the one that it is "
            "given: token i + 1 belongs with the feature of token i",
            repair="train it with (token i + 1, feature i) pairs, as EAGLE's are",
            head=head,
            layer_ids=tuple(head.aux_layer_ids),
            shift=shift,
        )


def _norm_readings(head: TrainedEagle3) -> Iterator[Reading]:
    for a, b in itertools.combinations(NORMS, 2):

        def swapped(params: Params, a: str = a, b: str = b) -> Params:
            return with_norm(with_norm(params, a, norm_of(params, b)), b, norm_of(params, a))

        yield Reading(
            kind="norm",
            fault=f"the norms {NORMS[a]} and {NORMS[b]} are exchanged",
            repair=f"exchange the tensors {NORMS[a]}.weight and {NORMS[b]}.weight",
            head=head,
            layer_ids=head.spec.aux_layer_ids,
            params=swapped,
        )


def norm_of(params: Params, name: str) -> Any:
    return (params if name == "norm" else params["layers"][0])[name]


def with_norm(params: Params, name: str, value: Any) -> Params:
    if name == "norm":
        return {**params, name: value}
    layers = params["layers"]
    return {**params, "layers": {**layers, 0: {**layers[0], name: value}}}


def _vocabulary_readings(head: TrainedEagle3) -> Iterator[Reading]:
    """Yield readings with draft ids off by one, and with d2t's two meanings exchanged."""
    V = head.spec.layer.vocab_size
    readings: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("one too high", lambda ids: ids - 1),
        ("one too low", lambda ids: ids + 1),
        ("ids where offsets are expected", lambda ids: ids - jnp.arange(ids.shape[0])),
        ("offsets where ids are expected", lambda ids: ids + jnp.arange(ids.shape[0])),
    )
    for what, put_right in readings:

        def moved(params: Params, put_right: Callable[[Any], Any] = put_right) -> Params:
            return {**params, "draft_ids": jnp.clip(put_right(params["draft_ids"]), 0, V - 1)}

        yield Reading(
            kind="vocabulary",
            fault=f"the head's map to the target's vocabulary is off: d2t is {what}",
            repair="write d2t again: target id less draft id, for each draft id",
            head=head,
            layer_ids=head.spec.aux_layer_ids,
            params=moved,
        )
