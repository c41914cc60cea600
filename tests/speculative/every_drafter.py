"""Every way of drafting: the list over which the laws run, and which must be complete.

A new drafter gets a `Kind` here, or `test_every_drafter_is_here` fails. A kind tells how its
drafter is made, its guesses in float64, and weights with which it is always right.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.layers.linear import Shard
from jspec.models.decoder import Decoder
from jspec.models.files.stored.param_reads import on_host, param_reads
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.files.tensor_files import open_tensors
from jspec.models.heads.assistant import Assistant, assistant_params
from jspec.models.heads.block_head import BlockHead
from jspec.models.heads.dflash import block_params
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.layer import Params
from jspec.models.params import ParamTable
from jspec.models.placement import init_params, nested
from jspec.models.registry import table_of
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import HeadSpec, eagle1_spec
from jspec.spec.model_spec import uniform_decoder
from jspec.speculative.drafter import Drafter, LevelDrafter
from jspec.speculative.drafters.block import BlockDrafter, ParallelDrafter
from jspec.speculative.drafters.composite import CompositeDrafter
from jspec.speculative.drafters.frozen_kv import FrozenKVDrafter
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ngram import NgramDrafter
from jspec.speculative.drafters.ranked import EagleDrafter, StandaloneDrafter
from tests.models.block_reference import BlockReference
from tests.models.eagle3_reference import (
    DecoderReference,
    Eagle1Reference,
    Eagle3Reference,
    HeadReference,
)
from tests.models.mtp_reference import MtpReference, RecurrentReference
from tests.speculative import own_assistants, own_blocks, own_layers
from tests.speculative.engines import (
    DRAFT,
    NGRAM_MAX_MATCH,
    TARGET,
    corpus_params,
    spec_of,
    tiny_params,
)

F64 = npt.NDArray[np.float64]
SIZE, VOCAB = TARGET.hidden_size, TARGET.vocab_size
HALF = SIZE // 2  # the capacity of two value heads of the tiny models
MIN_MATCH = 3

EAGLE1 = eagle1_spec(
    layer=uniform_decoder(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    ),
    draft_vocab_size=VOCAB,
)
EAGLE3 = dataclasses.replace(DRAFT, aux_layer_ids=(0, TARGET.num_layers - 1, TARGET.num_layers))
PARALLEL = dataclasses.replace(EAGLE3, mask_token_id=VOCAB - 1)


class Guesses(Protocol):
    """A drafter's prediction of the next token, in float64 and from scratch."""

    def log_probs(self, tokens: list[int], features: F64, path: list[int]) -> F64:
        """Return [V], -inf for ids that it cannot draft.

        tokens: of the row, its root included; features: of all but the root; path: drafts after it.
        """
        ...


@dataclass(frozen=True)
class HeadGuesses:
    """An EAGLE head's: pairs of a token and the feature before it, its own output on the path."""

    head: HeadReference
    ids: npt.NDArray[Any]
    mask: int | None = None  # of P-EAGLE, which reads no drafts: masks are in their place

    def log_probs(self, tokens: list[int], features: F64, path: list[int]) -> F64:
        if self.mask is not None:
            feature = self.head.weight("mask_hidden")[0].repeat(len(path), axis=0)
            tokens, features = [*tokens, *[self.mask] * len(path)], np.vstack((features, feature))
            path = []
        followed, hidden = tokens[1:], self.head.fuse(features)
        for token in path:
            last = self.head.run(followed, hidden)[-1:]
            followed, hidden = [*followed, token], np.vstack([hidden, last])
        logits = self.head.logits(self.head.run(followed, hidden)[-1:])[0]
        spread = np.full(VOCAB, -np.inf)
        spread[self.ids] = log_softmax(logits)
        return spread


@dataclass(frozen=True)
class LayerGuesses:
    """The guesses of separate layers: layer s after a path of s drafts."""

    layers: MtpReference

    def log_probs(self, tokens: list[int], features: F64, path: list[int]) -> F64:
        layer = len(path)
        out = self.layers.outputs([*tokens, *path], features, num_layers=layer + 1)[layer]
        return log_softmax(self.layers.logits(layer, out[-1:])[0])


@dataclass(frozen=True)
class BlockGuesses:
    """A block drafter's, of S levels."""

    block: BlockReference
    num_steps: int

    def log_probs(self, tokens: list[int], features: F64, path: list[int]) -> F64:
        hidden = self.block.run(tokens[-1], features, self.block.rows(self.num_steps))
        logits = self.block.following(hidden, tokens[-1], path, num_steps=self.num_steps)
        return log_softmax(logits)


