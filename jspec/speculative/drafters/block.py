"""Drafters that guess a whole block in one forward (DFlash, arXiv:2602.06036).

`advance` runs no layer: it writes K and V computed from the emitted tokens' features. `propose`
runs the root and S mask tokens, which see the cached text and each other, and builds a tree from
the best candidates of each level. These do not depend on their parents, except with a Markov head
(DSpark), which ranks the levels one after the other. A selector (DFlash2) reranks each level's best
tokens in the same way.

    worked example, L = 7, root t7, S = 2; a verification accepts a1 a2 with bonus y
    propose   t7 MASK MASK at positions 7 8 9, in scratch slots 7 8 9; the masks guess the tokens
              at 8 and 9, with the noise of 8 and 9
    advance   slots 7 8 9 hold K and V of the features of t7 a1 a2. L' = 10, the root is y
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.layers.linear import Shard
from jspec.models.heads.block_head import BlockHead
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.model_spec import cache_groups
from jspec.speculative.beams import RankLevel, grow_block
from jspec.speculative.candidates import Ranking, rank_candidates, top_candidates
from jspec.speculative.drafter import Emitted, LevelDrafter, Needs, StepBatch
from jspec.speculative.drafters.ranked import EagleDrafter, RankedState
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import Level, pack_bits


@dataclass(frozen=True, slots=True)
class BlockDrafter(LevelDrafter):
    """DFlash, DSpark and DFlash2. draft_noise: see `candidates.Ranking`."""

    model: BlockHead
    draft_shape: SpeculativeConfig
    draft_noise: bool = True

    @property
    def algorithm(self) -> Algorithm:
        return self.draft_shape.algorithm

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(self.model.spec.layer, name="draft")

    @property
    def table(self) -> ParamTable:
        return self.model.table

    @property
    def needs(self) -> Needs:
        return Needs(aux_layer_ids=self.model.spec.aux_layer_ids)

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> tuple[()]:
        del num_slots, context_length, dtype
        return ()

    def of_shape(self, draft_shape: SpeculativeConfig) -> BlockDrafter:
        return replace(self, draft_shape=draft_shape)

    def advance(
        self, params: Params, caches: KVPool, state: tuple[()], emitted: Emitted
    ) -> tuple[KVPool, tuple[()]]:
        features = emitted.features.aux_hidden
        how: Any = {"queries_per_row": emitted.queries_per_row}
        return self.model.write_context(params, features, caches, emitted.rows, **how), state

    def levels(
        self, params: Params, caches: KVPool, state: tuple[()], rows: StepBatch
    ) -> tuple[KVPool, tuple[Level, ...]]:
        caches, rank, carried = self.guess(params, caches, state, rows)
        return caches, grow_block(
            rows.root_ids, rank, draft_shape=self.draft_shape, carried=carried
        )

    def guess(
        self, params: Params, caches: KVPool, state: tuple[()], rows: StepBatch
    ) -> tuple[KVPool, RankLevel, Any]:
        """Run the block. Return (caches, the ranking of its levels, what the root carries)."""
        del state
        out, caches = self.run_block(params, caches, rows)
        return caches, *self.ranking(params, out, rows)

    def run_block(
        self, params: Params, caches: KVPool, rows: StepBatch
    ) -> tuple[Float[Array, "B R E"], KVPool]:
        spec = self.model.spec
        size = spec.num_rows(self.draft_shape.num_steps)
        masks = jnp.full((rows.root_ids.shape[0], size - 1), spec.mask_token_id, jnp.int32)
        return self.model.forward(
            params,
            jnp.concatenate((rows.root_ids[:, None], masks), axis=1),
            caches,
            _block_rows(rows, size=size),
            causal_mask=_masked(rows, jnp.tril(jnp.ones((size, size), bool))),
        )

    def ranking(
        self, params: Params, out: Float[Array, "B R E"], rows: StepBatch
    ) -> tuple[RankLevel, Any]:
        num_steps, spec = self.draft_shape.num_steps, self.model.spec
        hidden = out[:, -num_steps:]
        base = self.model.logits(params, hidden)
        if spec.markov is not None:
            state = self.model.no_state(out.shape[0], out.dtype)
            for row in range(out.shape[1] - num_steps):  # the root's, whose logits are not used
                state, _ = self.model.markov(params, rows.root_ids[:, None], out[:, row], state)
            return partial(self._rank_after, params, rows, base, hidden), state
        depths = jnp.arange(num_steps, dtype=jnp.int32)
        topk = self.draft_shape.topk if spec.selector is None else spec.selector.num_candidates
        ids, terms = self._rank(params, rows, base, depths, topk=topk)
        if spec.selector is not None:
            return partial(self._rank_selected, params, hidden, ids, terms), ()

        return _alike(ids, terms), ()

    def _rank_after(
        self,
        params: Params,
        rows: StepBatch,
        base: Float[Array, "B S U"],
        hidden: Float[Array, "B S E"],
        depth: int,
        parents: Int[Array, "B P"],
        state: Float[Array, "B P r"],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A `RankLevel` by the Markov head."""
        state, more = self.model.markov(params, parents, hidden[:, depth], state)
        depths = jnp.full(parents.shape[1:], depth, jnp.int32)
        logits = base[:, depth, None] + more
        return state, *self._rank(params, rows, logits, depths, topk=self.draft_shape.topk)

    def _rank_selected(
        self,
        params: Params,
        hidden: Float[Array, "B S E"],
        ids: Int[Array, "B S C"],
        terms: Float[Array, "B S C"],
        depth: int,
        parents: Int[Array, "B P"],
        carried: Any,
    ) -> tuple[Any, jax.Array, jax.Array]:
        """A `RankLevel` by the selector. terms: the candidates', with the shared noise."""
        found = ids[:, depth]
        more = self.model.transitions(params, parents, hidden[:, depth], found)
        places, best = top_candidates(
            terms[:, depth, None] + more,
            jnp.arange(found.shape[1], dtype=jnp.int32),
            topk=self.draft_shape.topk,
            shard=Shard(),
        )
        own = jnp.take_along_axis(found[:, None], places, axis=2, mode="clip")
        return carried, own, best

    def _rank(
        self,
        params: Params,
        rows: StepBatch,
        logits: Float[Array, "B R U"],
        depths: Int[Array, "R"],
        *,
        topk: int,
    ) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
        positions = indexing.chosen_position(rows.seq_lens[:, None], depths)
        return rank_candidates(
            logits,
            params["draft_ids"],
            rows.sampling,
            positions=positions,
            ranking=Ranking(topk, self.draft_noise),
            shard=self.model.shard,
            ops=self.model.ops,
        )


