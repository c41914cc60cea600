"""Drafting with a feature-level head (EAGLE-1 to 3): propose a tree, advance over what was emitted.

A row of the head is a pair (token i + 1, feature i). Level 1 needs no forward: its candidates come
from the last advance. How the tree grows from them is `beams`, how candidates are ranked
`candidates`; here is what a row is, and what an advance leaves for the next propose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.config import drafting
from jspec.config.drafting import Drafting
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.device.pytree import pytree
from jspec.device.state import SamplingRows
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.models.files.stored import Place
from jspec.models.heads.eagle3 import Eagle3Head, eagle3_params
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.heads.head_files import canonical_name, published_specs
from jspec.models.heads.hf_eagle3 import check_eagle3, load_eagle3
from jspec.models.heads.target_copies import EMBED, TargetCopy
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.rows import AttentionRows
from jspec.pallas_kernels.ops import Ops
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.model_spec import ModelSpec, cache_groups
from jspec.speculative.beams import BeamLayout, BeamRows, LevelOne, first_level, grow_tree
from jspec.speculative.candidates import Ranking, rank_candidates
from jspec.speculative.drafter import (
    Emitted,
    Needs,
    RowsInStep,
    following_ids,
    next_positions,
)
from jspec.speculative.drafters.source import DraftRequest, DraftSource
from jspec.speculative.target import KVPool, Params


@pytree
class EagleState:
    """What one advance leaves for the next propose; indexed by slot, or by row once gathered."""

    hidden: jax.Array  # [., E], the head's own output at the last row
    level1_ids: jax.Array  # i32[., K], target ids
    level1_scores: jax.Array  # f32[., K], path scores, <= 0


class HeadConfig(Protocol):
    """What a drafter asks of a head's config. aux_layer_ids: none if it reads the last hidden."""

    @property
    def layer(self) -> ModelSpec: ...

    @property
    def aux_layer_ids(self) -> tuple[int, ...]: ...


class FeatureHead(Protocol):
    """A draft model that reads (token, feature) pairs: an Eagle1Head, an Eagle3Head, or a fake."""

    @property
    def config(self) -> HeadConfig: ...

    @property
    def table(self) -> ParamTable: ...

    @property
    def shard(self) -> Shard: ...

    @property
    def ops(self) -> Ops: ...

    def features(self, params: Params, given: jax.Array, /) -> jax.Array: ...

    def forward(
        self,
        params: Params,
        token_ids: jax.Array,
        hidden: jax.Array,
        kv: KVPool,
        rows: AttentionRows,
        *,
        queries_per_row: int | None,
        kept: jax.Array | None = None,
    ) -> tuple[jax.Array, KVPool]: ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array: ...


