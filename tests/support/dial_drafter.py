"""Controlled acceptance: EAGLE's whole drafting path, with guesses of adjustable quality.

The drafter knows the true continuation of every request (from a plain run). At each position it
puts the true token at a random rank among the K candidates with probability `acceptance`, and
leaves it out otherwise. A random draft accepts nothing and so tests nothing; this one accepts every
count from 0 to S, through first and later children. The head still runs and writes its KV.

    params = {"head": the head's params,
              "dial": {"seeds": u32[R, 2], "truth": i32[R, C], "decoy": i32[]}}

Requests are identified by their seed; truth[r, p] is the token at position p of request r. A decoy
(an id, or -1 for none) is guessed at every position, at the best rank that the truth leaves free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.device.noise import mix32
from jspec.device.state import SamplingBatch
from jspec.models.decoder import KVPool
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.layer import Params
from jspec.models.params import ParamTable, prefixed
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ranked import EagleDrafter


@dataclass(frozen=True, slots=True)
class DialHead(FeatureHead):
    """A head whose params are one level deeper, in the same tree as the dial's."""

    @property
    def table(self) -> ParamTable:
        return prefixed(head_params(self.spec, self.names), path=("head",), stored="")

    def features(self, params: Params, given: jax.Array) -> jax.Array:
        return FeatureHead.features(self, params["head"], given)

    def forward(self, params: Params, *args: Any, **named: Any) -> tuple[jax.Array, KVPool]:
        return FeatureHead.forward(self, params["head"], *args, **named)

    def logits(self, params: Params, out: jax.Array, *, level: int = 0) -> jax.Array:
        return FeatureHead.logits(self, params["head"], out, level=level)

    def token_ids(self, params: Params) -> jax.Array:
        return FeatureHead.token_ids(self, params["head"])


def dial_head(head: FeatureHead) -> DialHead:
    return DialHead(head.spec, head.ops, head.shard, head.names)


class _Dialled:
    """Candidates that are the truth with probability `acceptance`, else anything."""

    __slots__ = ()

    def candidates(
        self: Any,
        params: Params,
        hidden: jax.Array,
        *,
        positions: jax.Array,
        sampling: SamplingBatch,
        level: int,
    ) -> tuple[jax.Array, jax.Array]:
        del hidden, level
        return dialled(
            params["dial"],
            sampling,
            positions=positions,
            topk=self.draft_shape.topk,
            acceptance=self.acceptance,
            vocab_size=self.model.spec.layer.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class DialDrafter(_Dialled, EagleDrafter):
    """acceptance: probability that the true token is among the K candidates of its position."""

    acceptance: float = 0.8


@dataclass(frozen=True, slots=True)
class DialMultiLayerDrafter(_Dialled, MultiLayerDrafter):
    """Controlled acceptance for multi-layer drafters; the params have an extra entry "dial"."""

    acceptance: float = 0.8


def dialled(
    dial: Params,
    sampling: SamplingBatch,
    *,
    positions: jax.Array,
    topk: int,
    acceptance: float,
    vocab_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Return ids and scores; scores fall off geometrically with rank, like a good draft's."""
    seed = sampling.seed
    row = jnp.argmax(jnp.all(dial["seeds"][None] == seed[:, None], axis=2), axis=1)
    width = dial["truth"].shape[1]
    true_ids = dial["truth"][row[:, None], jnp.clip(positions, 0, width - 1)]
    rank = dial_rank(seed[:, None, 1], positions, topk=topk, acceptance=acceptance)
    place = jnp.arange(topk, dtype=jnp.int32)
    wrong = (true_ids[..., None] + 1 + place) % vocab_size
    is_decoy = (place == jnp.where(rank == 0, 1, 0)[..., None]) & (dial["decoy"] >= 0)
    wrong = jnp.where(is_decoy, dial["decoy"], wrong)
    ids = jnp.where(place == rank[..., None], true_ids[..., None], wrong)
    scores = jnp.log(jnp.float32(0.7)) * (place + 1)
    return ids.astype(jnp.int32), jnp.broadcast_to(scores, ids.shape)


def dial_rank(seed_low: Any, positions: Any, *, topk: int, acceptance: Any) -> Any:
    """Rank of the true token at each position, `topk` if left out. acceptance broadcasts."""
    bits = mix32(
        jnp.asarray(seed_low).astype(jnp.uint32) * jnp.uint32(2654435761)
        ^ mix32(jnp.asarray(positions).astype(jnp.uint32) + jnp.uint32(0x51ED27))
    )
    inside = (bits >> 16).astype(jnp.float32) < acceptance * 65536.0
    is_first = (bits & 1) == 0  # half the time, so that deep paths survive the tree's pruning
    rank = jnp.where(is_first, 0, ((bits & 0xFFFF) >> 1).astype(jnp.int32) % topk)
    return jnp.where(inside, rank, topk)


def dial_params(
    truths: dict[int, tuple[int, ...]], *, rows: int, width: int, decoy: int = -1
) -> Params:
    """Return the tables; `truths` maps a request's seed to all its tokens, prompt included.

    decoy: an id guessed at every position, whatever the truth; -1 for none. Raises ValueError for
    more requests than `rows` or tokens than `width`.
    """
    if len(truths) > rows or any(len(ids) > width for ids in truths.values()):
        longest = max(len(ids) for ids in truths.values())
        raise ValueError(
            f"{len(truths)} requests of at most {longest} tokens; expected {rows} of {width}"
        )
    seeds = np.full((rows, 2), 0xFFFFFFFF, np.uint32)
    truth = np.zeros((rows, width), np.int32)
    for r, (seed, ids) in enumerate(truths.items()):
        seeds[r] = (seed >> 32, seed & 0xFFFFFFFF)
        truth[r, : len(ids)] = ids
    return {
        "seeds": jnp.asarray(seeds),
        "truth": jnp.asarray(truth),
        "decoy": jnp.asarray(decoy, jnp.int32),
    }
