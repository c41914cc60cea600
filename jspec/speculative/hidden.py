"""Hidden states (after the final norm) packed into step outputs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.batch import Verified
from jspec.spec.hidden_rows import HiddenRows


def rows_of(hidden: Float[Array, "*b E"]) -> HiddenRows:
    return HiddenRows.of(hidden.shape[-1], hidden.dtype.name)


def hidden_bits(hidden: Float[Array, "*b E"]) -> Int[Array, "*b words"]:
    """Pack hidden states into the i32 words that `HiddenRows.floats` reads."""
    rows = rows_of(hidden)
    if not rows.is_half:
        return jax.lax.bitcast_convert_type(hidden.astype(jnp.float32), jnp.int32)
    pairs = hidden.reshape(*hidden.shape[:-1], rows.words, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.int32)


def without_hidden(verified: Verified) -> Verified:
    nothing = dataclasses.replace(verified.features, hidden=verified.features.hidden[..., :0])
    return dataclasses.replace(verified, features=nothing)
