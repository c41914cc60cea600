"""A drafter with scripted guesses: any drafter's caches and state, with a test's own trees.

The inner drafter proposes and advances as usual; for rows whose seed is in the script, the tree is
replaced. Such a row gets the true token with its acceptance probability, at random ranks (1:
always, at the first), or garbage: invalid ids among valid ones, scores that are not numbers.

    params = {"own": the inner drafter's, "script": script_params(...)}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.device.noise import mix32
from jspec.device.state import SamplingBatch
from jspec.models.params import ParamTable, prefixed
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.speculative.beams import BeamLayout, BeamRows, first_level, grow_beams
from jspec.speculative.drafter import Drafter, Emitted, Needs, StepBatch
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import build_tree
from tests.support.dial_drafter import dial_rank


@dataclass(frozen=True, slots=True)
class ScriptedDrafter:
    """inner: any drafter; vocab_size: of the target."""

    inner: Drafter
    draft_shape: SpeculativeConfig
    vocab_size: int

    @property
    def algorithm(self) -> Algorithm:
        return self.inner.algorithm

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.inner.cache_groups

    @property
    def table(self) -> ParamTable:
        return prefixed(self.inner.table, path=("own",), stored="")

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> Any:
        return self.inner.init_state(num_slots, context_length=context_length, dtype=dtype)

    def of_shape(self, draft_shape: SpeculativeConfig) -> ScriptedDrafter:
        return replace(self, inner=self.inner.of_shape(draft_shape), draft_shape=draft_shape)

    def propose(
        self, params: Params, caches: KVPool, state: Any, rows: StepBatch
    ) -> tuple[KVPool, DraftTree]:
        """Propose with the inner drafter; replace the tree of rows in the script."""
        caches, own = self.inner.propose(params["own"], caches, state, rows)
        script = params["script"]
        known = jnp.any(_is_row(script, rows.sampling), axis=1)[:, None]
        scripted = self._scripted(script, rows)
        return caches, jax.tree.map(partial(jnp.where, known), scripted, own)

    def advance(
        self, params: Params, caches: KVPool, state: Any, emitted: Emitted
    ) -> tuple[KVPool, Any]:
        return self.inner.advance(params["own"], caches, state, emitted)

    def _scripted(self, script: Params, rows: StepBatch) -> DraftTree:
        """Return the tree that EAGLE-2 builds from the script's guesses."""
        guess = partial(
            guesses, script, rows.sampling, topk=self.draft_shape.topk, vocab_size=self.vocab_size
        )

        def forward(
            caches: KVPool, ids: jax.Array, carried: tuple[()], beams: BeamRows
        ) -> tuple[KVPool, tuple[()], jax.Array, jax.Array]:
            del ids
            return caches, carried, *guess(beams.positions)

        level1 = indexing.chosen_position(rows.seq_lens, 0)[:, None]
        first = first_level(*guess(level1), carried=())
        _, levels = grow_beams(
            first, (), rows, forward, draft_shape=self.draft_shape, layout=BeamLayout.PAIRS
        )
        nodes = self.draft_shape.num_draft_tokens
        return build_tree(rows.root_ids, levels, num_draft_tokens=nodes)


def guesses(
    script: Params, sampling: SamplingBatch, positions: jax.Array, *, topk: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Return (ids i32[B, R, K], scores f32[B, R, K]) at the token positions i32[B, R]."""
    row = jnp.argmax(_is_row(script, sampling), axis=1)
    seed = sampling.seed[:, None, 1]
    width = script["truth"].shape[1]
    true_ids = script["truth"][row[:, None], jnp.clip(positions, 0, width - 1)]
    acceptance = script["acceptance"][row][:, None]
    rank = dial_rank(seed, positions, topk=topk, acceptance=acceptance)
    rank = jnp.where(acceptance >= 1, 0, rank)[..., None]
    place = jnp.arange(topk, dtype=jnp.int32)
    wrong = (true_ids[..., None] + 1 + place) % vocab_size
    ids = jnp.where(place == rank, true_ids[..., None], wrong)
    scores = jnp.broadcast_to(jnp.log(jnp.float32(0.7)) * place, ids.shape)
    bad_ids, bad_scores = _garbage(seed, positions, topk=topk, vocab_size=vocab_size)
    is_garbage = script["is_garbage"][row][:, None, None]
    return (
        jnp.where(is_garbage, bad_ids, ids).astype(jnp.int32),
        jnp.where(is_garbage, bad_scores, scores),
    )


def _garbage(
    seed: jax.Array, positions: jax.Array, *, topk: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Ids of tokens, invalid ids (just outside, and arbitrary), and scores of every kind."""
    place = jnp.arange(topk, dtype=jnp.uint32)
    bits = mix32(mix32(seed.astype(jnp.uint32) ^ positions.astype(jnp.uint32))[..., None] + place)
    some_ids = (bits >> 8) % jnp.uint32(vocab_size)
    outside = jnp.where(bits & 16, -1, vocab_size).astype(jnp.int32)
    anything = jax.lax.bitcast_convert_type(bits, jnp.int32)
    kind = bits & 3
    ids = jnp.where(kind == 0, outside, anything)
    ids = jnp.where(kind >= 2, some_ids.astype(jnp.int32), ids)
    scores = jnp.asarray([-0.5, jnp.nan, jnp.inf, -jnp.inf], jnp.float32)[(bits >> 5) & 3]
    return ids, scores


def _is_row(script: Params, sampling: SamplingBatch) -> jax.Array:
    return jnp.all(script["seeds"][None] == sampling.seed[:, None], axis=2)


@dataclass(frozen=True, slots=True)
class Told:
    """A row's tokens, prompt included; acceptance: probability that the true one is guessed."""

    ids: tuple[int, ...]
    acceptance: float


def script_params(
    told: Mapping[int, Told], *, rows: int, width: int, garbage: Collection[int] = ()
) -> Params:
    """Return the script. told: by the seeds of requests; garbage: seeds that get garbage.

    Rows with other seeds keep their drafter's tree. Raises ValueError for more requests than `rows`
    or tokens than `width`.
    """
    longest = max((len(each.ids) for each in told.values()), default=0)
    if len(told) + len(garbage) > rows or longest > width:
        raise ValueError(
            f"{len(told) + len(garbage)} requests of at most {longest} tokens; expected {rows} "
            f"of {width}"
        )
    seeds = np.full((rows, 2), 0xFFFFFFFF, np.uint32)
    truth = np.zeros((rows, width), np.int32)
    acceptance = np.zeros(rows, np.float32)
    for r, seed in enumerate((*told, *garbage)):
        seeds[r] = (seed >> 32, seed & 0xFFFFFFFF)
    for r, each in enumerate(told.values()):
        truth[r, : len(each.ids)] = each.ids
        acceptance[r] = each.acceptance
    return {
        "seeds": jnp.asarray(seeds),
        "truth": jnp.asarray(truth),
        "acceptance": jnp.asarray(acceptance),
        "is_garbage": jnp.asarray(np.arange(rows) >= len(told)),
    }
