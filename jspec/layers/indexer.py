"""The indexer of DeepSeek Sparse Attention (DSA, DeepSeek-V3.2): index queries, keys and weights.

The published code multiplies scores by head_dim ** -0.5 and num_heads ** -0.5, rotates queries and
keys by a Hadamard matrix and rounds both to FP8. The factors change no order and the rotation no
product; index keys are cached in the engine's dtype, so none of these is here.
"""

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
from jspec.spec.model_spec import IndexerSpec


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
    """Return what selects tokens, and the keys by which x's tokens are selected.

    low_rank: the normed low-rank queries of the attention. cos, sin: its angles.
    """

    def turned(heads: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        if spec.interleaved:
            leading, others = jnp.split(heads, (2 * cos.shape[-1],), axis=-1)
            heads = jnp.concatenate((in_halves(leading), others), axis=-1)
        return rotate(heads, cos, sin)

    queries = linear(params["q"], low_rank, ops=ops).reshape(-1, spec.num_heads, spec.head_dim)
    keys = layer_norm(params["k_norm"], linear(params["k"], x, ops=ops), eps=spec.norm_eps)
    return Index(
        queries=turned(queries),
        weights=x.astype(jnp.float32) @ params["weights"]["kernel"],
        keys=turned(keys[:, None])[:, 0],
    )


def layer_norm(
    params: dict[str, jax.Array], x: Float[Array, "*b D"], *, eps: float
) -> Float[Array, "*b D"]:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * params["scale"] + params["bias"]).astype(x.dtype)
