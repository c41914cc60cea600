"""Controlled acceptance without a table, for a target whose next token is always the last plus 1.

With such a target the true continuation follows from a request's seed alone, so acceptance can be
set per request while an engine of any size serves: the seed's lower half is the token at position
0, its upper half the acceptance. The head runs in full, logits and ranking included, so that a step
costs what it costs with a real head.

    seed_of(first=7, acceptance=0.5): the token at position p is (7 + p) % V, and after correct
    tokens the first candidate is correct with probability 0.5 at each depth, for any shape

The head's confidence c varies by position and shows in its scores: its first candidate is correct
with probability c, the second with c r, then c r^2, where r = OTHERS (1 - c). So a tree accepts
more than a chain and scores carry information, though correctness is drawn independently. After a
wrong token all candidates are wrong, at the same confidence. One of four candidates is correct in
0.68, 0.83 and 0.93 of all cases where the first is in 0.52, 0.69 and 0.85; for the bundled pair in
0.69, 0.89 and 0.89 (acceptance.json, depth 1 of 3/1/4 and of 4/4/16).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jspec.device.noise import mix32
from jspec.device.state import SamplingBatch
from jspec.models.decoder import KVPool
from jspec.models.layer import Params
from jspec.speculative.beams import BeamRows
from jspec.speculative.drafter import StepBatch
from jspec.speculative.drafters.ranked import EagleDrafter
from jspec.speculative.drafters.registry import DRAFTERS
from jspec.speculative.drafters.source import DraftRequest, DraftSource, ReadSource

LEVELS = 65536  # of acceptance
# Makes the embedding dominate the sum of 32 random layers: the last token decides.
EMBEDDING_SCALE = 1000.0
OTHERS = 0.6
# Spread of confidence around the acceptance, relative to its distance from 0 or 1.
SPREAD = 0.9
LEAST_SHARE = 1e-6  # least probability of a candidate, so that scores are finite
# Separate the random draws at one position.
CONFIDENCE, RANK, WRONG = 0x51ED27, 0x2545F5, 0x9E3779


def seed_of(*, first: int, acceptance: float) -> int:
    """Seed of a request whose tokens are (first + position) % V; acceptance in [0, 1]."""
    return round(acceptance * (LEVELS - 1)) << 32 | first


def counting_weights(params: Params) -> Params:
    """Change the target's random params so that token v + 1 follows v, whatever the prefix.

    The target must have an untied output head: its columns become the embedding's rows, shifted by
    one.
    """
    table, head = params["embed"]["table"], params["lm_head"]["kernel"]
    turned = jnp.roll(table, 1, axis=0).T.astype(head.dtype)
    scaled = (table * EMBEDDING_SCALE).astype(table.dtype)
    return {
        **params,
        "embed": {**params["embed"], "table": jax.device_put(scaled, table.format)},
        "lm_head": {**params["lm_head"], "kernel": jax.device_put(turned, head.format)},
    }


def true_tokens(seed: jax.Array, positions: jax.Array, *, vocab_size: int) -> jax.Array:
    """Return i32[B, R], the tokens at these positions of requests with seeds u32[B, 2]."""
    return (seed[:, 1:].astype(jnp.int32) + positions) % vocab_size


def dialled(
    seed: jax.Array,
    positions: jax.Array,
    *,
    topk: int,
    vocab_size: int,
    after: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the guesses at positions [B, R] and their log-probabilities: [B, R, K], best first.

    after: the tokens before, all wrong; None: they are correct. The first of K guesses do not
    depend on K.
    """
    high, low = seed[:, :1], seed[:, 1:]
    key = mix32(low * jnp.uint32(2654435761) ^ mix32(positions.astype(jnp.uint32)))
    if after is not None:
        key = mix32(key ^ mix32(after.astype(jnp.uint32) + jnp.uint32(WRONG)))
    acceptance = high.astype(jnp.float32) / (LEVELS - 1)
    reach = SPREAD * jnp.minimum(acceptance, 1 - acceptance)
    sure = (acceptance + reach * (2 * _uniform(key, CONFIDENCE) - 1))[..., None]
    place = jnp.arange(topk, dtype=jnp.int32)
    shares = sure * (OTHERS * (1 - sure)) ** place
    is_missed = _uniform(key, RANK)[..., None] >= jnp.cumsum(shares, axis=-1)
    rank = jnp.sum(is_missed, axis=-1, dtype=jnp.int32) if after is None else topk
    true_ids = true_tokens(seed, positions, vocab_size=vocab_size)
    shift = 1 + (mix32(key ^ jnp.uint32(WRONG)) % (vocab_size - topk - 1)).astype(jnp.int32)
    wrong = ((true_ids + shift)[..., None] + place) % vocab_size
    is_right = place == jnp.asarray(rank)[..., None]
    ids = jnp.where(is_right, true_ids[..., None], wrong)
    return ids.astype(jnp.int32), jnp.log(jnp.maximum(shares, LEAST_SHARE))


