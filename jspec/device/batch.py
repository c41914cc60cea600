"""What one step receives and what it hands on: immutable pytrees and their packed form.

The host sends one flat i32 array a step (`PackedLayout`), the device cuts it apart again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.device.pytree import pytree
from jspec.device.state import SamplingRows
from jspec.messages.layout import OutputColumns
from jspec.messages.request import SAMPLING_FIELDS
from jspec.messages.sampling_fields import PREFIX, SamplingTable, rows_of


@pytree
class SharedPrefixes:
    """`config.shared_prefixes.SharedPrefix` of all rows of a step."""

    leaders: jax.Array  # i32[B], in [0, B)
    num_keys: jax.Array  # i32[B], multiples of UNIT, at most L


@pytree
class DecodeBatch:
    """B rows to advance by the rounds of a step."""

    slots: jax.Array  # i32[B], 0 = padding
    grants: jax.Array  # i32[X, 3], (slot, index, page) of the full space; slot 0 = padding
    window_grants: jax.Array | None = None  # i32[W, X, 3], of each window space, in their order
    shared: SharedPrefixes | None = None


def decode_batch(fields: dict[str, jax.Array]) -> DecodeBatch:
    """The batch from the fields of a `decode_layout`."""
    shared = None
    if "leaders" in fields:
        shared = SharedPrefixes(leaders=fields["leaders"], num_keys=fields["shared_keys"])
    return DecodeBatch(
        slots=fields["slots"],
        grants=fields["grants"],
        window_grants=fields.get("window_grants"),
        shared=shared,
    )


@pytree
class SettleBatch:
    """Rows of a DecodeBatch, whose trees are on the device, with what the host says of them."""

    slots: jax.Array  # i32[B], 0 = padding
    allowed: jax.Array  # u32[B, N, W], tokens that a grammar allows after each node


def settle_batch(fields: dict[str, jax.Array]) -> SettleBatch:
    """The batch from the fields of a `settle_layout`."""
    allowed = jax.lax.bitcast_convert_type(fields["allowed"], jnp.uint32)
    return SettleBatch(slots=fields["slots"], allowed=allowed)


@pytree
class PrefillBatch:
    """R chunks, packed into T tokens; a chunk may bring its whole new row along."""

    slots: jax.Array  # i32[R], 0 = padding
    starts: jax.Array  # i32[R], tokens of the row already in the KV
    cu_q_lens: jax.Array  # i32[R + 1]
    is_final: jax.Array  # i32[R], 1: sample the root after this chunk
    next_ids: jax.Array  # i32[R], the token after a chunk that is not final
    token_ids: jax.Array  # i32[T]
    admitted: jax.Array  # i32[R], the slot if the row is new, else 0
    prompt_lens: jax.Array  # i32[R]
    page_table: jax.Array  # i32[R, P]
    window_grants: jax.Array | None = None  # i32[W, Y, 3], (slot, index, page); slot 0 = padding
    allowed: jax.Array | None = None  # u32[R, W], tokens that a grammar allows after each chunk
    sampling: SamplingRows  # of the rows that are new, neutral elsewhere


@pytree
class CatchUpBatch:
    """B rows of which a drafter is told what plain steps left out."""

    slots: jax.Array  # i32[B], 0 = padding
    counts: jax.Array  # i32[B], the last so many committed tokens of each


@pytree
class RecallBatch:
    """Ids of R rows that stand in cached pages, packed into T ids; at most one piece a row."""

    slots: jax.Array  # i32[R], 0 = padding
    starts: jax.Array  # i32[R], position of the piece's first id
    cu_q_lens: jax.Array  # i32[R + 1]
    next_ids: jax.Array  # i32[R], the id after the piece
    is_first: jax.Array  # i32[R], 1: the row's first piece
    prompt_lens: jax.Array  # i32[R]
    token_ids: jax.Array  # i32[T]


def prefill_batch(fields: dict[str, jax.Array]) -> PrefillBatch:
    """The batch from the fields of a `prefill_layout`."""
    others = {name: array for name, array in fields.items() if not name.startswith(PREFIX)}
    if "allowed" in others:
        others["allowed"] = jax.lax.bitcast_convert_type(others["allowed"], jnp.uint32)
    return PrefillBatch(**others, sampling=SamplingRows(**sampling_rows(fields)))


def sampling_rows(
    fields: dict[str, jax.Array], *, table: SamplingTable = SAMPLING_FIELDS
) -> dict[str, jax.Array]:
    """SamplingRows' arrays, by name, from the i32 bits of a packed batch."""
    return {
        name: jax.lax.bitcast_convert_type(fields[PREFIX + name], row.dtype)
        for name, row in rows_of(table).items()
    }


def pack_output(columns: OutputColumns, values: dict[str, jax.Array]) -> jax.Array:
    """i32[B, width] of fields [B, *shape], to be read by `columns.unpack` on the host; of floats
    their bits.

    Raises ValueError unless there is each field, in its shape, and no other.
    """
    shapes = {name: array.shape[1:] for name, array in values.items()}
    if shapes != dict(columns.fields):
        raise ValueError(f"the output has {shapes} a row; expected {dict(columns.fields)}")
    bits = {
        name: x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32)
        for name, x in values.items()
    }
    return jnp.concatenate(
        [bits[name].reshape(bits[name].shape[0], -1) for name, _ in columns.fields], axis=1
    )


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
class Features:
    """What the target lets a drafter see of its rows; of width 0 where nobody asked for it."""

    hidden: jax.Array  # [..., E or 0], the last hidden after the final norm
    aux_hidden: jax.Array  # [..., A or 0], the residual at the layers asked for, side by side


@pytree
class Scored:
    """What the target says of every node of every row, before anything is chosen."""

    logits: jax.Array  # f32[B, N, V], raw; V of this device's vocabulary shard
    features: Features  # [B, N, .]


@pytree
class Verified:
    """What one verification settled.

    Rows of `emitted_ids` after num_accepted are 0; `node_path` is 0 there (never used).
    """

    emitted_ids: jax.Array  # i32[B, M], accepted drafts and then the bonus token
    bonus_ids: jax.Array  # i32[B], the last of each row's emitted ids
    num_accepted: jax.Array  # i32[B], in [0, S]
    node_path: jax.Array  # i32[B, M], node_path[:, 0] = 0
    features: Features  # [B, M, .], the target's at the path's nodes
