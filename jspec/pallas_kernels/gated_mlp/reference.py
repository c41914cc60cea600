"""The gated product of an MLP (SwiGLU, Shazeer 2020): the specification of the kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gated(
    gate: Float[Array, "*b I"], up: Float[Array, "*b I"], *, limit: float | None = None
) -> Float[Array, "*b I"]:
    """Return silu(gate) * up. limit: clip silu(gate) from above, and up to [-limit, limit]."""
    inner = jax.nn.silu(gate)
    if limit is not None:
        inner, up = jnp.minimum(inner, limit), jnp.clip(up, -limit, limit)
    return inner * up


def gated_product(x: Float[Array, "M K"], w: Float[Array, "K N2"]) -> Float[Array, "M N"]:
    """Return silu(x @ w[:, :N]) * (x @ w[:, N:]): products rounded to x's dtype, then float32."""
    product = jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(x.dtype)
    return gated(*jnp.split(product.astype(jnp.float32), 2, axis=-1)).astype(x.dtype)
