"""Grouped-query attention around a pluggable `attend`: projections and RoPE, no cache.

The caller passes `attend(q, k, v) -> out`. Training passes dense causal attention, a step passes
paged attention over its pool; the layer cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.core.config import TransformerConfig
from jspec.layers.linear import Linear, Shard
from jspec.layers.rope import apply_rope

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def kv_heads_per_shard(num_kv_heads: int, shard: Shard) -> int:
    """G of one shard; heads are replicated when there are more shards than heads."""
    return max(num_kv_heads // shard.size, 1)


class Attention(nnx.Module):
    """qkv holds, shard by shard, the columns of q, then k, then v.

    in_size is E, or 2E in an EAGLE-3 head's first layer. Shapes below are one shard's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        in_size: int,
        shard: Shard,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.num_heads = config.num_heads // shard.size
        self.num_kv_heads = kv_heads_per_shard(config.num_kv_heads, shard)
        self.head_dim = config.head_dim
        self.rope = config.rope
        columns = (self.num_heads + 2 * self.num_kv_heads) * config.head_dim * shard.size
        rows = config.num_heads * config.head_dim
        self.qkv = Linear(in_size, columns, dtype=dtype, rngs=rngs, bias=config.attention_bias)
        self.out = Linear(rows, config.hidden_size, dtype=dtype, rngs=rngs, reduce=shard)

    def __call__(
        self, x: Float[Array, "*b I"], positions: Int[Array, "*b"], attend: Attend
    ) -> Float[Array, "*b E"]:
        heads = self.qkv(x).reshape(*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            heads[..., : self.num_heads, :],
            heads[..., self.num_heads : self.num_heads + self.num_kv_heads, :],
            heads[..., self.num_heads + self.num_kv_heads :, :],
        )
        q = apply_rope(q, positions, rope=self.rope)
        k = apply_rope(k, positions, rope=self.rope)
        mixed = attend(q, k, v)
        return self.out(mixed.reshape(*x.shape[:-1], -1))


def causal_attention(
    q: Float[Array, "B T H D"], k: Float[Array, "B T G D"], v: Float[Array, "B T G D"]
) -> Float[Array, "B T H D"]:
    """Dense causal attention for training and references; softmax in float32."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)
