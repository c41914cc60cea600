"""Matrix products, and the one collective that tensor parallelism needs.

Inside a step's shard_map a column-parallel product needs no collective, a row-parallel one is an
all-reduce over the `tensor` axis. A norm that spans heads is another, of two numbers a token. An
axis of None is outside of it (training, references).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.device.fp8 import FP8Weight
from jspec.device.weights import Weight
from jspec.pallas_kernels.fp8_product.api import Activations, numbers_of
from jspec.pallas_kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Shard:
    """The number of shards of a model, and the mesh axis over which it is split."""

    size: int = 1
    axis: str | None = None

    def sum(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else jax.lax.psum(x, self.axis)


def linear(
    params: Mapping[str, Weight],
    x: Activations,
    *,
    ops: Ops,
    reduce: Shard | None = None,
) -> Float[Array, "*b O"]:
    """Return x @ kernel (+ bias, once). With `reduce` it is row-parallel: summed over shards.

    params may have `adapters` (layers/lora.py), whose product is added.
    """
    kernel = params["kernel"]
    y = ops.fp8_product(x, kernel) if isinstance(kernel, FP8Weight) else numbers_of(x) @ kernel
    if "adapters" in params:
        y = y + params["adapters"].product(numbers_of(x))
    if reduce is not None:
        y = reduce.sum(y)
    return y + params["bias"] if "bias" in params else y


def logits_of(hidden: Float[Array, "*b E"], kernel: Float[Array, "E V"]) -> Float[Array, "*b V"]:
    """Return hidden @ kernel in float32, so that sampling never sees rounded logits."""
    return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
