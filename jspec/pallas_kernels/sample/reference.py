"""Sampling from noisy logits, and the best draft candidates: the specification of the kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.device import noise


def rank(
    logits: Float[Array, "T U"],
    temperature: Float[Array, "B"],
    seed: UInt32[Array, "B 2"],
    positions: Int[Array, "T"],
    token_ids: Int[Array, "U"],
    *,
    topk: int,
    lowest: float,
) -> tuple[Float[Array, "T K"], Int[Array, "T K"], Float[Array, "T"]]:
    """Return (the K largest scores, best first; their columns; sum of exp(score - largest)) per
    row, all finite. Equal scores are in the order of their columns. K: topk, at most U.

    temperature, seed: each for T / B consecutive rows
    token_ids: the ids whose noise the columns use
    lowest: the value of NaN and lower scores; -lowest bounds scores above
    """
    per_row = logits.shape[0] // temperature.shape[0]
    temperature, seed = jnp.repeat(temperature, per_row), jnp.repeat(seed, per_row, axis=0)
    noisy = logits + temperature[:, None] * noise.gumbel(seed, positions, token_ids)
    return best_of(finite(noisy, lowest=lowest), topk=topk)


def best_of(
    scores: Float[Array, "*b U"], *, topk: int
) -> tuple[Float[Array, "*b K"], Int[Array, "*b K"], Float[Array, "*b"]]:
    """Return `rank` of finite scores."""
    values, columns = largest(scores, min(topk, scores.shape[-1]))
    return values, columns, jnp.sum(jnp.exp(scores - values[..., :1]), axis=-1)


def largest(x: Float[Array, "*b U"], topk: int) -> tuple[Float[Array, "*b K"], Int[Array, "*b K"]]:
    """Return lax.top_k of finite numbers."""
    if topk == 1:
        best = jnp.argmax(x, axis=-1, keepdims=True).astype(jnp.int32)
        return jnp.max(x, axis=-1, keepdims=True), best
    return jax.lax.platform_dependent(
        x, tpu=partial(largest_in_rounds, topk=topk), default=partial(_top_k, topk=topk)
    )


def _top_k(x: jax.Array, *, topk: int) -> tuple[jax.Array, jax.Array]:
    values, columns = jax.lax.top_k(x, topk)
    return values, columns


def largest_in_rounds(
    x: Float[Array, "*b U"], *, topk: int
) -> tuple[Float[Array, "*b K"], Int[Array, "*b K"]]:
    """Return lax.top_k of finite numbers, with its tie order. Round i takes the i-th largest.

    XLA for TPU compiles lax.top_k to a sort of all columns.

    In:  x = [3 5 5 1], topk 2
    Out: [5 5], [1 2]
    """
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    values, columns = [], []
    for _ in range(topk):
        value = jnp.max(x, axis=-1, keepdims=True)
        first = jnp.min(jnp.where(x == value, column, x.shape[-1]), axis=-1, keepdims=True)
        x = jnp.where(column == first, -jnp.inf, x)
        values.append(value)
        columns.append(first)
    return jnp.concatenate(values, axis=-1), jnp.concatenate(columns, axis=-1)


def finite(scores: jax.Array, *, lowest: float) -> jax.Array:
    return jnp.where(scores > lowest, jnp.minimum(scores, -lowest), lowest)


def sample(
    logits: Float[Array, "T V"],
    temperature: Float[Array, "B"],
    seed: UInt32[Array, "B 2"],
    positions: Int[Array, "T"],
    threshold: Float[Array, "T"] | None = None,
    *,
    first_id: jax.Array | int = 0,
) -> tuple[Float[Array, "T"], Int[Array, "T"]]:
    """Return (value, id) of each row; ids count from `first_id`, this vocabulary shard's first.
    temperature, seed: each for T / B consecutive rows. threshold: the least logit to choose."""
    logits = without_nan(logits.astype(jnp.float32))
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.int32) + first_id
    nodes = logits.shape[0] // temperature.shape[0]
    temperature, seed = jnp.repeat(temperature, nodes), jnp.repeat(seed, nodes, axis=0)
    perturbed = logits + temperature[:, None] * noise.gumbel(seed, positions, token_ids)
    if threshold is not None:
        perturbed = jnp.where(logits >= threshold[:, None], perturbed, -jnp.inf)
    best = jnp.argmax(perturbed, axis=1).astype(jnp.int32)
    return jnp.max(perturbed, axis=1), best + first_id


def without_nan(x: jax.Array) -> jax.Array:
    return jnp.where(x != x, -jnp.inf, x)