@dataclass(frozen=True)
class ModelGuesses:
    """A language model's, which reads no features."""

    model: DecoderReference

    def log_probs(self, tokens: list[int], features: F64, path: list[int]) -> F64:
        del features
        return log_softmax(self.model.logits(self.model.run([*tokens, *path])[-1:])[0])


def log_softmax(logits: F64) -> F64:
    shifted: F64 = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def sharded(
    table: ParamTable, params: Params, shards: int, *, stored: ParamTable | None = None
) -> Params:
    """Shard the params of one shard, by writing and reading a checkpoint.

    stored: the table that `params` have, if their experts are placed otherwise.
    """
    own = tuple(spec for spec in table if spec.layouts)
    if shards == 1 or not own:
        return params
    written = own if stored is None else tuple(spec for spec in stored if spec.layouts)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        save_file(stored_tensors(written, params, dtype=np.float32), path / "model.safetensors")
        with open_tensors(path) as tensors:
            read = on_host(param_reads(tensors, own, dtype=np.float32, shards=shards))
    return nested({**leaves_of(params), **read}.items())


def leaves_of(params: Params) -> dict[Any, Any]:
    paths = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(key.key for key in path): leaf for path, leaf in paths}


# What is always right: a target that reads no context says next what follows from its last token
# alone, so a draft that hands the token's embedding on knows it, at any temperature: the noise is
# shared. Embeddings lie in the first half of their numbers, the first of which is 1 for all.


@functools.cache
def contextless_target(sharpness: int = 4) -> Params:
    """Return TARGET's weights without attention and MLP, so that the EAGLE-3 head can predict
    all of it. Sharp, so that no other node's children push the right one out of a tree."""
    params = tiny_params()[0]
    values = leaves_of(params)
    for path, leaf in values.items():
        if "out" in path or "down" in path:
            values[path] = jnp.zeros_like(leaf)
    table = jnp.sign(values["embed", "table"]).at[:, 0].set(1.0).at[:, HALF:].set(0.0)
    values["embed", "table"] = table
    drafted = np.isin(np.arange(VOCAB), np.asarray(tiny_params()[1]["draft_ids"]))
    kernel = sharpness * values["lm_head", "kernel"]
    values["lm_head", "kernel"] = kernel.at[0].add(jnp.where(drafted, 0.0, -1e4))
    return nested(values.items())


@functools.cache
def constant_target() -> Params:
    """A target whose logits are always the same, for drafters that guess several tokens before
    they know the first: what it says depends on the noise alone."""
    params = contextless_target()
    values = leaves_of(params)
    values["embed", "table"] = jnp.zeros_like(values["embed", "table"]).at[:, 0].set(1.0)
    return nested(values.items())


def zeros_but_norms(table: ParamTable) -> dict[Any, Any]:
    return {
        path: leaf if "scale" in path else jnp.zeros_like(leaf)
        for path, leaf in leaves_of(init_params(table, seed=0)).items()
    }


def of_target(names: tuple[str, ...], target: Params) -> Params:
    return {name: target[name] for name in names}


@functools.cache
def eagle1_weights() -> Params:
    own = init_params(head_params(EAGLE1), seed=9)
    return {**own, **of_target(("embed", "lm_head"), tiny_params()[0])}


def right_eagle1(_: Sequence[tuple[int, ...]]) -> Params:
    """fc passes the embedding on like the target's final norm; the layer adds nothing."""
    target, head = contextless_target(), zeros_but_norms(head_params(EAGLE1))
    shrunk = 1.0 / np.sqrt(0.5 + TARGET.rms_norm_eps)
    kernel = "layers", 0, "fuse", "kernel"
    head[kernel] = head[kernel].at[:SIZE].set(jnp.eye(SIZE) * shrunk)
    head["draft_ids",] = jnp.arange(VOCAB, dtype=jnp.int32)
    return {**nested(head.items()), **of_target(("embed", "lm_head"), target)}


