"""KV pools of random numbers for benchmarks: zeros would be faster to read than what is served."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jspec.engine.weights.dummy_weights import hashed_normal


def randomized(pages: jax.Array, seed: int) -> jax.Array:
    """A pool of the same shape and dtype, of small random numbers, in the place of `pages`."""
    shape, dtype = pages.shape, pages.dtype
    pages.delete()  # all pools together fill the memory
    return _random_pool(jnp.uint32(seed), shape=shape, dtype=dtype)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _random_pool(seed: jax.Array, *, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    flat = (shape[0] * shape[1], shape[2] * shape[3])
    return hashed_normal(seed, shape=flat, dtype=dtype).reshape(shape)
