"""A mixture of experts (MoE): a router selects gated MLPs for every token and sums their outputs.

Shards have a part of each expert's inner columns, or some of the experts. All route all tokens
alike, and one all-reduce adds up the outputs. Data ranks that share the experts gather their tokens
first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.linear import Shard, logits_of
from jspec.layers.mlp import gated_mlp
from jspec.layers.norm import Residual, norm_of_sum
from jspec.pallas_kernels.experts.api import biases_of
from jspec.pallas_kernels.ops import Ops
from jspec.spec.axes import DATA, EXPERT
from jspec.spec.layers.feed_forward import DenseSpec, MoESpec, Routing


def route(
    params: dict[str, Any], x: Float[Array, "T E"], *, spec: MoESpec
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Return each token's experts, best first, and their f32 weights, times params["factors"]."""
    ids, weights = _chosen(params, x, spec=spec)
    if "factors" in params:
        weights = weights * jnp.take(params["factors"], ids, mode="clip")
    return ids, weights


def _chosen(
    params: dict[str, Any], x: Float[Array, "T E"], *, spec: MoESpec
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    if spec.has_router_bias:  # DeepSeek-V3's router; scores in float32
        logits = logits_of(x, params["kernel"])
        logits = logits + params["bias"] if "bias" in params else logits
        return _by_sigmoid(logits, params["router_bias"], spec=spec)
    logits = x @ params["kernel"]
    logits = (logits + params["bias"] if "bias" in params else logits).astype(jnp.float32)
    if spec.routing is Routing.TOP_THEN_SOFTMAX:
        top, ids = jax.lax.top_k(logits, spec.top_k)
        return ids, jax.nn.softmax(top, axis=-1)
    scores = within_groups(jax.nn.softmax(logits, axis=-1), spec=spec, num_best=1)
    weights, ids = jax.lax.top_k(scores, spec.top_k)
    if spec.routing is Routing.SOFTMAX_THEN_TOP_NORMALIZED:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return ids, weights if spec.weight_scale == 1.0 else weights * spec.weight_scale


def within_groups(
    scores: Float[Array, "T X"], *, spec: MoESpec, num_best: int
) -> Float[Array, "T X"]:
    """Set the scores outside of each token's best groups to -inf. A group is ranked by the sum of
    its num_best highest scores (DeepSeek-V2: 1, V3: 2)."""
    if spec.top_groups == spec.num_groups:
        return scores
    grouped = scores.reshape(-1, spec.num_groups, spec.num_experts // spec.num_groups)
    heights = jnp.sum(jax.lax.top_k(grouped, min(num_best, grouped.shape[-1]))[0], axis=-1)
    _, best = jax.lax.top_k(heights, spec.top_groups)
    is_best = jnp.any(best[:, :, None] == jnp.arange(spec.num_groups), axis=1)
    return jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def _by_sigmoid(
    logits: Float[Array, "T X"], router_bias: Float[Array, "X"], *, spec: MoESpec
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Select by score plus router bias, but weight by the score alone (DeepSeek-V3's router)."""
    scores = jax.nn.sigmoid(logits)
    heights = scores + router_bias.astype(jnp.float32)
    _, ids = jax.lax.top_k(within_groups(heights, spec=spec, num_best=2), spec.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1, mode="clip")
    if spec.routing is Routing.SIGMOID_THEN_TOP_NORMALIZED:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids, weights * spec.weight_scale


def moe(
    params: dict[str, Any],
    x: Float[Array, "T E"],
    *,
    spec: MoESpec,
    shard: Shard,
    ops: Ops,
    routed: Float[Array, "T E"] | None = None,
) -> Float[Array, "T E"]:
    """Run each token through its top_k experts, weighted, and through the shared expert if any.

    params: an ExpertUse under "use" counts tokens; placed experts need it. routed: the router's
    input, if not x.
    """
    ids, weights = route(params["router"], x if routed is None else routed, spec=spec)
    experts, physical = params["experts"], ids
    if "use" in params or spec.num_placed is not None:
        physical = params["use"].physical(ids, spec.num_experts)
    out = _sum_of_experts(x, physical, weights, experts, spec=spec, shard=shard, ops=ops)
    if "down_bias" in experts:  # once, after the all-reduce
        out = out + biases_of(experts["down_bias"], ids, weights).astype(out.dtype)
    if spec.shared is not None:
        out = out + _shared_output(params, x, spec.shared, shard=shard, ops=ops)
    return out


def _shared_output(
    params: dict[str, Any], x: Float[Array, "T E"], spec: DenseSpec, *, shard: Shard, ops: Ops
) -> Float[Array, "T E"]:
    out = gated_mlp(params["shared"], x, shard=shard, ops=ops, limit=spec.limit)
    is_gated = "shared_gate" in params
    return out * _share(params, x)[:, None].astype(out.dtype) if is_gated else out


def _share(params: dict[str, Any], x: Float[Array, "T E"]) -> Float[Array, "T"]:
    """Return the factor of a gated shared expert's output, by a sum: XLA for GPUs cannot compile a
    product of one token and one column."""
    gate = params["shared_gate"]["kernel"][:, 0].astype(jnp.float32)
    return jax.nn.sigmoid(jnp.sum(x * gate, axis=-1))


def _sum_of_experts(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: dict[str, Any],
    *,
    spec: MoESpec,
    shard: Shard,
    ops: Ops,
) -> Float[Array, "T E"]:
    if spec.shards == 1:
        return shard.sum(ops.experts(x, ids, weights, experts, gate=spec.gate))
    given = (x, ids, weights)
    if spec.data_shards > 1:
        given = tuple(jax.lax.all_gather(each, DATA, tiled=True) for each in given)
    every, ids, weights = given
    own = ids_on_shard(ids, spec)
    out = ops.experts(every, own, weights, experts, gate=spec.gate, shards=spec.shards)
    if spec.data_shards > 1:
        out = jax.lax.psum_scatter(out, DATA, tiled=True)
    return shard.sum(out).astype(x.dtype)


def ids_on_shard(ids: Int[Array, "T k"], spec: MoESpec) -> Int[Array, "T k"]:
    """Return ids among this shard's experts; ids of other shards become the number of its experts.

    In:  ids [[5 0] [2 3]] of 6 experts on the second of 3 shards, which has experts 2 and 3
    Out: [[2 2] [0 1]]
    """
    count = spec.num_physical // spec.shards
    axis = EXPERT if spec.data_shards == 1 else (DATA, EXPERT)
    own = ids - jax.lax.axis_index(axis) * count
    return jnp.where((own >= 0) & (own < count), own, count)


def moe_of_sum(
    params: dict[str, Any],
    post_norm: dict[str, jax.Array],
    stream: Residual,
    *,
    spec: MoESpec,
    eps: float,
    shard: Shard,
    ops: Ops,
) -> Residual:
    """Return the stream x + MoE(norm(x)) for the stream's sum x; the last add is left pending."""
    is_whole = shard.size == spec.shards == 1
    if is_whole and "use" not in params and isinstance(stream.delta, jax.Array):
        fused = ops.moe_of_sum(
            stream.x, stream.delta, post_norm["scale"], params, eps=eps, spec=spec
        )
        if fused is not None:
            x, normed, mixed = fused
            if mixed.has_shared and spec.shared_gate:
                weights = mixed.weights.at[:, -1].set(_share(params, normed), mode="drop")
                mixed = replace(mixed, weights=weights)
            elif spec.shared is not None and not mixed.has_shared:
                shared = _shared_output(params, normed, spec.shared, shard=shard, ops=ops)
                mixed = replace(mixed, shared=shared)
            return Residual(x=x, delta=mixed)
    x, normed = norm_of_sum(post_norm, stream, eps=eps, ops=ops)
    flat = normed.reshape(-1, normed.shape[-1])
    out = moe(params, flat, spec=spec, shard=shard, ops=ops)
    return Residual(x=x, delta=out.reshape(x.shape))
