"""A mixture of gated MLPs: a router picks experts for every token, their results are summed.

Each expert's weights meet all of its tokens in one grouped product (`Ops.experts`). Under tensor
parallelism every shard holds a share of each expert's inner columns, and one sum over the shards
follows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.linear import Shard, linear, logits_of
from jspec.layers.mlp import gated_mlp
from jspec.layers.norm import Residual, norm_of_sum
from jspec.pallas_kernels.experts.mixed import biases_of
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import MoESpec, Routing


def route(
    params: dict[str, Any], x: Float[Array, "T E"], *, spec: MoESpec
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """(experts of each token, best first; their weights in float32)."""
    if spec.has_correction:  # as DeepSeek-V3's, scored in float32
        logits = logits_of(x, params["kernel"])
        logits = logits + params["bias"] if "bias" in params else logits
        return _by_sigmoid(logits, params["correction"], spec=spec)
    logits = linear(params, x).astype(jnp.float32)
    if spec.routing is Routing.TOP_THEN_SOFTMAX:
        top, ids = jax.lax.top_k(logits, spec.top_k)
        return ids, jax.nn.softmax(top, axis=-1)
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), spec.top_k)
    if spec.routing is Routing.SOFTMAX_THEN_TOP_NORMALIZED:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return ids, weights


def _by_sigmoid(
    logits: Float[Array, "T X"], correction: Float[Array, "X"], *, spec: MoESpec
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Chosen by score plus correction, weighted by the score alone (DeepSeek-V3's router)."""
    scores = jax.nn.sigmoid(logits)
    _, ids = jax.lax.top_k(scores + correction.astype(jnp.float32), spec.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1, mode="clip")
    if spec.routing is Routing.SIGMOID_THEN_TOP_NORMALIZED:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids, weights * spec.weight_scale


def mixture(
    params: dict[str, Any], x: Float[Array, "T E"], *, spec: MoESpec, shard: Shard, ops: Ops
) -> Float[Array, "T E"]:
    """Each token through its top_k experts, weighted, and through the shared one if there is one.

    params: router, experts, shared.
    """
    ids, weights = route(params["router"], x, spec=spec)
    experts = params["experts"]
    out = shard.sum(ops.experts(x, ids, weights, experts, gate=spec.gate))
    if "down_bias" in experts:  # once, after the sum over the shards
        out = out + biases_of(experts["down_bias"], ids, weights).astype(out.dtype)
    if spec.shared is not None:
        limit = spec.shared.limit
        out = out + gated_mlp(params["shared"], x, shard=shard, ops=ops, limit=limit)
    return out


def mixture_of_sum(
    params: dict[str, Any],
    post_norm: dict[str, jax.Array],
    stream: Residual,
    *,
    spec: MoESpec,
    eps: float,
    shard: Shard,
    ops: Ops,
) -> Residual:
    """x + mixture(norm(x)) of the stream's sum x, the last sum left to whoever is next."""
    if shard.size == 1 and spec.shared is None and isinstance(stream.delta, jax.Array):
        fused = ops.mixture_of_sum(
            stream.x, stream.delta, post_norm["scale"], params, eps=eps, spec=spec
        )
        if fused is not None:
            return Residual(x=fused[0], delta=fused[1])
    x, normed = norm_of_sum(post_norm, stream, eps=eps, ops=ops)
    flat = normed.reshape(-1, normed.shape[-1])
    out = mixture(params, flat, spec=spec, shard=shard, ops=ops)
    return Residual(x=x, delta=out.reshape(x.shape))
