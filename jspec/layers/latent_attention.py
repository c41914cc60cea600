"""Multi-head latent attention (MLA, DeepSeek-V2) around an `attend` function, in absorbed form:
queries are projected into the latent space before `attend`, and its outputs out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.attention import take_kept
from jspec.layers.indexer import index_of
from jspec.layers.linear import Shard, linear
from jspec.layers.norm import norm
from jspec.layers.rope import angles_of, grown, in_halves
from jspec.pallas_kernels.kv_write.reference import rotate
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.attention import LatentAttentionSpec

# (queries[T, H, rank + rope], records[T, rank + rope]) -> out[T, H, rank or more]; with an indexer
# also `index=Index(...)`
AttendLatent = Callable[..., jax.Array]


def latent_attention(
    params: dict[str, Any],
    x: Float[Array, "T I"],
    positions: Int[Array, "T"],
    attend: AttendLatent,
    *,
    spec: LatentAttentionSpec,
    eps: float,
    shard: Shard,
    ops: Ops,
    kept: Int[Array, "R"] | None = None,
) -> Float[Array, "_ E"]:
    """Run one layer's projections around `attend`; arguments as in `attention.attention`.

    params: kv_a gives the latent and the shared part of K; k_up and v_up have the columns of each
        head. q reads x, or with q_a the normed output of q_a
    eps: unused; the low-rank norms have their own
    """
    del eps
    rank, cos_sin = spec.kv_rank, angles_of(positions, head_dim=spec.rope_dim, rope=spec.rope)
    if spec.indexer is not None:
        low_rank = _low_rank(params, x, spec=spec, ops=ops)
        found = _inputs(params, x, low_rank, positions, *cos_sin, spec=spec, shard=shard, ops=ops)
        own: Any = {"spec": spec.indexer, "ops": ops}
        index = index_of(params["indexer"], x, low_rank, *cos_sin, **own)
        mixed = attend(*found, index=index)
    else:
        given = ops.latent_inputs(params, x, *cos_sin, spec=spec)
        if given is None:
            low_rank = _low_rank(params, x, spec=spec, ops=ops)
            given = _inputs(
                params, x, low_rank, positions, *cos_sin, spec=spec, shard=shard, ops=ops
            )
        mixed = attend(*given)
    mixed = take_kept(mixed, kept)[..., :rank]
    heads = ops.latent_outputs(params, mixed, spec=spec)
    if heads is None:
        v_up = params["v_up"]["kernel"].reshape(rank, -1, spec.value_dim)
        heads = jnp.einsum("thr,rhv->thv", mixed, v_up).reshape(mixed.shape[0], -1)
    return linear(params["out"], heads, ops=ops, reduce=shard)


def _low_rank(
    params: dict[str, Any], x: Float[Array, "T I"], *, spec: LatentAttentionSpec, ops: Ops
) -> Float[Array, "T R"]:
    """Return what queries are projected from: x itself without a low-rank projection."""
    if "q_a" not in params:
        return x
    return norm(params["q_a_norm"], linear(params["q_a"], x, ops=ops), eps=spec.norm_eps)


def _inputs(
    params: dict[str, Any],
    x: Float[Array, "T I"],
    low_rank: Float[Array, "T R"],
    positions: Int[Array, "T"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    *,
    spec: LatentAttentionSpec,
    shard: Shard,
    ops: Ops,
) -> tuple[Float[Array, "T H D"], Float[Array, "T D"]]:
    """Return the absorbed queries and the tokens' records, which `attend` reads."""
    num_heads, rank = spec.num_heads // shard.size, spec.kv_rank
    queries = linear(params["q"], low_rank, ops=ops).reshape(-1, num_heads, spec.head_dim)
    queries = grown(queries, positions, spec.growth)
    latent, shared = jnp.split(linear(params["kv_a"], x, ops=ops), (rank,), axis=-1)
    latent = norm(params["kv_a_norm"], latent, eps=spec.norm_eps)
    plain, turned = jnp.split(queries, (spec.nope_dim,), axis=-1)
    if spec.interleaved:
        turned, shared = in_halves(turned), in_halves(shared)
    k_up = params["k_up"]["kernel"].reshape(rank, num_heads, spec.nope_dim)
    absorbed = jnp.einsum("thd,rhd->thr", plain, k_up)
    return (
        jnp.concatenate((absorbed, rotate(turned, cos, sin)), axis=-1),
        jnp.concatenate((latent, rotate(shared[:, None], cos, sin)[:, 0]), axis=-1),
    )
