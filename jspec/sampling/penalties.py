"""Frequency and presence penalties, and the minimum length, exact at every node of a tree.

The output in front of a node is what the row has emitted (root included) and the draft tokens on
the path to the node, its own included; the root itself is already counted in `output_counts`.
Per-node counts are compared inside the reduction that consumes the logits; no [B, N, V] array of
counts exists.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.batch import DraftTree
from jspec.core.state import SamplingRows


def path_tokens(tree: DraftTree, *, num_levels: int) -> Int[Array, "B N S"]:
    """Draft tokens on the way from each node up to the root, the node's own first; -1 behind.

    In:  tokens [t7 a1 b1 a2], parents [-1 0 0 1], 2 levels
    Out: [[-1 -1], [a1 -1], [b1 -1], [a2 a1]]
    """
    node = jnp.broadcast_to(jnp.arange(tree.tokens.shape[1], dtype=jnp.int32), tree.tokens.shape)
    found = []
    for _ in range(num_levels):
        token = jnp.take_along_axis(tree.tokens, node, axis=1, mode="clip")
        found.append(jnp.where(node > 0, token, -1))
        parent = jnp.take_along_axis(tree.parents, node, axis=1, mode="clip")
        node = jnp.maximum(parent, 0)
    if not found:
        return jnp.zeros((*tree.tokens.shape, 0), jnp.int32)
    return jnp.stack(found, axis=-1)


def penalize(
    logits: Float[Array, "B N V"],
    rows: SamplingRows,
    *,
    token_ids: Int[Array, "V"],
    output_counts: Int[Array, "B V"],
    tokens_on_path: Int[Array, "B N S"],
    num_output: Int[Array, "B N"],
) -> Float[Array, "B N V"]:
    """logits minus the penalties, and -inf for stop ids while the output is too short.

    token_ids: the target id of each column (one vocabulary shard). num_output: tokens emitted
    before the one that is chosen at this node.
    """
    counts = output_counts[:, None, :]
    for level in range(tokens_on_path.shape[-1]):
        counts = counts + (token_ids == tokens_on_path[..., level, None])
    frequency = rows.frequency_penalty[:, None, None] * counts.astype(jnp.float32)
    presence = rows.presence_penalty[:, None, None] * (counts > 0)
    too_short = num_output < rows.min_new_tokens[:, None]
    is_stop = jnp.zeros((logits.shape[0], 1, token_ids.shape[0]), bool)
    for i in range(rows.stop_ids.shape[-1]):
        is_stop = is_stop | (token_ids == rows.stop_ids[:, None, i, None])
    return jnp.where(too_short[..., None] & is_stop, -jnp.inf, logits - frequency - presence)


def count_emitted(
    output_counts: Int[Array, "slots V"],
    slots: Int[Array, "*n"],
    token_ids: Int[Array, "*n"],
    valid: jax.Array,
    *,
    first_id: jax.Array | int,
) -> Int[Array, "slots V"]:
    """output_counts[slot, id] += 1 where valid; ids outside this vocabulary shard are dropped."""
    num_ids = output_counts.shape[1]
    local = token_ids - first_id
    inside = valid & (local >= 0) & (local < num_ids)
    column = jnp.where(inside, local, num_ids)  # one past the end: dropped, never wrapped
    return output_counts.at[jnp.where(inside, slots, 0), column].add(1, mode="drop")