def _uniform(key: jax.Array, draw: int) -> jax.Array:
    return (mix32(key ^ jnp.uint32(draw)) >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24


@dataclass(frozen=True, slots=True)
class CountingDial(EagleDrafter):
    """EAGLE's drafter with ids and scores from `dialled` instead of the head's."""

    def candidates(
        self,
        params: Params,
        hidden: jax.Array,
        *,
        positions: jax.Array,
        sampling: SamplingBatch,
        level: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Like EagleDrafter.candidates, at its full cost, given a correct prefix."""
        found, scores = EagleDrafter.candidates(
            self, params, hidden, positions=positions, sampling=sampling, level=level
        )
        ids, terms = self._dialled(positions, sampling)
        # Ids are never negative, but the compiler does not know and keeps the head's computation.
        is_none = found < 0
        return jnp.where(is_none, found, ids), jnp.where(is_none, scores, terms)

    def expand(
        self,
        caches: KVPool,
        ids: jax.Array,
        carried: jax.Array,
        beams: BeamRows,
        *,
        params: Params,
        own: jax.Array,
        rows: StepBatch,
    ) -> tuple[KVPool, jax.Array, jax.Array, jax.Array]:
        """Like EagleDrafter.expand; a beam is correct if its token is."""
        caches, hidden, found, terms = EagleDrafter.expand(
            self, caches, ids, carried, beams, params=params, own=own, rows=rows
        )
        sampling = rows.sampling
        others, other_terms = self._dialled(beams.positions, sampling, after=ids)
        size = self.model.spec.layer.vocab_size
        before = true_tokens(sampling.seed, beams.positions - 1, vocab_size=size)
        is_right = (ids == before)[..., None]
        return (
            caches,
            hidden,
            jnp.where(is_right, found, others),
            jnp.where(is_right, terms, other_terms),
        )

    def _dialled(
        self, positions: jax.Array, sampling: SamplingBatch, *, after: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        return dialled(
            sampling.seed,
            positions,
            topk=self.draft_shape.topk,
            vocab_size=self.model.spec.layer.vocab_size,
            after=after,
        )


def counting_source(request: DraftRequest) -> DraftSource:
    """Return EAGLE-3's registry entry with this drafter.

    Its head must draft from the target's vocabulary or a prefix of it: ids are not mapped.
    """
    source = DRAFTERS["EAGLE3"](request)

    def make(ops: Any, shard: Any) -> CountingDial:
        drafter = source.make(ops, shard)
        assert isinstance(drafter, EagleDrafter)
        return CountingDial(drafter.model, drafter.draft_shape, draft_noise=drafter.draft_noise)

    return replace(source, make=make)


COUNTING: Mapping[str, ReadSource] = {**DRAFTERS, "EAGLE3": counting_source}