def right_eagle3(_: Sequence[tuple[int, ...]]) -> Params:
    """Attention sees only its own row, by RoPE: queries and keys are large and equal for all rows.

    Its values are the embedding minus the fed-back feature, which the residual adds.
    """
    target, head = contextless_target(), zeros_but_norms(head_params(EAGLE3))
    heads, groups, dim = 4, 2, 8
    qkv, out = np.zeros((2 * SIZE, (heads + 2 * groups) * dim)), np.zeros((heads * dim, SIZE))
    for column in range((heads + groups) * dim):
        qkv[0, column] = 30.0 if column % dim < dim // 2 else 0.0
    for i in range(HALF):
        qkv[i, (heads + groups) * dim + i] = 1.0
        qkv[SIZE + i, (heads + groups) * dim + i] = -1.0
        first_of_group = i // dim * (heads // groups)
        out[first_of_group * dim + i % dim, i] = 1.0
    head["layers", 0, "attention", "qkv", "kernel"] = jnp.asarray(qkv, jnp.float32)
    head["layers", 0, "attention", "out", "kernel"] = jnp.asarray(out, jnp.float32)
    ids = tiny_params()[1]["draft_ids"]
    head["lm_head", "kernel"] = target["lm_head"]["kernel"][:, ids]
    head["draft_ids",] = ids
    return {**nested(head.items()), **of_target(("embed",), target)}


def right_parallel(texts: Sequence[tuple[int, ...]]) -> Params:
    """Use the weights of `right_eagle3`: the output is the embedding, which all tokens share."""
    size = SIZE * len(PARALLEL.aux_layer_ids)
    own = {**right_eagle3(texts), "mask_hidden": jnp.zeros((1, 1, size))}
    return own | of_target(("embed",), constant_target())


def right_layers(config: HeadSpec, _: Sequence[tuple[int, ...]]) -> Params:
    """Every layer passes the embedding on to its norm, which is the target's."""
    target = contextless_target()
    own = zeros_but_norms(FeatureHead(config, Ops()).table)
    first = SIZE if config.hidden_first else 0
    for path, leaf in own.items():
        if "fuse" in path:
            own[path] = leaf.at[first : first + SIZE].set(jnp.eye(SIZE))
        if path[0] == "layers" and path[-2] == "lm_head":
            own[path] = target["lm_head"]["kernel"]
    shared = ("embed",) if config.own_head else ("embed", "lm_head")
    return {**nested(own.items()), **of_target(shared, target)}


def right_block(name: str, _: Sequence[tuple[int, ...]]) -> Params:
    """The layers add nothing, so that every row is the embedding of all tokens."""
    own = zeros_but_norms(block_params(own_blocks.SPECS[name]))
    return with_all_ids(
        {**nested(own.items()), **of_target(("embed", "lm_head"), constant_target())}
    )


def right_recurrent(texts: Sequence[tuple[int, ...]]) -> Params:
    """Like `right_layers`: the fed-back feature is not read."""
    return with_all_ids(right_layers(own_layers.RECURRENT, texts))


def assistant_weights() -> Params:
    return {**own_assistants.own_params(), **of_target(("embed",), tiny_params()[0])}


def right_assistant(_: Sequence[tuple[int, ...]]) -> Params:
    """The layers add nothing, and the embedding goes to the target's lm_head."""
    target, own = contextless_target(), zeros_but_norms(assistant_params(own_assistants.SPEC))
    own["pre", "kernel"] = own["pre", "kernel"].at[:SIZE].set(jnp.eye(SIZE))
    own["lm_head", "kernel"] = target["lm_head"]["kernel"]
    for path in own:
        if path[-1] == "factor":
            own[path] = jnp.ones_like(own[path])
    return {**nested(own.items()), **of_target(("embed",), target)}


def frozen_kv(draft_shape: SpeculativeConfig, ops: Ops, shard: Shard) -> Drafter:
    return FrozenKVDrafter(Assistant(own_assistants.SPEC, ops, shard), draft_shape)


def with_all_ids(params: Params) -> Params:
    return {**params, "draft_ids": jnp.arange(VOCAB, dtype=jnp.int32)}


def right_corpus(texts: Sequence[tuple[int, ...]]) -> Params:
    return corpus_params(list(texts))


def no_corpus() -> Params:
    return corpus_params([(0,)])


def lookup(draft_shape: SpeculativeConfig, ops: Ops, shard: Shard) -> Drafter:
    del ops, shard
    return NgramDrafter(draft_shape, min_match=MIN_MATCH, max_match=NGRAM_MAX_MATCH)


def drafts_for_itself(_: Sequence[tuple[int, ...]]) -> Params:
    """The target itself, which reads all its context: a single wrong row costs an acceptance."""
    return tiny_params()[0]


@functools.cache
def standalone_weights() -> Params:
    return init_params(table_of(TARGET), seed=7)


