"""Which of the proposed nodes a step verifies, where it verifies T in total instead of N a row.

Between propose and score, one choice over all rows: the roots of the rows, then the T - B drafts
with the best path scores. It looks at every draft, and at nothing that the target says; with
accept-if-equal, what is not verified is as if it had not been proposed, so no choice changes a
token (docs/decisions/0029). Scores are the same on every device, hence the choice.

    two rows, T = 5       scores                  kept                  packed
    row 0  t7 a1 b1 a2    0  -0.1 -0.9 -0.2       t7 a1    a2           t7 a1 a2
    row 1  s4 c1 d1 c2    0  -0.4 -1.2 -1.5       s4 c1                 s4 c1
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.device.pytree import pytree
from jspec.pallas_kernels.attention.rows import GatheredQueries, index_queries
from jspec.speculative.drafter import RowsInStep

NEVER, FIRST = -(2**31), 1  # keys below and above those of all drafts


def spend_budget(
    tree: DraftTree, rows: RowsInStep, slots: Int[Array, "B"], *, spec: SpeculativeConfig
) -> DraftTree:
    """The tree cut to T nodes in total, those of each row first (see `DraftTree`); without a
    budget, the tree.

    Padding gets no node, and a row that accepts no drafts its root.
    """
    num_nodes = spec.total_nodes(slots.shape[0])
    if num_nodes is None:
        return tree
    kept = best_nodes(
        closed_scores(tree, num_levels=spec.num_steps),
        is_live=slots > 0,
        may_draft=rows.sampling.speculative > 0,
        num_nodes=num_nodes,
    )
    return keep_nodes(tree, kept)


def closed_scores(tree: DraftTree, *, num_levels: int) -> Float[Array, "B N"]:
    """Path scores of which none is above its parent's; what is no number counts as the lowest.

    A drafter that knows no scores is served level by level.
    """
    if tree.scores is None:
        return -tree.depths.astype(jnp.float32)
    scores = jnp.where(tree.scores > -jnp.inf, jnp.minimum(tree.scores, 0.0), -jnp.inf)
    parent = jnp.maximum(tree.parents, 0)
    for _ in range(num_levels):
        above = jnp.take_along_axis(scores, parent, axis=1, mode="clip")
        scores = jnp.where(tree.parents < 0, 0.0, jnp.minimum(scores, above))
    return scores


def best_nodes(
    scores: Float[Array, "B N"],
    *,
    is_live: Bool[Array, "B"],
    may_draft: Bool[Array, "B"],
    num_nodes: int,
) -> Bool[Array, "B N"]:
    """The roots of live rows and the best drafts, `num_nodes` at most, if scores <= the parent's.

    Equal scores: the lower node, then the lower row. A parent is the lower node, so it is kept
    wherever its child is.

    In:  scores [[0 -1 -1 -2], [0 -1 -3 -3]], both live and drafting, 5 nodes
    Out: [[1 1 1 0], [1 1 0 0]]
    """
    batch, nodes = scores.shape
    # As integers, so that no comparison depends on how a device compares floats: of numbers <= 0
    # the bits without the sign grow as the number falls.
    magnitude = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    is_root = jnp.arange(nodes) == 0
    keys = jnp.where(may_draft[:, None], -magnitude, NEVER)
    keys = jnp.where(is_live[:, None], jnp.where(is_root, FIRST, keys), NEVER)
    by_node = keys.T.reshape(-1)
    least = jnp.sort(by_node)[batch * nodes - num_nodes]
    is_above, is_least = by_node > least, (by_node == least) & (by_node > NEVER)
    left = num_nodes - jnp.sum(is_above, dtype=jnp.int32)
    kept = is_above | (is_least & (jnp.cumsum(is_least, dtype=jnp.int32) <= left))
    return kept.reshape(nodes, batch).T


def keep_nodes(tree: DraftTree, kept: Bool[Array, "B N"]) -> DraftTree:
    """The kept nodes of each row, first and in their order; the others are none.

    In:  parents [-1 0 0 1], kept [1 1 0 1]
    Out: parents [-1 0 1 -1], of nodes 0, 1 and 3
    """
    order = jnp.argsort(~kept, axis=1, stable=True).astype(jnp.int32)
    place = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1  # of each node that is kept
    is_node = jnp.take_along_axis(kept, order, axis=1, mode="clip")

    def reordered(x: jax.Array, none: int) -> jax.Array:
        return jnp.where(is_node, jnp.take_along_axis(x, order, axis=1, mode="clip"), none)

    parents = reordered(tree.parents, -1)
    moved = jnp.take_along_axis(place, jnp.maximum(parents, 0), axis=1, mode="clip")
    return DraftTree(
        tokens=reordered(tree.tokens, 0),
        parents=jnp.where(parents < 0, -1, moved),
        depths=reordered(tree.depths, 0),
    )


@pytree
class PackedNodes:
    """Where T nodes lie, row after row; places after the last node are padding.

    In:  a tree of 3 and one of 2 nodes, N = 4, T = 6
    Out: cu_nodes [0 3 5], row_idx [0 0 0 1 1 1], node [0 1 2 0 1 2]
    """

    cu_nodes: jax.Array  # i32[B + 1]
    row_idx: jax.Array  # i32[T], in [0, B)
    node: jax.Array  # i32[T], in [0, N)

    @property
    def num_drafts(self) -> Int[Array, "B"]:
        """Nodes of each row beside its root."""
        return jnp.maximum(self.cu_nodes[1:] - self.cu_nodes[:-1] - 1, 0)

    def of_rows(self, x: jax.Array) -> jax.Array:
        """[T, ...] of [B, ...]: what each place's row has."""
        return jnp.take(x, self.row_idx, axis=0, mode="clip")

    def of_nodes(self, x: jax.Array) -> jax.Array:
        """[T, ...] of [B, N, ...]: what each place's node has."""
        nodes = x.shape[1]
        return jnp.take(
            x.reshape(-1, *x.shape[2:]), self.row_idx * nodes + self.node, axis=0, mode="clip"
        )

    def at(self, x: jax.Array, nodes: Int[Array, "B n"]) -> jax.Array:
        """[B, n, ...] of [T, ...]: what these nodes of each row have; of none, anything."""
        return jnp.take(x, self.cu_nodes[:-1, None] + nodes, axis=0, mode="clip")

    def queries(self, nodes: int) -> GatheredQueries:
        """How attention lays them out: N to a row."""
        grid = jnp.arange(nodes, dtype=jnp.int32)
        return GatheredQueries(
            source=(self.cu_nodes[:-1, None] + grid).reshape(-1),
            place=self.row_idx * nodes + self.node,
        )


