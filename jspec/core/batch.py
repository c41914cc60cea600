"""What one step receives and what it hands on: immutable pytrees and their packed form.

The host sends one flat i32 array a step (`PackedLayout`), the device cuts it apart again.
"""

from __future__ import annotations

import jax

from jspec.core.pytree import pytree


@pytree
class DecodeBatch:
    """B rows to advance by the rounds of a step."""

    slots: jax.Array  # i32[B], 0 = padding
    grants: jax.Array  # i32[X, 3], (slot, index, page); slot 0 = padding


@pytree
class PrefillBatch:
    """R chunks, packed into T tokens; a chunk may bring its whole new row along."""

    slots: jax.Array  # i32[R], 0 = padding
    starts: jax.Array  # i32[R], tokens of the row already in the KV
    cu_q_lens: jax.Array  # i32[R + 1]
    is_final: jax.Array  # i32[R], 1: sample the root behind this chunk
    next_ids: jax.Array  # i32[R], the token behind a chunk that is not final
    token_ids: jax.Array  # i32[T]
    admitted: jax.Array  # i32[R], the slot if the row is new, else 0
    prompt_lens: jax.Array  # i32[R]
    page_table: jax.Array  # i32[R, P]
    seed: jax.Array  # i32[R, 2], bits
    sampling_floats: jax.Array  # i32[R, 5], bits: temperature, top_p, min_p, frequency, presence
    sampling_ints: jax.Array  # i32[R, 2]: top_k, min_new_tokens
    stop_ids: jax.Array  # i32[R, 16]


@pytree
class DraftTree:
    """Nodes to verify; node 0 is the root.

    tokens: i32[B, N] target ids. parents: i32[B, N], parents[:, 0] = -1, parents[:, i] < i.
    depths: i32[B, N], 0 for the root.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array


@pytree
class Verified:
    """What one verification settled.

    Rows of `emitted_ids` behind num_accepted are 0; `node_path` is 0 there (never used).
    """

    emitted_ids: jax.Array  # i32[B, M], accepted drafts and then the bonus token
    bonus_ids: jax.Array  # i32[B], the last of each row's emitted ids
    num_accepted: jax.Array  # i32[B], in [0, S]
    node_path: jax.Array  # i32[B, M], node_path[:, 0] = 0
    hidden: jax.Array  # [B, M, .], the target's features at the path's nodes
