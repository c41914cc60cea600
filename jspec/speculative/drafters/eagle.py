"""EAGLE-1 to 3: drafting with a head that reads the target's features.

A draft slot holds a pair (token i + 1, feature i). Level 1 needs no forward: its candidates come
from the last advance. `beams` grows the tree and `candidates` ranks; this file defines the head's
inputs and the state from one advance to the next propose.
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

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.device.pytree import pytree
from jspec.device.state import SamplingBatch
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.models.files.stored import Place
from jspec.models.heads.eagle3 import Eagle3Head, eagle3_params
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.heads.head_files import canonical_name, published_specs
from jspec.models.heads.hf_eagle3 import check_eagle3, load_eagle3
from jspec.models.heads.target_copies import EMBED, TargetCopy
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.model_spec import ModelSpec, cache_groups
from jspec.speculative.beams import BeamLayout, BeamRows, LevelOne, first_level, grow_tree
from jspec.speculative.candidates import Ranking, rank_candidates
from jspec.speculative.drafter import (
    Emitted,
    Needs,
    StepBatch,
    following_ids,
    next_positions,
)
from jspec.speculative.drafters.source import DraftRequest, DraftSource
from jspec.speculative.target import KVPool, Params


@pytree
class EagleState:
    """State from an advance to the next propose, by slot, or by row once gathered."""

    hidden: jax.Array  # [., E], the head's output at the last pair
    level1_ids: jax.Array  # i32[., K], target ids
    level1_scores: jax.Array  # f32[., K], path scores, <= 0


class HeadConfig(Protocol):
    """The part of a head's config that the drafter reads; no aux_layer_ids: it reads the last
    hidden.
    """

    @property
    def layer(self) -> ModelSpec: ...

    @property
    def aux_layer_ids(self) -> tuple[int, ...]: ...


class FeatureHead(Protocol):
    """A draft model over (token, feature) pairs: an Eagle1Head or Eagle3Head."""

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
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
        kept: jax.Array | None = None,
    ) -> tuple[jax.Array, KVPool]: ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array: ...


@dataclass(frozen=True, slots=True)
class EagleDrafter:
    """EAGLE with any head. draft_noise: as in `candidates.Ranking`."""

    head: FeatureHead
    spec: SpeculativeConfig
    draft_noise: bool = True

    @property
    def algorithm(self) -> Algorithm:
        return self.spec.algorithm

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
        sampling: SamplingBatch,
    ) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
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
        self, params: Params, caches: KVPool, state: EagleState, rows: StepBatch
    ) -> tuple[KVPool, DraftTree]:
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
        sampling: SamplingBatch,
    ) -> tuple[KVPool, Float[Array, "B K E"], Int[Array, "B K K"], Float[Array, "B K K"]]:
        """Run one draft forward (`ForwardBeams`): each beam's token with its parent's output."""
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
        """Run the head over pairs (token i + 1, feature i), which are at slot and RoPE position i.

        Each row's last pair predicts the level-1 candidates, the tokens after `next_ids`.
        """
        del state  # derived from the previous last pair
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
    """Plan an EAGLE-3 head (SGLang's or speculators' layout); raises ConfigError or CheckpointError
    if it does not fit.
    """
    args, path, shards = request.args, request.checkpoint, request.shards
    config = load_eagle3_config(
        path,
        target=request.target,
        draft_rope_theta=args.speculative_draft_rope_theta,
        reads_names=args.load_format != "dummy",
    )
    check_draft_vocabulary(config.draft_vocab_size, request)
    shares: tuple[str, ...] = ("embed",)  # as most heads do
    if args.load_format != "dummy":
        shares = check_eagle3(path, config)  # before the slower read of the target

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
        shares=shares,
        published=published_specs(eagle3_params(config)),
        canonical=canonical_name,
        copies_in=lambda _: {"embed_tokens.weight": TargetCopy(path=EMBED, is_read=True)},
    )


def check_draft_vocabulary(size: int, request: DraftRequest) -> None:
    """Raise ConfigError for a draft vocabulary under K ids or not divisible by the shards."""
    topk = request.args.speculative.topk
    if topk > size:
        raise ConfigError(
            f"speculative_eagle_topk is {topk}; expected at most {size}, the draft vocabulary"
        )
    if size % request.shards:
        raise ConfigError(
            f"tp_size is {request.shards}; expected a divisor of the draft vocabulary {size}"
        )
