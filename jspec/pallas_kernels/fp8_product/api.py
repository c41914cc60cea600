"""Operands that GPU kernels pass to the product that reads them: quantized or unscaled tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jspec.device.pytree import pytree, static

PADDED_TOKENS = 128  # scales of tokens are allocated for a multiple of this


@pytree
class QuantizedTokens:
    """Tokens in fp8. Entries past the first `num` of them are arbitrary."""

    codes: Any  # e4m3[8 m, K]
    scales: Any  # f32[S, 128 m]: S is 1, or the blocks of 128 inputs
    num: int = static()


@pytree
class WithCodes:
    """Values [M, K], and the same as tokens in fp8; a product reads either."""

    values: jax.Array
    tokens: QuantizedTokens


@pytree
class Scaled:
    """Values [.., K] that are `of` times a factor, in float32 and then rounded to `dtype`."""

    of: jax.Array
    factor: jax.Array  # f32[1]
    dtype: Any = static()


Activations = jax.Array | WithCodes | Scaled


def values_of(x: Activations) -> jax.Array:
    if isinstance(x, Scaled):
        return (x.of.astype(jnp.float32) * x.factor).astype(x.dtype)
    return x.values if isinstance(x, WithCodes) else x


def rearranged(
    x: jax.Array | Scaled, rearrange: Callable[[jax.Array], jax.Array]
) -> jax.Array | Scaled:
    return replace(x, of=rearrange(x.of)) if isinstance(x, Scaled) else rearrange(x)