@dataclass(frozen=True, slots=True)
class ParallelDrafter(EagleDrafter):
    """P-EAGLE: an EAGLE head that drafts the levels after the first from masks, in one forward.

    worked example, L = 7, root t7, S = 3: the last advance ran the pair of t7 in slot 6, which
    gave level 1. Two mask pairs in slots 7 8, at RoPE 7 8, guess the tokens at 9 and 10.
    """

    def levels(
        self, params: Params, caches: KVPool, state: RankedState, rows: StepBatch
    ) -> tuple[KVPool, tuple[Level, ...]]:
        caches, rank, _ = self.guess(params, caches, state, rows)
        return caches, grow_block(rows.root_ids, rank, draft_shape=self.draft_shape)

    def guess(
        self, params: Params, caches: KVPool, state: RankedState, rows: StepBatch
    ) -> tuple[KVPool, RankLevel, tuple[()]]:
        """Run the masks. Return (caches, the ranking of the levels, nothing carried)."""
        topk, size = self.draft_shape.topk, self.draft_shape.num_steps - 1
        ids, terms = (x[:, None, :topk] for x in (state.level1_ids, state.level1_scores))
        if not size:
            return caches, _alike(ids, terms), ()
        batch = rows.root_ids.shape[0]
        depths = 1 + jnp.arange(size, dtype=jnp.int32)
        feature = self.model.mask_feature(params)
        out, caches = self.model.forward(
            params,
            jnp.full((batch * size,), self.model.mask_token_id, jnp.int32),
            jnp.broadcast_to(feature, (batch * size, feature.size)),
            caches,
            AttentionMetadata(
                page_table=rows.page_table,
                window_tables=rows.window_tables,
                prefix_lens=rows.seq_lens,
                cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * size,
                q_positions=indexing.draft_position(rows.seq_lens[:, None], depths).reshape(-1),
                shared=rows.shared,
            ),
            queries_per_row=size,
        )
        found = self.candidates(
            params,
            out.reshape(batch, size, -1),
            positions=indexing.chosen_position(rows.seq_lens[:, None], depths),
            sampling=rows.sampling,
            level=0,
        )
        every = (jnp.concatenate(pair, axis=1) for pair in zip((ids, terms), found, strict=True))
        return caches, _alike(*every), ()


def _alike(ids: Int[Array, "B S K"], terms: Float[Array, "B S K"]) -> RankLevel:
    """Return a ranking whose candidates do not depend on their parents."""

    def rank(depth: int, parents: jax.Array, carried: Any) -> Any:
        shape = (*parents.shape, ids.shape[-1])
        return carried, *(jnp.broadcast_to(x[:, depth, None], shape) for x in (ids, terms))

    return rank


def _block_rows(rows: StepBatch, *, size: int) -> AttentionMetadata:
    """Return the metadata of blocks after the cached text, whose tokens all see each other."""
    batch = rows.root_ids.shape[0]
    places = jnp.arange(size, dtype=jnp.int32)
    positions = indexing.target_position(rows.seq_lens[:, None], places)
    return AttentionMetadata(
        page_table=rows.page_table,
        window_tables=rows.window_tables,
        prefix_lens=rows.seq_lens,
        cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * size,
        q_positions=positions.reshape(-1),
        tail_mask=_masked(rows, jnp.ones((size, size), bool)),
        tail_positions=positions,
        shared=rows.shared,
    )


def _masked(rows: StepBatch, seen: Any) -> Any:
    return pack_bits(jnp.tile(seen, (rows.root_ids.shape[0], 1)))
