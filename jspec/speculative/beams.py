"""Candidates of a draft tree, level by level, for every drafter that runs a model.

Level 1's candidates come from the last advance. Levels 2..S take one draft forward each, over the K
beams of the level before. A beam attends to the slots before the tree and to its own ancestors
among the scratch slots.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.config.limits import SpeculativeConfig
from jspec.device.pytree import pytree, static
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.spec import indexing
from jspec.speculative.drafter import StepBatch
from jspec.speculative.target import KVPool
from jspec.speculative.tree import Level, beam_scores, pack_bits


class BeamLayout(enum.Enum):
    """The content of a slot of the draft cache (example: spec/indexing.py)."""

    PAIRS = "(token i + 1, feature i): the root is part of the last committed pair"
    TOKENS = "a token: the root has a row of its own, in front of the first node's"

    @property
    def slots_before(self) -> int:
        return 1 if self is BeamLayout.TOKENS else 0

    def position(self, seq_len: indexing.Index, depth: indexing.Index) -> indexing.Index:
        if self is BeamLayout.TOKENS:
            return indexing.target_position(seq_len, depth)
        return indexing.draft_position(seq_len, depth)


@pytree
class LevelOne:
    """The result of the last advance: K candidates per row and the inputs of their forward."""

    ids: jax.Array  # i32[B, K], target ids
    scores: jax.Array  # f32[B, K], path scores, <= 0
    carried: Any  # pytree of [B, K, .] arrays that beams inherit from parents; () if none

    def best(self, topk: int) -> LevelOne:
        if topk == self.ids.shape[1]:
            return self
        best: LevelOne = jax.tree.map(lambda x: x[:, :topk], self)
        return best


@pytree
class BeamRows:
    """The K queries per row of one draft forward, and the token positions of their children."""

    rows: AttentionMetadata
    positions: jax.Array  # i32[B, K]
    ancestors: jax.Array  # bool[B, K, scratch slots of nodes so far], including each beam's own
    depth: int = static()  # of the beams; 1 is the first level


class ForwardBeams(Protocol):
    def __call__(
        self, caches: KVPool, ids: jax.Array, carried: Any, beams: BeamRows
    ) -> tuple[KVPool, Any, jax.Array, jax.Array]:
        """Return (caches, arrays the children carry, ids [B, K, K], terms [B, K, K])."""
        ...


@pytree
class _Beams:
    ids: jax.Array  # i32[B, K]
    scores: jax.Array  # f32[B, K]
    carried: Any  # [B, K, .], from the parents
    ancestors: jax.Array  # bool[B, K, scratch slots of nodes so far], each beam's own included
    pool_idx: jax.Array  # i32[B, K], index in the candidate pool


_Expanded = tuple[Any, jax.Array, jax.Array]


def first_level(
    ids: Int[Array, "B 1 K"], terms: Float[Array, "B 1 K"], *, carried: Any
) -> LevelOne:
    """Return the candidates after each row's last token, whose path score is their only term."""
    root_scores = jnp.zeros((ids.shape[0], 1), jnp.float32)
    return LevelOne(ids=ids[:, 0], scores=beam_scores(root_scores, terms)[:, 0], carried=carried)


def grow_beams(
    first: LevelOne,
    caches: KVPool,
    rows: StepBatch,
    forward: ForwardBeams,
    *,
    draft_shape: SpeculativeConfig,
    layout: BeamLayout,
) -> tuple[KVPool, tuple[Level, ...]]:
    """Run S - 1 draft forwards. Return the caches with scratch slots written, and S levels."""
    first = first.best(draft_shape.topk)

    def expand(depth: int, beams: _Beams) -> _Expanded:
        nonlocal caches
        places = _rows_of_beams(rows, beams.ancestors, depth=depth, layout=layout)
        caches, carried, ids, terms = forward(caches, beams.ids, beams.carried, places)
        return carried, ids, terms

    levels = _grow(first, expand, draft_shape=draft_shape)
    return caches, levels


class RankLevel(Protocol):
    """Ranks the candidates of one level of a block, given the tokens before them."""

    def __call__(
        self, depth: int, parents: jax.Array, carried: Any
    ) -> tuple[Any, jax.Array, jax.Array]:
        """Return (arrays the children carry, ids [B, P, K], terms [B, P, K]).

        depth: of the parents; 0 is the root, with P = 1. parents: their tokens, i32[B, P]
        """
        ...


