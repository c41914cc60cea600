"""Inputs and outputs of one step as pytrees, packed as one flat i32 array (`PackedLayout`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.device.pytree import pytree
from jspec.device.state import SamplingBatch
from jspec.messages.layout import OutputColumns
from jspec.messages.sampling_rows import PREFIX, SAMPLING_ROWS


@pytree
class SharedPrefixes:
    """`config.shared_prefixes.SharedPrefix` for all rows of a step."""

    leaders: jax.Array  # i32[B], in [0, B)
    num_keys: jax.Array  # i32[B], multiples of UNIT, at most L


@pytree
class DecodeBatch:
    """B rows to decode for the rounds of one step."""

    slots: jax.Array  # i32[B], 0 = padding
    grants: jax.Array  # i32[X, 3], (slot, index, page) of the full space; slot 0 = padding
    window_grants: jax.Array | None = None  # i32[W, X, 3], of each window space, in their order
    shared: SharedPrefixes | None = None


def decode_batch(fields: dict[str, jax.Array]) -> DecodeBatch:
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
    """The rows of a DecodeBatch, whose trees are on the device, with the host's grammar masks."""

    slots: jax.Array  # i32[B], 0 = padding
    allowed: jax.Array  # u32[B, N, W], tokens that a grammar allows after each node


def settle_batch(fields: dict[str, jax.Array]) -> SettleBatch:
    allowed = jax.lax.bitcast_convert_type(fields["allowed"], jnp.uint32)
    return SettleBatch(slots=fields["slots"], allowed=allowed)


@pytree
class PrefillBatch:
    """R prompt chunks, packed into T tokens. The first chunk of a row carries its settings."""

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
    lora_slots: jax.Array | None = None  # i32[R], of new rows' adapters, if the engine has LoRA
    sampling: SamplingBatch  # for new rows; neutral for all others


@pytree
class DraftPrefillBatch:
    """B rows whose drafter gets the tokens that plain steps left pending."""

    slots: jax.Array  # i32[B], 0 = padding
    counts: jax.Array  # i32[B], pending tokens: the last `counts` committed ones


@pytree
class CachedDraftPrefillBatch:
    """Token ids in cached pages of R rows, packed into T ids; at most one piece per row."""

    slots: jax.Array  # i32[R], 0 = padding
    starts: jax.Array  # i32[R], position of the piece's first id
    cu_q_lens: jax.Array  # i32[R + 1]
    next_ids: jax.Array  # i32[R], the id after the piece
    is_first: jax.Array  # i32[R], 1: the row's first piece
    prompt_lens: jax.Array  # i32[R]
    token_ids: jax.Array  # i32[T]


@pytree
class SnapshotBatch:
    """Copies between the states of B rows and their snapshots."""

    slots: jax.Array  # i32[B], 0 = padding
    entries: jax.Array  # i32[B], 0 = padding


def prefill_batch(fields: dict[str, jax.Array]) -> PrefillBatch:
    others = {name: array for name, array in fields.items() if not name.startswith(PREFIX)}
    if "allowed" in others:
        others["allowed"] = jax.lax.bitcast_convert_type(others["allowed"], jnp.uint32)
    return PrefillBatch(**others, sampling=sampling_batch(fields))


def sampling_batch(fields: dict[str, jax.Array]) -> SamplingBatch:
    """Return the sampling parameters of a packed batch, stored there as i32 bits."""
    return SamplingBatch(
        **{
            name: jax.lax.bitcast_convert_type(fields[PREFIX + name], row.dtype)
            for name, row in SAMPLING_ROWS.items()
        }
    )


def pack_output(columns: OutputColumns, values: dict[str, jax.Array]) -> jax.Array:
    """Pack fields [B, *shape] into i32[B, width] for `columns.unpack` on the host; floats as bits.
    Raises ValueError for other fields than those of `columns`."""
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
    """Nodes to verify; node 0 is the root."""

    tokens: jax.Array  # i32[B, N], target ids
    parents: jax.Array  # i32[B, N], parents[:, 0] = -1, parents[:, i] < i
    depths: jax.Array  # i32[B, N], 0 for the root


@pytree
class Features:
    """The target's hidden states that a drafter reads; unread ones have width 0."""

    hidden: jax.Array  # [..., E or 0], the last hidden after the final norm
    aux_hidden: jax.Array  # [..., A or 0], the residuals at the aux layers, concatenated


@pytree
class Scored:
    """The target's output for every node of every row, before a token is chosen."""

    logits: jax.Array  # f32[B, N, V], raw; V is this device's vocabulary shard
    features: Features  # [B, N, .]


@pytree
class Verified:
    """Result of one verification; unused entries after num_accepted are 0."""

    emitted_ids: jax.Array  # i32[B, M], accepted drafts and then the bonus token
    bonus_ids: jax.Array  # i32[B], the last of each row's emitted ids
    num_accepted: jax.Array  # i32[B], in [0, S]
    node_path: jax.Array  # i32[B, M], node_path[:, 0] = 0
    features: Features  # [B, M, .], the target's at the path's nodes