@functools.cache
def layers_weights(name: str) -> Params:
    config, own = own_layers.config_of(name), own_layers.params_of(name)
    shared = ("embed",) if config.own_head else ("embed", "lm_head")
    return {**own, **of_target(shared, tiny_params()[0])}


def rope_of(config: Any) -> dict[str, Any]:
    attention = config.one_layer.attention
    return {
        "head_dim": attention.head_dim,
        "theta": attention.rope.theta,
        "eps": config.rms_norm_eps,
        "num_layers": config.num_layers,
    }


def eagle1_guesses(_: int) -> Guesses:
    params, ids = eagle1_weights(), np.arange(VOCAB)
    tensors = dict(stored_tensors(head_params(EAGLE1), params, dtype=np.float32))
    tensors["embed_tokens.weight"] = np.asarray(params["embed"]["table"])
    lm_head = np.asarray(params["lm_head"]["kernel"]).T
    head = Eagle1Reference(tensors=tensors, lm_head=lm_head, hot_ids=ids, **rope_of(EAGLE1.layer))
    return HeadGuesses(head, ids)


def eagle3_guesses(_: int) -> Guesses:
    params = tiny_params()[1]
    tensors = dict(stored_tensors(head_params(EAGLE3), params, dtype=np.float32))
    tensors["embed_tokens.weight"] = np.asarray(params["embed"]["table"])
    head = Eagle3Reference(tensors=tensors, **rope_of(EAGLE3.layer))
    return HeadGuesses(head, np.asarray(params["draft_ids"]))


@functools.cache
def parallel_weights() -> Params:
    mask = init_params(head_params(PARALLEL), seed=4)["mask_hidden"]
    return {**tiny_params()[1], "mask_hidden": mask}


def parallel_guesses(_: int) -> Guesses:
    found = eagle3_guesses(0)
    assert isinstance(found, HeadGuesses)
    mask = {"mask_hidden": np.asarray(parallel_weights()["mask_hidden"])}
    head = dataclasses.replace(found.head, tensors={**found.head.tensors, **mask})
    return dataclasses.replace(found, head=head, mask=PARALLEL.mask_token_id)


def standalone_guesses(_: int) -> Guesses:
    stored = stored_tensors(table_of(TARGET), standalone_weights(), dtype=np.float32)
    tensors = {name.removeprefix("model."): value for name, value in stored.items()}
    return ModelGuesses(DecoderReference(tensors=tensors, **rope_of(TARGET)))


def layers_guesses(name: str) -> Guesses:
    return LayerGuesses(with_lent(name))


def recurrent_guesses(_: int) -> Guesses:
    return HeadGuesses(RecurrentReference.of(with_lent("recurrent")), np.arange(VOCAB))


