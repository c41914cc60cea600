"""Gathering the output of a verification: the accepted path and the bonus token after it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def gather_path(
    values: Int[Array, "B N"], node_path: Int[Array, "B M"], num_accepted: Int[Array, "B"]
) -> Int[Array, "B M"]:
    """Return values[b, node_path[b, i]] for i <= num_accepted[b], and 0 after.

    In:  values [[11, 12, 13, 14]], node_path [[0, 1, 3]], num_accepted [1]    Out: [[11, 12, 0]]
    """
    step = jnp.arange(node_path.shape[1], dtype=jnp.int32)
    valid = step <= num_accepted[:, None]
    index = jnp.where(valid, node_path, 0)
    return jnp.where(valid, jnp.take_along_axis(values, index, axis=1, mode="clip"), 0)


def gather_bonus(emitted_ids: Int[Array, "B M"], num_accepted: Int[Array, "B"]) -> Int[Array, "B"]:
    last = num_accepted[:, None]
    return jnp.take_along_axis(emitted_ids, last, axis=1, mode="clip")[:, 0]


def gather_emitted(
    target_ids: Int[Array, "B N"],
    hidden: Float[Array, "B N A"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
) -> tuple[Int[Array, "B M"], Int[Array, "B"], Float[Array, "B M A"]]:
    emitted_ids = gather_path(target_ids, node_path, num_accepted)
    valid = jnp.arange(node_path.shape[1], dtype=jnp.int32) <= num_accepted[:, None]
    index = jnp.where(valid, node_path, 0)
    rows = jnp.take_along_axis(hidden, index[:, :, None], axis=1, mode="clip")
    on_path = jnp.where(valid[:, :, None], rows, 0)
    return emitted_ids, gather_bonus(emitted_ids, num_accepted), on_path
