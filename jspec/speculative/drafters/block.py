"""Drafters that guess a whole block in one forward (DFlash, arXiv:2602.06036).

`advance` runs no layer: it writes K and V made of the emitted tokens' features. `propose` runs the
root and S mask tokens, whose rows see the cached text and each other, and builds a tree of what
they guess: what may follow a token depends on its depth, so the best paths are combinations of the
levels' best candidates.

    worked example, L = 7, root t7, S = 2; a verification accepts a1 a2 with bonus y
    propose   rows t7 MASK MASK at positions 7 8 9, in scratch slots 7 8 9; the masks' rows guess
              the tokens at 8 and 9, with the noise of 8 and 9
    advance   slots 7 8 9 hold K and V of the features of t7 a1 a2. L' = 10, the root is y

A block has 1 + S rows, also if the checkpoint was trained on more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.models.heads.block_head import BlockHead
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.model_spec import cache_groups
from jspec.speculative.beams import grow_from_lattice
from jspec.speculative.candidates import Ranking, rank_candidates
from jspec.speculative.drafter import Emitted, Needs, StepBatch
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import pack_bits


@dataclass(frozen=True, slots=True)
class BlockDrafter:
    """DFlash. draft_noise: as in `candidates.Ranking`."""

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

    def propose(
        self, params: Params, caches: KVPool, state: tuple[()], rows: StepBatch
    ) -> tuple[KVPool, DraftTree]:
        del state
        hidden, caches = self.run_block(params, caches, rows)
        depths = jnp.arange(self.draft_shape.num_steps, dtype=jnp.int32)
        ids, terms = rank_candidates(
            self.model.logits(params, hidden),
            params["draft_ids"],
            rows.sampling,
            positions=indexing.chosen_position(rows.seq_lens[:, None], depths),
            ranking=Ranking(self.draft_shape.topk, self.draft_noise),
            shard=self.model.shard,
            ops=self.model.ops,
        )
        return caches, grow_from_lattice(rows.root_ids, ids, terms, draft_shape=self.draft_shape)

    def run_block(
        self, params: Params, caches: KVPool, rows: StepBatch
    ) -> tuple[Float[Array, "B S E"], KVPool]:
        """Return the outputs that predict levels 1 to S, and the caches with the block."""
        spec, num_steps = self.model.spec, self.draft_shape.num_steps
        size = spec.num_rows(num_steps)
        masks = jnp.full((rows.root_ids.shape[0], size - 1), spec.mask_token_id, jnp.int32)
        out, caches = self.model.forward(
            params,
            jnp.concatenate((rows.root_ids[:, None], masks), axis=1),
            caches,
            _block_rows(rows, size=size),
            causal_mask=_masked(rows, jnp.tril(jnp.ones((size, size), bool))),
        )
        return out[:, size - num_steps :], caches


def _block_rows(rows: StepBatch, *, size: int) -> AttentionMetadata:
    """Return the metadata of blocks after the cached text, whose rows all see each other."""
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
    """Return the tail mask of rows that see the same of their blocks. seen: bool[R, R]"""
    return pack_bits(jnp.tile(seen, (rows.root_ids.shape[0], 1)))