@dataclass(frozen=True, slots=True)
class EagleDrafter:
    """EAGLE, with any head.

    draft_noise: False drafts plain top-k, to measure what shared noise gains; the emitted text is
    the same.
    """

    head: FeatureHead
    spec: SpeculativeConfig
    draft_noise: bool = True

    @property
    def drafting(self) -> Drafting:
        return drafting.EAGLE

    @property
    def table(self) -> ParamTable:
        return self.head.table

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(self.head.config.layer, name="draft")

    @property
    def needs(self) -> Needs:
        ids = self.head.config.aux_layer_ids
        return Needs(hidden=not ids, aux_layer_ids=ids)

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> EagleState:
        del context_length
        size = self.head.config.layer.hidden_size
        return EagleState(
            hidden=jnp.zeros((num_slots, size), dtype),
            level1_ids=jnp.zeros((num_slots, self.spec.topk), jnp.int32),
            level1_scores=jnp.zeros((num_slots, self.spec.topk), jnp.float32),
        )

    def candidates(
        self,
        params: Params,
        hidden: Float[Array, "B R E"],
        *,
        positions: Int[Array, "B R"],
        sampling: SamplingRows,
    ) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
        """Best K target ids after each row and the log-probability of each, best first.

        positions: token position of the candidates (their noise).
        """
        return rank_candidates(
            self.head.logits(params, hidden),
            params["draft_ids"],
            sampling,
            positions=positions,
            ranking=Ranking(self.spec.topk, self.draft_noise),
            shard=self.head.shard,
            ops=self.head.ops,
        )

    def of_shape(self, spec: SpeculativeConfig) -> EagleDrafter:
        return replace(self, spec=spec)

    def propose(
        self, params: Params, caches: KVPool, state: EagleState, rows: RowsInStep
    ) -> tuple[KVPool, DraftTree]:
        """S - 1 draft forwards, then the tree. Returns the pool with the scratch rows written."""
        shape = (*state.level1_ids.shape, state.hidden.shape[1])
        return grow_tree(
            LevelOne(
                ids=state.level1_ids,
                scores=state.level1_scores,
                carried=jnp.broadcast_to(state.hidden[:, None], shape),
            ),
            caches,
            rows,
            partial(self.expand, params=params, sampling=rows.sampling),
            spec=self.spec,
            layout=BeamLayout.PAIRS,
        )

    def expand(
        self,
        caches: KVPool,
        ids: Int[Array, "B K"],
        carried: Float[Array, "B K E"],
        beams: BeamRows,
        *,
        params: Params,
        sampling: SamplingRows,
    ) -> tuple[KVPool, Float[Array, "B K E"], Int[Array, "B K K"], Float[Array, "B K K"]]:
        """One draft forward, each beam's token paired with its parent's output (beams)."""
        batch, topk = ids.shape
        hidden, caches = self.head.forward(
            params,
            ids.reshape(-1),
            carried.reshape(batch * topk, -1),
            caches,
            beams.rows,
            queries_per_row=topk,
        )
        hidden = hidden.reshape(carried.shape)
        found, terms = self.candidates(params, hidden, positions=beams.positions, sampling=sampling)
        return caches, hidden, found, terms

    def advance(
        self, params: Params, caches: KVPool, state: EagleState, emitted: Emitted
    ) -> tuple[KVPool, EagleState]:
        """Runs the head over (token i + 1, target feature i) pairs, with the target's features.

        Its row i lies where token i does: at slot and RoPE position i. What the last pair of a row
        predicts are the level-1 candidates, after `next_ids`.
        """
        del state  # all that it held came from the former last pair
        features = emitted.features
        given = features.aux_hidden if self.needs.aux_layer_ids else features.hidden
        fused = self.head.features(params, given)
        final, caches = self.head.forward(
            params,
            following_ids(emitted),
            fused,
            caches,
            emitted.rows,
            queries_per_row=emitted.queries_per_row,
            kept=emitted.last,
        )
        position = indexing.chosen_position(next_positions(emitted), 0)
        ids, terms = self.candidates(
            params, final[:, None], positions=position[:, None], sampling=emitted.sampling
        )
        first = first_level(ids, terms, carried=final)
        return caches, EagleState(hidden=final, level1_ids=first.ids, level1_scores=first.scores)


def eagle_source(request: DraftRequest) -> DraftSource:
    """An EAGLE-3 head in SGLang's or speculators' layout. Its row in `registry`.

    Raises ConfigError or CheckpointError for a head that does not fit the target, the arguments or
    the shards.
    """
    args, path, shards = request.args, request.checkpoint, request.shards
    config = load_eagle3_config(
        path,
        target=request.target,
        draft_rope_theta=args.speculative_draft_rope_theta,
        reads_names=args.load_format != "dummy",
    )
    check_draft_vocabulary(config.draft_vocab_size, request)
    if args.load_format != "dummy":
        check_eagle3(path, config)  # before the target is read, which takes longer

    def make(ops: Ops, shard: Shard) -> EagleDrafter:
        head = Eagle3Head(config, ops, shard)
        return EagleDrafter(head, args.speculative, draft_noise=args.speculative_draft_noise)

    def read(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
        return load_eagle3(
            path,
            config,
            target_params=target_params,
            dtype=np.dtype(dtype),
            shards=shards,
            place=place,
        )

    return DraftSource(
        make=make,
        read=read,
        specs=(config.layer,),
        aux_layer_ids=config.aux_layer_ids,
        shares=("embed",),  # as most heads do
        published=published_specs(eagle3_params(config)),
        canonical=canonical_name,
        copies_in=lambda _: {"embed_tokens.weight": TargetCopy(path=EMBED, is_read=True)},
    )


def check_draft_vocabulary(size: int, request: DraftRequest) -> None:
    """ConfigError for a draft vocabulary of fewer than K ids, or that the shards cannot divide."""
    topk = request.args.speculative.topk
    if topk > size:
        raise ConfigError(
            f"speculative_eagle_topk is {topk}; expected at most {size}, the draft vocabulary"
        )
    if size % request.shards:
        raise ConfigError(
            f"tp_size is {request.shards}; expected a divisor of the draft vocabulary {size}"
        )
