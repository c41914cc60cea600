"""Rotary position embedding, half-split layout (Su et al., 2021; Hugging Face's Llama). Angles are
computed, so a draft with max_position_embeddings 2048 also runs at later positions."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.spec.rope import QueryGrowth, RopeConfig, YarnConfig


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """Return the angles per position, f32[D/2], computed in float64, with the scaling of `rope`."""
    inv = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.yarn is not None:
        slowed = _yarn_ramp(head_dim, rope, rope.yarn)
        inv = inv * (1 - slowed) + inv / rope.factor * slowed
    elif rope.is_linear:
        inv = inv / rope.factor
    elif rope.factor > 1.0:
        wavelength = 2 * math.pi / inv
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        slowed = inv / rope.factor
        blended = (1 - smooth) * slowed + smooth * inv
        inv = np.select((wavelength > low, wavelength < high), (slowed, inv), default=blended)
    inv[int(rope.turned * head_dim // 2) :] = 0.0
    return inv.astype(np.float32)


def _yarn_ramp(head_dim: int, rope: RopeConfig, yarn: YarnConfig) -> np.ndarray:
    """Return weights f64[D/2]: 0 keeps a pair's frequency, 1 divides it by the factor."""

    def pair_that_turns(times: float) -> float:
        wavelength = rope.original_max_position / (2 * math.pi * times)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as in transformers
    return np.clip((np.arange(head_dim // 2) - first) / (last - first), 0, 1)


def angles_of(
    positions: Int[Array, "*b"], *, head_dim: int, rope: RopeConfig
) -> tuple[Float[Array, "*b half"], Float[Array, "*b half"]]:
    """Return f32 (cos, sin) of each token's angles, [*b, D/2], times YaRN's factor."""
    inv = jnp.asarray(inverse_frequencies(head_dim, rope))
    angle = positions.astype(jnp.float32)[..., None] * inv
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if rope.yarn is None:
        return cos, sin
    return cos * rope.yarn.attention_factor, sin * rope.yarn.attention_factor


def grown(
    queries: Float[Array, "*b H D"], positions: Int[Array, "*b"], growth: QueryGrowth | None
) -> Float[Array, "*b H D"]:
    """Scale each token's queries by its position. The scale commutes with RoPE."""
    if growth is None:
        return queries
    periods = (positions // growth.period).astype(jnp.float32)
    factor = (1.0 + growth.beta * jnp.log1p(periods)).astype(queries.dtype)
    return queries * factor[..., None, None]


def in_halves(x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    """Order the pairs (0, 1), (2, 3) of neighbours as RoPE's halves: [0 1 2 3] -> [0 2 1 3]."""
    return jnp.concatenate((x[..., 0::2], x[..., 1::2]), axis=-1)