def pack_nodes(
    tree: DraftTree, slots: Int[Array, "B"], *, spec: SpeculativeConfig
) -> PackedNodes | None:
    """The places of the nodes of a tree that `spend_budget` has cut; None without a budget."""
    num_nodes, nodes = spec.total_nodes(slots.shape[0]), tree.parents.shape[1]
    if num_nodes is None:
        return None
    lens = jnp.where(slots > 0, 1 + jnp.sum(tree.parents[:, 1:] >= 0, axis=1, dtype=jnp.int32), 0)
    ends = jnp.cumsum(lens, dtype=jnp.int32)
    cu_nodes = jnp.concatenate((jnp.zeros((1,), jnp.int32), ends))
    index = index_queries(cu_nodes, num_nodes, queries_per_row=None)
    return PackedNodes(
        cu_nodes=cu_nodes,
        row_idx=index.row_idx,
        node=jnp.minimum(index.within, nodes - 1),
    )


def num_drafts(
    packed: PackedNodes | None, slots: Int[Array, "B"], *, spec: SpeculativeConfig
) -> Int[Array, "B"]:
    """Drafts that are verified of each row."""
    if packed is None:  # so few rows that the budget is all of their nodes
        return jnp.full_like(slots, spec.num_draft_tokens - 1)
    return packed.num_drafts
