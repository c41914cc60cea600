"""The gated MLP of Llama (SwiGLU, Shazeer 2020), gate and up in one product.

For many tokens a backend may have one kernel for that product and its gate
(pallas_kernels/gated_matmul_gpu.py). Which one, the caller says.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec.layers.linear import Linear, Shard

# (x, w) -> silu(x @ w[:, :N]) * (x @ w[:, N:]), gate and up rounded as products are.
GatedProduct = Callable[[jax.Array, jax.Array], jax.Array]


class GatedMLP(nnx.Module):
    """gate_up holds, shard by shard, the gate columns and then the up columns."""

    def __init__(
        self, size: int, inner: int, *, shard: Shard, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.gate_up = Linear(size, 2 * inner, dtype=dtype, rngs=rngs)
        self.down = Linear(inner, size, dtype=dtype, rngs=rngs, reduce=shard)

    def __call__(
        self, x: Float[Array, "*b E"], gated_product: GatedProduct | None = None
    ) -> Float[Array, "*b E"]:
        if gated_product is not None:
            return self.down(gated_product(x, self.gate_up.kernel[...]))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)
