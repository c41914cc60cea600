"""A draft model and a lookup in one tree (`--speculative-lookup`).

A token under the same parent is one node, and the best N - 1 by path score are verified. The
lookup's paths may be deeper than S. The draft model caches nothing of the tree: `advance`
recomputes every emitted token from the target's features.

The path score of a lookup. By Laplace's rule, a continuation after m equal tokens is right with
odds of m to 1: p = m / (m + 1). Its next token has m + 1 equal tokens before it, and so on. At
temperature T > 0 the noise g of the token is known. The target chooses the token if its logit plus
T g exceeds the maximum of all others, which is a Gumbel variable, so with probability exp(-exp(-g)
(1 - p) / p) = exp(-exp(-g) / m), whose mean over g is p again. A further branch can be right only
if the earlier ones are wrong: a factor of 1 / (m + 1) for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device import noise
from jspec.device.pytree import pytree
from jspec.models.params import ParamTable
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.speculative.drafter import Emitted, LevelDrafter, Needs, StepBatch
from jspec.speculative.drafters.ngram import UNMATCHED, Branches, NgramDrafter, NgramState
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import Level, merge_paths


@pytree
class CompositeState:
    model: Any
    lookup: NgramState


@dataclass(frozen=True, slots=True)
class CompositeDrafter(LevelDrafter):
    """A draft model with a lookup over the row's own ids. params: the model's."""

    model: LevelDrafter
    lookup: NgramDrafter
    draft_shape: SpeculativeConfig

    @classmethod
    def of(cls, model: LevelDrafter, *, min_match: int, max_match: int) -> CompositeDrafter:
        shape = model.draft_shape
        lookup = NgramDrafter(_lookup_shape(shape), min_match=min_match, max_match=max_match)
        return cls(model, lookup, shape)

    @property
    def algorithm(self) -> Algorithm:
        return self.model.algorithm

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.model.cache_groups

    @property
    def table(self) -> ParamTable:
        return self.model.table

    @property
    def needs(self) -> Needs:
        return self.model.needs

    def init_state(
        self, num_slots: int, *, context_length: int, dtype: DTypeLike
    ) -> CompositeState:
        how: Any = {"context_length": context_length, "dtype": dtype}
        return CompositeState(
            model=self.model.init_state(num_slots, **how),
            lookup=self.lookup.init_state(num_slots, **how),
        )

    def of_shape(self, draft_shape: SpeculativeConfig) -> CompositeDrafter:
        return replace(
            self,
            model=self.model.of_shape(draft_shape),
            lookup=self.lookup.of_shape(_lookup_shape(draft_shape)),
            draft_shape=draft_shape,
        )

    def levels(
        self, params: Params, caches: KVPool, state: CompositeState, rows: StepBatch
    ) -> tuple[KVPool, tuple[Level, ...]]:
        caches, levels = self.model.levels(params, caches, state.model, rows)
        branches = self.lookup.branches({}, state.lookup, rows)
        return caches, merge_paths(levels, branches.tokens, path_scores(branches, rows))

    def advance(
        self, params: Params, caches: KVPool, state: CompositeState, emitted: Emitted
    ) -> tuple[KVPool, CompositeState]:
        _, lookup = self.lookup.advance({}, (), state.lookup, emitted)
        if emitted.ids_only:  # the model's cache has the prefix
            return caches, CompositeState(model=state.model, lookup=lookup)
        caches, model = self.model.advance(params, caches, state.model, emitted)
        return caches, CompositeState(model=model, lookup=lookup)


def _lookup_shape(draft_shape: SpeculativeConfig) -> SpeculativeConfig:
    depth, topk = draft_shape.lookup_steps, draft_shape.topk
    return SpeculativeConfig(
        algorithm=Algorithm.NGRAM, num_steps=depth, topk=topk, num_draft_tokens=1 + topk * depth
    )


def path_scores(branches: Branches, rows: StepBatch) -> Float[Array, "B K D"]:
    """Return the log-probability that a branch is right up to each of its tokens."""
    batch, topk, depth = branches.tokens.shape
    levels = jnp.arange(depth, dtype=jnp.int32)
    matched = jnp.maximum(branches.lengths, 1)[:, :, None] + levels
    positions = indexing.chosen_position(rows.seq_lens[:, None], levels)
    seed = jnp.broadcast_to(rows.sampling.seed[:, None], (batch, depth, 2))
    key = noise.position_key(seed, positions)
    bits = noise.noise_bits((key[0][:, None], key[1][:, None]), branches.tokens)
    terms = jnp.where(
        rows.sampling.temperature[:, None, None] > 0,
        -jnp.exp(-noise.gumbel_from_bits(bits)) / matched,
        -jnp.log1p(1 / matched),
    )
    others = -jnp.log1p(branches.lengths.astype(jnp.float32))
    before = jnp.cumsum(others, axis=1) - others
    scores = before[:, :, None] + jnp.cumsum(terms, axis=2)
    scores = jax.lax.cummin(scores, axis=2)  # a sum's rounding must not raise it along a path
    unmatched = UNMATCHED - jnp.arange(topk)[:, None] - levels
    return jnp.where(branches.is_match[:, :, None], scores, unmatched.astype(jnp.float32))
