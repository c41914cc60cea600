"""Tokens in fp8 as the kernels of a GPU pass them on: between a norm and the products it feeds."""

from __future__ import annotations

from typing import Any

import jax

from jspec.device.pytree import pytree, static

PADDED_TOKENS = 128  # scales of tokens are allocated for a multiple of this


@pytree
class QuantisedTokens:
    """Tokens in fp8. What lies past the first `num` of them is arbitrary."""

    codes: Any  # e4m3[8 m, K]
    scales: Any  # f32[S, 128 m]: S is 1, or the blocks of 128 inputs
    num: int = static()


@pytree
class WithCodes:
    """Numbers [M, K], and the same as tokens in fp8: a product reads either."""

    numbers: jax.Array
    tokens: QuantisedTokens


Activations = jax.Array | WithCodes


def numbers_of(x: Activations) -> jax.Array:
    return x.numbers if isinstance(x, WithCodes) else x
