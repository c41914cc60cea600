"""Token embedding. Replicated over shards: it is read by row, never multiplied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        draw = jax.random.normal(rngs.params(), (vocab_size, size), jnp.float32)
        self.table = nnx.Param(draw.astype(dtype))

    def __call__(self, token_ids: Int[Array, "*b"]) -> Float[Array, "*b E"]:
        """Rows of the table; ids must lie in [0, V) (callers map padding to 0)."""
        return jnp.take(self.table[...], token_ids, axis=0, mode="clip")
