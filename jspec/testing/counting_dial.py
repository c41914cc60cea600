"""A dial that needs no table: for a target whose next token is always the last one plus 1.

With such a target the true continuation follows from a request's seed alone, so acceptance can be
set request by request while an engine of any size serves: the seed's lower half names the token at
position 0, its upper half the dial. The head runs whole, its logits and ranking too, so that a
step costs what it costs with a head of one's own.

    seed_of(first=7, acceptance=0.5): the token at position p is (7 + p) % V, and is guessed with
    probability 0.5 at each depth; otherwise every candidate is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core.config import Algorithm
from jspec.core.state import SamplingRows
from jspec.models.decoder import Params
from jspec.speculative.eagle import EagleDrafter
from jspec.speculative.registry import DRAFTERS
from jspec.speculative.source import DraftRequest, DraftSource, ReadSource
from jspec.testing.dial_drafter import dial_rank

LEVELS = 65536  # of the dial
# A table's row against what 32 layers of random weights add to it: the last token decides.
EMBEDDING_SCALE = 1000.0


def seed_of(*, first: int, acceptance: float) -> int:
    """The seed of a request whose tokens are (first + position) % V; acceptance from 0 to 1."""
    return round(acceptance * (LEVELS - 1)) << 32 | first


def counting_weights(params: Params) -> Params:
    """The target's random params such that token v + 1 follows v, whatever came before.

    The target has an output head of its own (not tied): its columns become the embedding's rows,
    each one later.
    """
    table, head = params["embed"]["table"], params["lm_head"]["kernel"]
    turned = jnp.roll(table, 1, axis=0).T.astype(head.dtype)
    scaled = (table * EMBEDDING_SCALE).astype(table.dtype)
    return {
        **params,
        "embed": {**params["embed"], "table": jax.device_put(scaled, table.format)},
        "lm_head": {**params["lm_head"], "kernel": jax.device_put(turned, head.format)},
    }


@dataclass(frozen=True, slots=True)
class CountingDial(EagleDrafter):
    """EAGLE's drafter with the dial's ids in place of the head's."""

    def candidates(
        self,
        params: Params,
        hidden: jax.Array,
        *,
        positions: jax.Array,
        sampling: SamplingRows,
    ) -> tuple[jax.Array, jax.Array]:
        """As EagleDrafter.candidates, at its full cost; the scores are the head's."""
        found, scores = EagleDrafter.candidates(
            self, params, hidden, positions=positions, sampling=sampling
        )
        vocab_size = self.head.config.layer.vocab_size
        high, low = sampling.seed[:, :1], sampling.seed[:, 1:]
        true_ids = (low.astype(jnp.int32) + positions) % vocab_size
        share = high.astype(jnp.float32) / (LEVELS - 1)
        rank = dial_rank(low, positions, topk=self.spec.topk, acceptance=share)
        place = jnp.arange(self.spec.topk, dtype=jnp.int32)
        wrong = (true_ids[..., None] + 1 + place) % vocab_size
        ids = jnp.where(place == rank[..., None], true_ids[..., None], wrong)
        # Never negative, which the compiler does not know: so it keeps what made them.
        return jnp.where(found < 0, found, ids).astype(jnp.int32), scores


def counting_source(request: DraftRequest) -> DraftSource:
    """EAGLE-3's row of the registry with this dial. Its head must draft from all of the target's
    vocabulary or a part of it: ids are not looked up."""
    source = DRAFTERS[Algorithm.EAGLE3](request)

    def make(ops: Any, shard: Any) -> CountingDial:
        drafter = source.make(ops, shard)
        assert isinstance(drafter, EagleDrafter)
        return CountingDial(drafter.head, drafter.spec, draft_noise=drafter.draft_noise)

    return replace(source, make=make)


COUNTING: Mapping[Algorithm, ReadSource] = {**DRAFTERS, Algorithm.EAGLE3: counting_source}
