"""Penalties, bias and the minimum length, exact at every node of a tree.

A node's output is the row's emitted tokens (`output_counts`, root included) plus the draft tokens
on its path. The reduction that reads the logits compares their counts, so no [B, N, V] array is
stored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.batch import DraftTree
from jspec.device.state import SamplingBatch, Seen


def path_tokens(tree: DraftTree, *, num_levels: int) -> Int[Array, "B N S"]:
    """Return the draft tokens from each node up to the root, the node's own first, then -1.

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
    rows: SamplingBatch,
    *,
    token_ids: Int[Array, "V"],
    seen: Seen,
    tokens_on_path: Int[Array, "B N S"],
    num_output: Int[Array, "B N"],
) -> Float[Array, "B N V"]:
    """Apply repetition, frequency and presence penalties, the bias and the minimum length. A row
    without them keeps its bits.

    token_ids: target id of each column of this vocabulary shard
    num_output: tokens emitted before the one chosen at this node
    """
    counts = seen.output_counts[:, None, :]
    for level in range(tokens_on_path.shape[-1]):
        counts = counts + (token_ids == tokens_on_path[..., level, None])
    repetition = rows.repetition_penalty[:, None, None]
    is_known = (counts > 0) | (seen.prompt_marks[:, None, :] > 0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(is_known, repeated, logits)
    frequency = rows.frequency_penalty[:, None, None] * counts.astype(jnp.float32)
    presence = rows.presence_penalty[:, None, None] * (counts > 0)
    bias = bias_of(rows, token_ids=token_ids)[:, None, :]
    too_short = num_output < rows.min_new_tokens[:, None]
    is_stop = jnp.zeros((logits.shape[0], 1, token_ids.shape[0]), bool)
    for i in range(rows.stop_ids.shape[-1]):
        is_stop = is_stop | (token_ids == rows.stop_ids[:, None, i, None])
    penalized = logits - frequency - presence + bias
    return jnp.where(too_short[..., None] & is_stop, -jnp.inf, penalized)


def bias_of(rows: SamplingBatch, *, token_ids: Int[Array, "V"]) -> Float[Array, "B V"]:
    """Return each column's logit_bias; ids outside this vocabulary shard are dropped."""
    num_rows, num_ids = len(rows.logit_bias), token_ids.shape[0]
    column = rows.logit_bias[..., 0] - token_ids[0]
    column = jnp.where((column >= 0) & (column < num_ids), column, num_ids)
    value = jax.lax.bitcast_convert_type(rows.logit_bias[..., 1], jnp.float32)
    row = jnp.arange(num_rows)[:, None]
    return jnp.zeros((num_rows, num_ids), jnp.float32).at[row, column].set(value, mode="drop")


def count_emitted(
    output_counts: Int[Array, "slots V"],
    slots: Int[Array, "*n"],
    token_ids: Int[Array, "*n"],
    valid: jax.Array,
    *,
    first_id: jax.Array | int,
) -> Int[Array, "slots V"]:
    """Add 1 to output_counts[slot, id] where valid; ids outside this shard are dropped."""
    at = _places(output_counts, slots, token_ids, valid, first_id=first_id)
    return output_counts.at[at].add(1, mode="drop")


def see_filled(
    seen: Seen,
    slots: Int[Array, "n"],
    token_ids: Int[Array, "n"],
    valid: jax.Array,
    *,
    is_prompt: jax.Array,
    first_id: jax.Array | int,
) -> Seen:
    """Mark prefilled prompt tokens, and count those after the prompt (of a retracted row)."""
    marks = seen.prompt_marks
    at = _places(marks, slots, token_ids, valid & is_prompt, first_id=first_id)
    is_output = valid & ~is_prompt
    return Seen(
        output_counts=count_emitted(
            seen.output_counts, slots, token_ids, is_output, first_id=first_id
        ),
        prompt_marks=marks.at[at].set(1, mode="drop"),
    )


def _places(
    by_id: jax.Array,
    slots: jax.Array,
    token_ids: jax.Array,
    valid: jax.Array,
    *,
    first_id: jax.Array | int,
) -> tuple[jax.Array, jax.Array]:
    """Return (slot, column) of each id; ids of other shards get a column past the end."""
    num_ids = by_id.shape[1]
    local = token_ids - first_id
    inside = valid & (local >= 0) & (local < num_ids)
    return jnp.where(inside, slots, 0), jnp.where(inside, local, num_ids)