def grow_block(
    root_ids: Int[Array, "B"],
    rank: RankLevel,
    *,
    draft_shape: SpeculativeConfig,
    carried: Any = (),
) -> tuple[Level, ...]:
    """Return the levels of a block whose forward is done: S times, rank a level and keep the K
    best. carried: arrays [B, 1, .] that the root carries.

    In:  ids [[a1 b1], [a2 b2]] under every parent, terms [[-1 -2], [-0.5 -3]], S/K = 2/2
    Out: [a1 -1, b1 -2], [a2 -1.5, b2 -4 under a1; a2 -2.5, b2 -5 under b1]
    """
    carried, ids, terms = rank(0, root_ids[:, None], carried)

    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (x.shape[0], draft_shape.topk, *x.shape[2:]))

    first = first_level(ids, terms, carried=jax.tree.map(spread, carried))

    def expand(depth: int, beams: _Beams) -> _Expanded:
        return rank(depth, beams.ids, beams.carried)

    return _grow(first, expand, draft_shape=draft_shape)


def _grow(
    first: LevelOne,
    expand: Callable[[int, _Beams], _Expanded],
    *,
    draft_shape: SpeculativeConfig,
) -> tuple[Level, ...]:
    """Expand the K best candidates of each level, S - 1 times, by `expand(depth, beams)`."""
    batch, topk = first.ids.shape
    levels = [Level(ids=first.ids, scores=first.scores, parents=jnp.full_like(first.ids, -1))]
    first_of_level = 0
    beams = _Beams(
        ids=first.ids,
        scores=first.scores,
        carried=first.carried,
        ancestors=_with_itself(jnp.zeros((batch, topk, 0), bool)),
        pool_idx=jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int32), first.ids.shape),
    )
    for depth in range(1, draft_shape.num_steps):
        carried, ids, terms = expand(depth, beams)
        first_of_level += levels[-1].ids.shape[1]
        level = Level(
            ids=ids.reshape(batch, -1),
            scores=beam_scores(beams.scores, terms).reshape(batch, -1),
            parents=jnp.repeat(beams.pool_idx, topk, axis=1),
        )
        levels.append(level)
        if depth < draft_shape.num_steps - 1:
            beams = _best_beams(level, beams.ancestors, carried, topk=topk, first=first_of_level)
    return tuple(levels)


def _with_itself(ancestors: jax.Array) -> jax.Array:
    batch, topk, _ = ancestors.shape
    own = jnp.broadcast_to(jnp.eye(topk, dtype=bool), (batch, topk, topk))
    return jnp.concatenate((ancestors, own), axis=2)


def _rows_of_beams(
    rows: StepBatch, ancestors: jax.Array, *, depth: int, layout: BeamLayout
) -> BeamRows:
    """Return the K queries of the beams at `depth` and the positions of their children.

    In:  L = 7, K = 2, depth 2, BeamLayout.TOKENS (root t7 at slot 7, a1 b1 at 8 9)
    Out: slots 10 11 at RoPE 9, a tail of 4 slots at RoPE 8 8 9 9, children at position 10
    """
    batch, topk, width = ancestors.shape
    position = layout.position(rows.seq_lens, depth)
    tail_depth = 1 + jnp.arange(width, dtype=jnp.int32) // topk
    is_chain = topk == 1
    row = indexing.beam_slot(depth, topk=topk, slots_before=layout.slots_before)
    attention_rows = AttentionMetadata(
        page_table=rows.page_table,
        window_tables=rows.window_tables,
        prefix_lens=indexing.scratch_slot(rows.seq_lens, row),
        cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * topk,
        q_positions=jnp.repeat(position, topk),
        tail_mask=None if is_chain else pack_bits(ancestors).reshape(batch * topk, -1),
        tail_positions=(
            None if is_chain else layout.position(rows.seq_lens[:, None], tail_depth[None])
        ),
        shared=rows.shared,
    )
    children = indexing.chosen_position(rows.seq_lens, depth)[:, None]
    return BeamRows(
        rows=attention_rows,
        positions=jnp.broadcast_to(children, (batch, topk)),
        ancestors=ancestors,
        depth=depth,
    )


def _best_beams(
    level: Level, ancestors: jax.Array, carried: Any, *, topk: int, first: int
) -> _Beams:
    if topk == 1:  # a chain: the only candidate, under the only beam
        return _Beams(
            ids=level.ids,
            scores=level.scores,
            carried=carried,
            ancestors=_with_itself(ancestors),
            pool_idx=jnp.full_like(level.ids, first),
        )
    scores, idx = jax.lax.top_k(level.scores, topk)
    parent = (idx // topk)[:, :, None]

    def of_parent(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, parent, axis=1, mode="clip")

    return _Beams(
        ids=jnp.take_along_axis(level.ids, idx, axis=1, mode="clip"),
        scores=scores,
        carried=jax.tree.map(of_parent, carried),
        ancestors=_with_itself(of_parent(ancestors)),
        pool_idx=first + idx,
    )
