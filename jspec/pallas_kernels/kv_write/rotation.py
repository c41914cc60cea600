"""Rotary position embedding of heads (RoPE, Su et al., 2021; half-split as in Llama), including the
q and k norms of some families (Qwen3). This is the definition; gpu.py fuses it with writing K and
V.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.pallas_kernels.add_norm.reference import rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Scales of the RMSNorm of each q and k head, applied before RoPE."""

    q: jax.Array  # [D]
    k: jax.Array  # [D]
    eps: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The norms and RoPE to apply to heads[*b, H + 2G, D]: q, then k, then v."""

    cos: jax.Array  # f32[*b, half]; half of the rotated dimensions
    sin: jax.Array  # f32[*b, half]
    num_heads: int = field(metadata={"static": True})  # H
    norms: HeadNorms | None = None


def rotate(
    x: Float[Array, "*b H D"], cos: Float[Array, "*b half"], sin: Float[Array, "*b half"]
) -> Float[Array, "*b H D"]:
    """Rotate every head of x by its token's angles, in float32, rounded to x's dtype.

    Dimensions beyond 2 * half are left as they are.
    """
    half = cos.shape[-1]
    if 2 * half < x.shape[-1]:
        turned, left = jnp.split(x, (2 * half,), axis=-1)
        return jnp.concatenate((rotate(turned, cos, sin), left), axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x.dtype)


def rotate_and_split(
    heads: Float[Array, "*b heads D"], rotation: Rotation
) -> tuple[Float[Array, "*b H D"], Float[Array, "*b G D"], Float[Array, "*b G D"]]:
    """Return (q, k, v), with q and k normed (if there are norms) and rotated."""
    first_k = rotation.num_heads
    first_v = (heads.shape[-2] + first_k) // 2
    q, k, v = jnp.split(heads, (first_k, first_v), axis=-2)
    if (norms := rotation.norms) is not None:
        q, k = rms_norm(q, norms.q, eps=norms.eps), rms_norm(k, norms.k, eps=norms.eps)
    return rotate(q, rotation.cos, rotation.sin), rotate(k, rotation.cos, rotation.sin), v
