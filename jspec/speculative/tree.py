"""Draft tree construction (EAGLE-2, Li et al., 2024, arXiv:2406.16858) and tree masks.

Each level expands its K best nodes into K candidates each. The pool of all candidates, in level
order, has K + (S - 1) * K * K entries; the best N - 1 by path score become the tree, in pool order.
A path score is a sum of terms <= 0 and ties prefer the lower index, so the parent of a selected
node is always selected too and comes before it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.device.batch import DraftTree
from jspec.device.pytree import pytree

# Replaces NaN and lower scores: below all others, and finite when summed along a path.
LOWEST = -1e30
# Added to the score of a candidate that repeats another child of its parent.
COPY = -1e6


@pytree
class Level:
    """The candidates of one level: C = K at level 1, K * K after."""

    ids: jax.Array  # i32[B, C]
    scores: jax.Array  # f32[B, C], path score: <= the parent's
    parents: jax.Array  # i32[B, C], index of the parent in the pool; -1: the root


def root_only(root_ids: Int[Array, "B"]) -> DraftTree:
    tokens = root_ids[:, None]
    return DraftTree(
        tokens=tokens, parents=jnp.full_like(tokens, -1), depths=jnp.zeros_like(tokens)
    )


def build_tree(
    root_ids: Int[Array, "B"], levels: tuple[Level, ...], *, num_draft_tokens: int
) -> DraftTree:
    """Return the root and the best N - 1 candidates of all levels.

    In:  level 1 [a1 -1, b1 -2], level 2 [a2 -1.5, b2 -9 under a1; c2 -3, d2 -4 under b1], N = 4
    Out: tokens [root a1 b1 a2], parents [-1 0 0 1], depths [0 1 1 2]
    """
    ids, scores, parents = (
        jnp.concatenate([getattr(level, name) for level in levels], axis=1)
        for name in ("ids", "scores", "parents")
    )
    depth_of = jnp.concatenate(
        [jnp.full((level.ids.shape[1],), d + 1, jnp.int32) for d, level in enumerate(levels)]
    )
    if ids.shape[1] == num_draft_tokens - 1:
        chosen = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    else:
        _, chosen = jax.lax.top_k(scores, num_draft_tokens - 1)
        chosen = jnp.sort(chosen, axis=1)
    parent = jnp.take_along_axis(parents, chosen, axis=1, mode="clip")
    # A parent's node index is its rank among the chosen (they ascend) plus 1, for the root.
    node = jnp.sum(chosen[:, None, :] <= parent[:, :, None], axis=2, dtype=jnp.int32)
    tokens = jnp.take_along_axis(ids, chosen, axis=1, mode="clip")
    root = jnp.zeros((ids.shape[0], 1), jnp.int32)
    return DraftTree(
        tokens=jnp.concatenate((root_ids[:, None], tokens), axis=1),
        parents=jnp.concatenate((root - 1, jnp.where(parent < 0, 0, node)), axis=1),
        depths=jnp.concatenate((root, depth_of[chosen]), axis=1),
    )


def merge_paths(
    levels: tuple[Level, ...], tokens: Int[Array, "B K D"], scores: Float[Array, "B K D"]
) -> tuple[Level, ...]:
    """Add K paths from the root to the candidates of all levels, and merge equal ones.

    A path's token that its parent already has as a child is a copy: the first of the two gets the
    larger score, and the path continues from it. Copies score below all other candidates. A path's
    candidates come after those of the level itself.

    tokens, scores: by depth; scores do not rise along a path.

    In:  level 1 [a -1, b -2], level 2 [c -3 under a], paths [a d -0.5 -0.7], [b c -4 -5]
    Out: [a -0.5, b -2, copies], [c -3 under a, d -0.7 under a, c -5 under b]
    """
    batch, num_paths, depth = tokens.shape
    none = jnp.zeros((batch, 0), jnp.int32)
    empty = Level(ids=none, scores=scores[:, 0, :0], parents=none)
    merged: list[Level] = []
    above = jnp.full((batch, num_paths), -1, jnp.int32)  # pool index of each path's last token
    first = 0  # pool index of the level's first candidate
    for d in range(max(depth, len(levels))):
        level = levels[d] if d < len(levels) else empty
        moved = num_paths * min(max(d - 1, 0), depth)  # path tokens before the parents' level
        parents = jnp.where(level.parents < 0, -1, level.parents + moved)
        level = dataclasses.replace(level, parents=parents)
        if d < depth:
            level, place = _with_tokens(level, tokens[:, :, d], scores[:, :, d], parents=above)
            above = first + place
        merged.append(level)
        first += level.ids.shape[1]
    return tuple(merged)


def _with_tokens(
    level: Level,
    tokens: Int[Array, "B K"],
    scores: Float[Array, "B K"],
    *,
    parents: Int[Array, "B K"],
) -> tuple[Level, Int[Array, "B K"]]:
    """Return the level with K more candidates, and the place of each; a copy has its original's."""
    own, num = level.ids.shape[1], tokens.shape[1]
    ids, under = (
        jnp.concatenate(pair, axis=1) for pair in ((level.ids, tokens), (level.parents, parents))
    )
    alike = (ids[:, None] == tokens[:, :, None]) & (under[:, None] == parents[:, :, None])
    place = jnp.argmax(alike, axis=2).astype(jnp.int32)  # [B, K]
    is_copy = place != own + jnp.arange(num, dtype=jnp.int32)
    is_here = place[:, :, None] == jnp.arange(own + num, dtype=jnp.int32)
    most = jnp.max(jnp.where(is_here, scores[:, :, None], -jnp.inf), axis=1)  # [B, C + K]
    before = jnp.concatenate((level.scores, jnp.where(is_copy, scores + COPY, -jnp.inf)), axis=1)
    return Level(ids=ids, scores=jnp.maximum(before, most), parents=under), place


def ancestors(tree: DraftTree, *, num_levels: int) -> Bool[Array, "B N N"]:
    """Return a mask: [b, i, j] is True if node j is node i or one of its ancestors.

    In:  parents [-1 0 0 1]
    Out: [[1 0 0 0], [1 1 0 0], [1 0 1 0], [1 1 0 1]]
    """
    nodes = tree.parents.shape[1]
    own = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (tree.parents.shape[0], nodes, nodes))
    parent = jnp.maximum(tree.parents, 0)[:, :, None]
    is_root = (tree.parents < 0)[:, :, None]
    found = own
    for _ in range(num_levels):
        above = jnp.take_along_axis(found, parent, axis=1, mode="clip")
        found = own | (above & ~is_root)
    return found


def pack_bits(mask: Bool[Array, "*b W"]) -> UInt32[Array, "*b words"]:
    """Pack a mask: bit w % 32 of word w // 32 is mask[..., w]; bits past W are 0."""
    width = mask.shape[-1]
    words = -(-width // 32)
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, words * 32 - width)])
    bits = padded.reshape(*mask.shape[:-1], words, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def beam_scores(
    beam_scores: Float[Array, "B K"], term: Float[Array, "B K C"]
) -> Float[Array, "B K C"]:
    """Return the children's path scores: at most the parent's, and finite if that is finite."""
    return beam_scores[:, :, None] + jnp.where(term > LOWEST, jnp.minimum(term, 0.0), LOWEST)
