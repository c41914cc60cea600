"""Rotary position embedding, half-split layout (Su et al., 2021; Hugging Face's Llama).

Angles come from the positions themselves, so no table bounds the context: a draft whose config
says max_position_embeddings 2048 still runs at the target's positions.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.spec.rope import RopeConfig, YarnConfig


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """f32[D/2] angle per position, computed in float64; slowed as YaRN or Llama 3.1 say."""
    inv = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.yarn is not None:
        slowed = _yarn_ramp(head_dim, rope, rope.yarn)
        inv = inv * (1 - slowed) + inv / rope.factor * slowed
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
    return inv.astype(np.float32)


def _yarn_ramp(head_dim: int, rope: RopeConfig, yarn: YarnConfig) -> np.ndarray:
    """f64[D/2] how far each pair is slowed: 0 keeps its frequency, 1 divides it by the factor."""

    def pair_that_turns(times: float) -> float:
        """The (fractional) pair that turns so often over the original context."""
        wavelength = rope.original_max_position / (2 * math.pi * times)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # transformers' guard, so that the step lies where theirs does
    return np.clip((np.arange(head_dim // 2) - first) / (last - first), 0, 1)


def angles_of(
    positions: Int[Array, "*b"], *, head_dim: int, rope: RopeConfig
) -> tuple[Float[Array, "*b half"], Float[Array, "*b half"]]:
    """f32 (cos, sin) of each token's angles, half a head wide: the same for all heads.

    YaRN's are multiplied by its attention factor, so that scores grow by its square.
    """
    inv = jnp.asarray(inverse_frequencies(head_dim, rope))
    angle = positions.astype(jnp.float32)[..., None] * inv
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if rope.yarn is None:
        return cos, sin
    return cos * rope.yarn.attention_factor, sin * rope.yarn.attention_factor