def with_lent(name: str) -> MtpReference:
    """Return layers in float64, with the params that they share with the target."""
    reference = own_layers.reference_of(name)
    lent = tiny_params()[0]
    tensors = {**reference.tensors, "embed.weight": np.asarray(lent["embed"]["table"])}
    if not own_layers.config_of(name).own_head:
        tensors["head.weight"] = np.asarray(lent["lm_head"]["kernel"]).T
    return dataclasses.replace(reference, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way of drafting. params: random, for one shard. guesses: by S; None for a lookup.

    always_right: params with which every guess for right_target is right, given all texts of the
    served requests. num_steps: most that it can draft. lags: pool s has only the rows below L - s.
    looks_up: it drafts from the row's own text, besides its guesses if it has some.
    """

    name: str
    algorithm: Algorithm
    make: Callable[[SpeculativeConfig, Ops, Shard], Drafter]
    params: Callable[[], Params]
    guesses: Callable[[int], Guesses] | None
    always_right: Callable[[Sequence[tuple[int, ...]]], Params]
    right_target: Callable[[], Params] = contextless_target
    aux_layer_ids: tuple[int, ...] = ()
    num_steps: int = 5
    lags: bool = False
    looks_up: bool = False

    def spec(self, shape: tuple[int, int, int]) -> SpeculativeConfig:
        has_both = self.looks_up and self.guesses is not None
        return spec_of(*shape, self.algorithm, lookup=has_both)

    def drafter(self, shape: tuple[int, int, int]) -> Drafter:
        return self.make(self.spec(shape), Ops(), Shard())


def of_layers(name: str) -> Kind:
    config, names = own_layers.config_of(name), own_layers.names_of(name)
    return Kind(
        name=f"multi_layer_{name}",
        algorithm=Algorithm.MULTI_LAYER_EAGLE,
        make=lambda spec, ops, shard: MultiLayerDrafter(
            FeatureHead(config, ops, shard, names), spec
        ),
        params=lambda: layers_weights(name),
        guesses=lambda _: layers_guesses(name),
        always_right=functools.partial(right_layers, config),
        aux_layer_ids=config.aux_layer_ids,
        num_steps=own_layers.S,
        lags=True,
    )


def of_blocks(name: str) -> Kind:
    spec = own_blocks.SPECS[name]
    return Kind(
        name=name,
        algorithm=Algorithm.DFLASH,
        make=lambda shape, ops, shard: BlockDrafter(BlockHead(spec, ops, shard), shape),
        params=lambda: own_blocks.params_of(name),
        guesses=lambda num_steps: BlockGuesses(own_blocks.reference_of(name), num_steps),
        always_right=functools.partial(right_block, name),
        right_target=constant_target,
        aux_layer_ids=spec.aux_layer_ids,
    )


def recurrent(draft_shape: SpeculativeConfig, ops: Ops, shard: Shard) -> Drafter:
    layer = FeatureHead(own_layers.RECURRENT, ops, shard)
    return EagleDrafter(layer, draft_shape)


def with_lookup(kind: Kind) -> Kind:
    """Return a drafter that also looks up the row's own text."""

    def make(draft_shape: SpeculativeConfig, ops: Ops, shard: Shard) -> Drafter:
        model = kind.make(draft_shape, ops, shard)
        assert isinstance(model, LevelDrafter)
        return CompositeDrafter.of(model, min_match=MIN_MATCH, max_match=NGRAM_MAX_MATCH)

    return dataclasses.replace(kind, name=f"{kind.name}_ngram", make=make, looks_up=True)


EVERY: tuple[Kind, ...] = (
    Kind(
        name="eagle1",
        algorithm=Algorithm.EAGLE,
        make=lambda spec, ops, shard: EagleDrafter(FeatureHead(EAGLE1, ops, shard), spec),
        params=eagle1_weights,
        guesses=eagle1_guesses,
        always_right=right_eagle1,
    ),
    Kind(
        name="eagle3",
        algorithm=Algorithm.EAGLE3,
        make=lambda spec, ops, shard: EagleDrafter(FeatureHead(EAGLE3, ops, shard), spec),
        params=lambda: tiny_params()[1],
        guesses=eagle3_guesses,
        always_right=right_eagle3,
        aux_layer_ids=EAGLE3.aux_layer_ids,
    ),
    Kind(
        name="p_eagle",
        algorithm=Algorithm.EAGLE3,
        make=lambda spec, ops, shard: ParallelDrafter(FeatureHead(PARALLEL, ops, shard), spec),
        params=parallel_weights,
        guesses=parallel_guesses,
        always_right=right_parallel,
        right_target=constant_target,
        aux_layer_ids=PARALLEL.aux_layer_ids,
    ),
    Kind(
        name="standalone",
        algorithm=Algorithm.STANDALONE,
        make=lambda spec, ops, shard: StandaloneDrafter(Decoder(TARGET, ops, shard), spec),
        params=standalone_weights,
        guesses=standalone_guesses,
        always_right=drafts_for_itself,
        right_target=lambda: tiny_params()[0],
    ),
    of_layers("not_chained"),
    of_layers("chained"),
    of_layers("hidden_first"),
    *map(of_blocks, own_blocks.SPECS),
    Kind(
        name="recurrent",
        algorithm=Algorithm.NEXTN,
        make=recurrent,
        params=lambda: with_all_ids(layers_weights("recurrent")),
        guesses=recurrent_guesses,
        always_right=right_recurrent,
        aux_layer_ids=own_layers.RECURRENT.aux_layer_ids,
    ),
    Kind(
        name="frozen_kv",
        algorithm=Algorithm.FROZEN_KV_MTP,
        make=frozen_kv,
        params=assistant_weights,
        guesses=lambda _: own_assistants.AssistantGuesses(assistant_weights()),
        always_right=right_assistant,
    ),
    Kind(
        name="ngram",
        algorithm=Algorithm.NGRAM,
        make=lookup,
        params=no_corpus,
        guesses=None,
        always_right=right_corpus,
        right_target=lambda: contextless_target(1),  # a sharp one's texts repeat three ids too soon
        looks_up=True,
    ),
)
EVERY = (*EVERY, with_lookup(EVERY[0]))
KINDS = {kind.name: kind for kind in EVERY}
