"""The indexer of DeepSeek Sparse Attention (DSA, DeepSeek-V3.2): index queries, keys and weights,
in the engine's dtype. The published code's constant factors, Hadamard rotation and FP8 are left
out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.layers.linear import linear
from jspec.layers.rope import in_halves
from jspec.pallas_kernels.kv_write.reference import rotate
from jspec.pallas_kernels.latent_attention.xla import Index
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.attention import IndexerSpec


def index_of(
    params: dict[str, Any],
    x: Float[Array, "T E"],
    low_rank: Float[Array, "T R"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    *,
    spec: IndexerSpec,
    ops: Ops,
) -> Index:
    """Return index queries, weights and keys of x's tokens. low_rank: the attention's low-rank
    queries after their norm. cos, sin: the attention's angles."""

    def rotated(heads: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        if spec.interleaved:
            leading, others = jnp.split(heads, (2 * cos.shape[-1],), axis=-1)
            heads = jnp.concatenate((in_halves(leading), others), axis=-1)
        return rotate(heads, cos, sin)

    queries = linear(params["q"], low_rank, ops=ops).reshape(-1, spec.num_heads, spec.head_dim)
    keys = layer_norm(params["k_norm"], linear(params["k"], x, ops=ops), eps=spec.norm_eps)
    return Index(
        queries=rotated(queries),
        weights=x.astype(jnp.float32) @ params["weights"]["kernel"],
        keys=rotated(keys[:, None])[:, 0],
    )


def layer_norm(
    params: dict[str, jax.Array], x: Float[Array, "*b D"], *, eps: float
) -> Float[Array, "*b D"]:
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    return (normed * params["scale"] + params["bias"]).astype(x.dtype)
