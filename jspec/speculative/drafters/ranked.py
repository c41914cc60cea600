"""Drafters that rank the next tokens of a model level by level: EAGLE, NEXTN and STANDALONE.

Level 1 needs no forward: the last advance ran the model over the row's last token, and its K best
candidates are the state. `beams` grows the other levels and `candidates` ranks them.

EAGLE (any head): a draft slot holds a pair (token i + 1, feature i), and every beam carries its
parent's output as its feature.

STANDALONE (Leviathan et al., 2022, arXiv:2211.17192; acceptance follows from shared noise instead):
a language model with the target's vocabulary. A slot holds a token at its own position. `advance`
runs over the emitted tokens and the new root, whose logits give level 1. The root's slot L' is
scratch: the next advance writes the same values there again.

    worked example, L = 7, root t7, S = 3, K = 2; a verification accepts a1 a2 with bonus y
    propose   reads slots 0..7 (the last advance wrote 7, the root's); beams a1 b1 in slots 8 9 at
              RoPE 8; two of their children in slots 10 11 at RoPE 9
    advance   slots 7 8 9 10 hold t7 a1 a2 y, at RoPE 7 8 9 10; M + 1 = 5 at most. L' = 10, and y's
              logits, with the noise of position 11, are the next level 1

With K = 1 `propose` has written everything but the KV of the last draft and the new root to the
final slots, so advance runs over two tokens per row.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.pytree import pytree
from jspec.device.state import SamplingBatch
from jspec.models.decoder import Decoder
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.model_spec import cache_groups
from jspec.speculative.beams import BeamLayout, BeamRows, LevelOne, first_level, grow_beams
from jspec.speculative.candidates import Ranking, rank_candidates
from jspec.speculative.drafter import (
    Emitted,
    LevelDrafter,
    Needs,
    StepBatch,
    TokenRows,
    following_ids,
    last_two,
    next_positions,
    with_next_ids,
)
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import Level


@pytree
class RankedState:
    """State between an advance and the next propose, by slot, or by row once gathered."""

    level1_ids: jax.Array  # i32[., K], target ids
    level1_scores: jax.Array  # f32[., K], path scores, <= 0
    own: Any  # further state of the drafter


@dataclass(frozen=True, slots=True)
class RankedDrafter(LevelDrafter):
    """A drafter that ranks level by level. draft_noise: see `candidates.Ranking`."""

    model: FeatureHead | Decoder
    draft_shape: SpeculativeConfig
    draft_noise: bool = True

    layout: ClassVar[BeamLayout]

    @property
    def algorithm(self) -> Algorithm:
        return self.draft_shape.algorithm

    @property
    def table(self) -> ParamTable:
        return self.model.table

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    @abstractmethod
    def cache_groups(self) -> tuple[CacheGroup, ...]: ...

    @abstractmethod
    def init_own(self, num_slots: int, *, dtype: DTypeLike) -> Any: ...

    @abstractmethod
    def inputs(self, params: Params, emitted: Emitted) -> tuple[TokenRows, Any]:
        """Return the tokens that the model runs over after a verification, and their features."""

    @abstractmethod
    def run(
        self,
        params: Params,
        token_ids: Int[Array, "T"],
        features: Any,
        caches: KVPool,
        rows: AttentionMetadata,
        *,
        queries_per_row: int | None,
        kept: Int[Array, "R"] | None = None,
    ) -> tuple[Float[Array, "R E"], Any, KVPool]:
        """Run the model. Return (outputs, features for the tokens after them, caches)."""

    @abstractmethod
    def scored(
        self, params: Params, hidden: jax.Array, *, level: int
    ) -> tuple[Float[Array, "B R U"], Int[Array, "U"]]:
        """Return the logits of outputs, and the target id of each column."""

    def of_shape(self, draft_shape: SpeculativeConfig) -> Self:
        return replace(self, draft_shape=draft_shape)

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> RankedState:
        del context_length
        topk = self.draft_shape.topk
        return RankedState(
            level1_ids=jnp.zeros((num_slots, topk), jnp.int32),
            level1_scores=jnp.zeros((num_slots, topk), jnp.float32),
            own=self.init_own(num_slots, dtype=dtype),
        )

    def levels(
        self, params: Params, caches: KVPool, state: RankedState, rows: StepBatch
    ) -> tuple[KVPool, tuple[Level, ...]]:
        first = LevelOne(
            ids=state.level1_ids,
            scores=state.level1_scores,
            carried=self.carried_by_root(state.own, topk=state.level1_ids.shape[1]),
        )
        expand = partial(self.expand, params=params, own=state.own, rows=rows)
        return grow_beams(
            first, caches, rows, expand, draft_shape=self.draft_shape, layout=self.layout
        )

    def advance(
        self, params: Params, caches: KVPool, state: RankedState, emitted: Emitted
    ) -> tuple[KVPool, RankedState]:
        final, own, caches = self.follow(params, caches, state.own, emitted)
        position = indexing.chosen_position(next_positions(emitted), 0)
        ids, terms = self.candidates(
            params, final[:, None], positions=position[:, None], sampling=emitted.sampling, level=0
        )
        first = first_level(ids, terms, carried=())
        return caches, RankedState(level1_ids=first.ids, level1_scores=first.scores, own=own)

    def candidates(
        self,
        params: Params,
        hidden: Float[Array, "B R E"],
        *,
        positions: Int[Array, "B R"],
        sampling: SamplingBatch,
        level: int,
    ) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
        """Rank the tokens after each output. level: of the draft; 0 is after the emitted tokens."""
        logits, ids = self.scored(params, hidden, level=level)
        return rank_candidates(
            logits,
            ids,
            sampling,
            positions=positions,
            ranking=Ranking(self.draft_shape.topk, self.draft_noise),
            shard=self.model.shard,
            ops=self.model.ops,
        )

    def carried_by_root(self, own: Any, *, topk: int) -> Any:
        def spread(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x[:, None], (x.shape[0], topk, *x.shape[1:]))

        return jax.tree.map(spread, own)

    def expand(
        self,
        caches: KVPool,
        ids: Int[Array, "B K"],
        carried: Any,
        beams: BeamRows,
        *,
        params: Params,
        own: Any,
        rows: StepBatch,
    ) -> tuple[KVPool, Any, Int[Array, "B K K"], Float[Array, "B K K"]]:
        del own
        batch, topk = ids.shape
        features = jax.tree.map(lambda x: x.reshape(batch * topk, -1), carried)
        out, features, caches = self.run(
            params, ids.reshape(-1), features, caches, beams.rows, queries_per_row=topk
        )
        found, terms = self.candidates(
            params,
            out.reshape(batch, topk, -1),
            positions=beams.positions,
            sampling=rows.sampling,
            level=beams.depth,
        )
        carried = jax.tree.map(lambda x: x.reshape(batch, topk, -1), features)
        return caches, carried, found, terms

    def follow(
        self, params: Params, caches: KVPool, own: Any, emitted: Emitted
    ) -> tuple[Float[Array, "R E"], Any, KVPool]:
        """Run over the emitted tokens. Return (each row's last output, the next own, caches)."""
        del own  # derived from the previous last token
        tokens, features = self.inputs(params, emitted)
        return self.run(
            params,
            tokens.token_ids,
            features,
            caches,
            tokens.rows,
            queries_per_row=tokens.queries_per_row,
            kept=tokens.last,
        )


@dataclass(frozen=True, slots=True)
class EagleDrafter(RankedDrafter):
    """EAGLE with any head. `RankedState.own` is the head's output at the last pair, [., E]."""

    model: FeatureHead

    layout: ClassVar[BeamLayout] = BeamLayout.PAIRS

    @property
    def needs(self) -> Needs:
        ids = self.model.spec.aux_layer_ids
        return Needs(hidden=not ids, aux_layer_ids=ids)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(self.model.spec.layer, name="draft")

    def init_own(self, num_slots: int, *, dtype: DTypeLike) -> Any:
        return jnp.zeros((num_slots, self.model.spec.layer.hidden_size), dtype)

    def inputs(self, params: Params, emitted: Emitted) -> tuple[TokenRows, Float[Array, "T E"]]:
        """Return pairs (token i + 1, feature i), which are at slot and RoPE position i. Each row's
        last pair predicts the level-1 candidates, the tokens after `next_ids`."""
        found = emitted.features
        given = found.aux_hidden if self.needs.aux_layer_ids else found.hidden
        pairs = TokenRows(
            token_ids=following_ids(emitted),
            rows=emitted.rows,
            last=emitted.last,
            queries_per_row=emitted.queries_per_row,
        )
        return pairs, self.model.features(params, given)

    def run(
        self,
        params: Params,
        token_ids: jax.Array,
        features: jax.Array,
        caches: KVPool,
        rows: AttentionMetadata,
        **static: Any,
    ) -> tuple[jax.Array, jax.Array, KVPool]:
        out, caches = self.model.forward(params, token_ids, features, caches, rows, **static)
        return out, out, caches

    def scored(
        self, params: Params, hidden: jax.Array, *, level: int
    ) -> tuple[jax.Array, jax.Array]:
        return self.model.logits(params, hidden, level=level), self.model.token_ids(params)


@dataclass(frozen=True, slots=True)
class StandaloneDrafter(RankedDrafter):
    """A language model that drafts. Its state is level 1 alone, and beams carry only KV."""

    model: Decoder

    layout: ClassVar[BeamLayout] = BeamLayout.TOKENS

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(self.model.spec, name="draft")

    def init_own(self, num_slots: int, *, dtype: DTypeLike) -> tuple[()]:
        del num_slots, dtype
        return ()

    def inputs(self, params: Params, emitted: Emitted) -> tuple[TokenRows, tuple[()]]:
        """Return the emitted tokens and the one after them; for a chain, the last two of these.

        After a chunk that is not final, the token after it is the next prompt token; the next chunk
        writes its KV again, and its prediction is unused.
        """
        del params
        return last_two(emitted) if emitted.is_chain else with_next_ids(emitted), ()

    def run(
        self,
        params: Params,
        token_ids: jax.Array,
        features: tuple[()],
        caches: KVPool,
        rows: AttentionMetadata,
        **static: Any,
    ) -> tuple[jax.Array, tuple[()], KVPool]:
        out, _, caches = self.model.forward(params, token_ids, caches, rows, **static)
        return out, features, caches

    def scored(
        self, params: Params, hidden: jax.Array, *, level: int
    ) -> tuple[jax.Array, jax.Array]:
        del level
        return self.model.logits(params, hidden), self.model.token_ids()
