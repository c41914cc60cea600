"""Grouped-query attention around an `attend` function: the projections, without a cache.

The caller passes `attend(heads, rotation, sinks) -> out`: dense causal attention in training, paged
attention in serving. It applies head norms and RoPE, so that a kernel can fuse them with the write.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.linear import Shard, linear
from jspec.layers.rope import angles_of, grown
from jspec.pallas_kernels.add_norm.reference import rms_norm
from jspec.pallas_kernels.fp8_product.api import Activations, rearranged, values_of
from jspec.pallas_kernels.kv_write.api import HeadNorms, Rotation
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.attention import AttentionSpec

# (heads[*b, H + 2G, D], rotation, sinks[H] or None) -> out[*b, H, D], which may be Scaled
Attend = Callable[[jax.Array, Rotation, jax.Array | None], Any]


def attention(
    params: dict[str, Any],
    x: Activations,
    positions: Int[Array, "*b"],
    attend: Attend,
    *,
    spec: AttentionSpec,
    eps: float,
    shard: Shard,
    ops: Ops,
    kept: Int[Array, "R"] | None = None,
) -> Float[Array, "*r E"]:
    """Run the projections of one layer around `attend`. spec counts the heads of all shards.

    kept: the tokens of x [T, I] whose output is needed; `attend` gets K and V of all
    params: qkv has, per shard, the columns of q, then k, then v; q_norm and k_norm are for
        `attend`; gate (per shard the columns of its heads) gates the heads' output
    """
    heads, rotation = project(params, x, positions, spec=spec, eps=eps, shard=shard, ops=ops)
    mixed = attend(heads, rotation, params.get("sinks"))
    mixed, x = rearranged(mixed, partial(take_kept, kept=kept)), take_kept(values_of(x), kept)
    if spec.value_dim < spec.head_dim:
        mixed = rearranged(mixed, lambda values: values[..., : spec.value_dim])
    if "gate" in params:
        mixed = values_of(mixed)
        share = jax.nn.sigmoid(linear(params["gate"], x, ops=ops))
        mixed = mixed * share.reshape(*mixed.shape[:-1], -1)
    mixed = rearranged(mixed, lambda values: values.reshape(*x.shape[:-1], -1))
    return linear(params["out"], mixed, ops=ops, reduce=shard)


def project(
    params: dict[str, Any],
    x: Activations,
    positions: Int[Array, "*b"],
    *,
    spec: AttentionSpec,
    eps: float,
    shard: Shard,
    ops: Ops,
) -> tuple[Float[Array, "*b heads D"], Rotation]:
    """Return the heads of q, k and v, and the norms and RoPE that `attend` must apply.

    A kv_of layer has q heads alone, already normed. Norms that span heads are applied here: they
    sum over all shards.
    """
    num_heads = spec.num_heads // shard.size
    heads = _heads(linear(params["qkv"], x, ops=ops), num_heads=num_heads, spec=spec)
    if spec.v_norm and spec.kv_of is None:
        heads = _with_normed_v(heads, num_heads=num_heads, eps=eps)
    norms = None
    if spec.qk_norm and spec.norms_span_heads:
        heads = _normed_together(
            params, heads, num_heads=num_heads, spec=spec, eps=eps, shard=shard
        )
    elif spec.qk_norm and spec.kv_of is not None:  # queries alone
        heads = rms_norm(heads, params["q_norm"]["scale"], eps=eps)
    elif "q_norm" in params:
        norms = HeadNorms(q=params["q_norm"]["scale"], k=params["k_norm"]["scale"], eps=eps)
    if spec.growth is not None:
        q, kv = jnp.split(heads, (num_heads,), axis=-2)
        heads = jnp.concatenate((grown(q, positions, spec.growth), kv), axis=-2)
    cos, sin = angles_of(positions, head_dim=spec.rotary_dim or spec.head_dim, rope=spec.rope)
    return heads, Rotation(cos=cos, sin=sin, num_heads=num_heads, norms=norms)


def _normed_together(
    params: dict[str, Any],
    heads: Float[Array, "*b heads D"],
    *,
    num_heads: int,
    spec: AttentionSpec,
    eps: float,
    shard: Shard,
) -> Float[Array, "*b heads D"]:
    """Norm all of a token's q heads as one vector, and all of its k heads, over all shards."""
    q, k, v = jnp.split(heads, (num_heads, (heads.shape[-2] + num_heads) // 2), axis=-2)
    wide = [x.astype(jnp.float32) for x in (q, k)]
    squares = shard.sum(jnp.stack([jnp.sum(x * x, axis=(-2, -1)) for x in wide]))
    # A kv head that several shards repeat is counted once for each: in the sum and here.
    counts = [x.shape[-2] * x.shape[-1] * shard.size for x in wide]
    normed = [
        x
        * jax.lax.rsqrt(total / count + eps)[..., None, None]
        * params[name]["scale"].astype(jnp.float32).reshape(-1, spec.head_dim)
        for x, total, count, name in zip(wide, squares, counts, ("q_norm", "k_norm"), strict=True)
    ]
    return jnp.concatenate((*(x.astype(heads.dtype) for x in normed), v), axis=-2)


def _with_normed_v(
    heads: Float[Array, "*b heads D"], *, num_heads: int, eps: float
) -> Float[Array, "*b heads D"]:
    qk, v = jnp.split(heads, ((heads.shape[-2] + num_heads) // 2,), axis=-2)
    ones = jnp.ones(heads.shape[-1], jnp.float32)
    return jnp.concatenate((qk, rms_norm(v, ones, eps=eps)), axis=-2)


def take_kept(x: Float[Array, "..."], kept: Int[Array, "R"] | None) -> Float[Array, "..."]:
    return x if kept is None else jnp.take(x, kept, axis=0, mode="clip")


def _heads(
    projected: Float[Array, "*b O"], *, num_heads: int, spec: AttentionSpec
) -> Float[Array, "*b heads D"]:
    D, Dv = spec.head_dim, spec.value_dim
    if spec.k_is_v and spec.kv_of is None:
        k = projected[..., num_heads * D :]
        projected = jnp.concatenate((projected, k), axis=-1)
    if spec.v_dim is None and spec.value_scale == 1.0:
        return projected.reshape(*projected.shape[:-1], -1, D)
    num_kv = (projected.shape[-1] - num_heads * D) // (D + Dv)
    first_v = (num_heads + num_kv) * D
    qk = projected[..., :first_v].reshape(*projected.shape[:-1], -1, D)
    v = projected[..., first_v:].reshape(*projected.shape[:-1], num_kv, Dv)
    v = (v.astype(jnp.float32) * spec.value_scale).astype(v.dtype)
    v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, D - Dv)])
    return jnp.concatenate((qk, v), axis=-2)


def causal_attention(
    heads: Float[Array, "B T heads D"], rotation: Rotation, sinks: jax.Array | None = None
) -> Float[Array, "B T H D"]:
    """Dense causal attention as an `attend`, for references; float32 softmax, no sinks."""
    if sinks is not None:
        raise ValueError("dense causal attention has no sinks; expected None")
    q, k, v = rotate_and_split(heads, rotation)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)
