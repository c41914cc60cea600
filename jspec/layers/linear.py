"""Matrix products, and where tensor parallelism puts its one collective.

Kernels are [in, out]. Inside a step's shard_map every function sees its own shard: a
column-parallel product needs nothing, a row-parallel one sums over the `tensor` axis. Layers know
the axis by name only; None means the caller is not inside a shard_map (training, references).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclass(frozen=True, slots=True)
class Shard:
    """How many ways a model is split and over which mesh axis."""

    size: int = 1
    axis: str | None = None

    def sum(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else jax.lax.psum(x, self.axis)


def linear(
    params: Mapping[str, jax.Array], x: Float[Array, "*b I"], *, reduce: Shard | None = None
) -> Float[Array, "*b O"]:
    """x @ kernel (+ bias); `reduce` makes it row-parallel: the product is summed over the shards.

    A row-parallel bias is added once, after the sum.
    """
    y = x @ params["kernel"]
    if reduce is not None:
        y = reduce.sum(y)
    return y + params["bias"] if "bias" in params else y


def logits_of(hidden: Float[Array, "*b E"], kernel: Float[Array, "E V"]) -> Float[Array, "*b V"]:
    """hidden @ kernel, leaving in float32: sampling never sees a rounded logit."""
    return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
