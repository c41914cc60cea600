"""Matrix products, and where tensor parallelism puts its one collective.

Kernels are [in, out]. Inside a step's shard_map every module sees its own shard: a column-parallel
product needs nothing, a row-parallel one sums over the `tensor` axis. Modules know the axis by
name only; None means the caller is not inside a shard_map (training, references).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


@dataclass(frozen=True, slots=True)
class Shard:
    """How many ways a module is split and over which mesh axis."""

    size: int = 1
    axis: str | None = None

    def sum(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else jax.lax.psum(x, self.axis)


class Linear(nnx.Module):
    """x @ kernel (+ bias); `reduce` set makes it row-parallel: the product is summed over it.

    A row-parallel bias is added once, after the sum.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        bias: bool = False,
        reduce: Shard | None = None,
    ) -> None:
        scale = in_size**-0.5
        draw = jax.random.normal(rngs.params(), (in_size, out_size), jnp.float32)
        self.kernel = nnx.Param((draw * scale).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None
        self.reduce = reduce

    def __call__(self, x: Float[Array, "*b I"]) -> Float[Array, "*b O"]:
        y = x @ self.kernel[...]
        if self.reduce is not None:
            y = self.reduce.sum(y)
        return y if self.bias is None else y + self.bias[...]


def logits_of(hidden: Float[Array, "*b E"], kernel: Float[Array, "E V"]) -> Float[Array, "*b V"]:
    """hidden @ kernel, leaving in float32: sampling never sees a rounded logit."""
    return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
