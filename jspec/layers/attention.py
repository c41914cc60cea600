"""Grouped-query attention around a pluggable `attend`: the projections, no cache.

The caller passes `attend(heads, rotation) -> out`. Training passes dense causal attention, a step
passes paged attention over its pool; the layer cannot tell them apart. Heads are handed over as
the projection leaves them, with the rotation still to come, so that an attend may fuse RoPE with
the writing of K and V; who wants q, k and v apart calls `rotate_and_split`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.core.config import TransformerConfig
from jspec.layers.linear import Linear, Shard
from jspec.layers.rope import angles_of, rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What is still to be done to heads[*b, H + 2G, D]: q, then k, then v, none rotated yet."""

    cos: jax.Array  # f32[*b, D/2]
    sin: jax.Array  # f32[*b, D/2]
    num_heads: int = field(metadata={"static": True})  # H


# (heads[*b, H + 2G, D], rotation) -> out[*b, H, D]
Attend = Callable[[jax.Array, Rotation], jax.Array]


def rotate_and_split(
    heads: Float[Array, "*b heads D"], rotation: Rotation
) -> tuple[Float[Array, "*b H D"], Float[Array, "*b G D"], Float[Array, "*b G D"]]:
    """(q rotated, k rotated, v)."""
    first_k = rotation.num_heads
    first_v = (heads.shape[-2] + first_k) // 2
    q, k, v = jnp.split(heads, (first_k, first_v), axis=-2)
    return rotate(q, rotation.cos, rotation.sin), rotate(k, rotation.cos, rotation.sin), v


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
        cos, sin = angles_of(positions, head_dim=self.head_dim, rope=self.rope)
        mixed = attend(heads, Rotation(cos=cos, sin=sin, num_heads=self.num_heads))
        return self.out(mixed.reshape(*x.shape[:-1], -1))


def causal_attention(
    heads: Float[Array, "B T heads D"], rotation: Rotation
) -> Float[Array, "B T H D"]:
    """Dense causal attention as an attend, for references; softmax in float32."""
    q, k, v = rotate_and_split(heads, rotation)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)
