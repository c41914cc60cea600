"""A layer with a norm before and after each sub-layer (Gemma 4), and its per-layer embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.attention import Attend, attention, take_kept
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, linear
from jspec.layers.mlp import gated_mlp
from jspec.layers.moe import moe
from jspec.layers.norm import Residual, norm, norm_of_sum
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import LayerSpec
from jspec.spec.sandwich import SandwichSpec


def run_sandwich(
    params: dict[str, Any],
    stream: Residual,
    positions: Int[Array, "T"],
    attend: Attend,
    *,
    spec: SandwichSpec,
    shard: Shard,
    ops: Ops,
    kept: Int[Array, "R"] | None = None,
    token_input: Float[Array, "T P"] | None = None,
) -> Residual:
    """Apply the layer; arguments as in `layer.run_layer`. token_input: see `token_inputs`."""
    eps = spec.eps
    x, normed = norm_of_sum(params["input_norm"], stream, eps=eps, ops=ops)
    mixed = attention(
        params["attention"],
        normed,
        positions,
        attend,
        spec=spec.softmax_attention,
        eps=eps,
        shard=shard,
        ops=ops,
        kept=kept,
    )
    x = take_kept(x, kept) + norm(params["attention_norm"], mixed, eps=eps)
    inner = _feed_forward(params, x, spec=spec, shard=shard, ops=ops)
    x = x + norm(params["ffn_norm"], inner, eps=eps)
    if token_input is not None:
        gate = jax.nn.gelu(linear(params["token_gate"], x, ops=ops), approximate=True)
        own = linear(params["token_out"], gate * take_kept(token_input, kept), ops=ops)
        x = x + norm(params["token_norm"], own, eps=eps)
    return Residual(x=x * params["factor"].astype(x.dtype))


def _feed_forward(
    params: dict[str, Any], x: Float[Array, "T E"], *, spec: SandwichSpec, shard: Shard, ops: Ops
) -> Float[Array, "T E"]:
    normed = norm(params["post_norm"], x, eps=spec.eps)
    inner = gated_mlp(params["mlp"], normed, shard=shard, ops=ops, gelu=True)
    if spec.experts is None:
        return inner
    router = params["moe"]["router"]
    found = moe(
        params["moe"],
        norm(params["experts_norm"], x, eps=spec.eps),
        spec=spec.experts,
        shard=shard,
        ops=ops,
        routed=norm(router, x, eps=spec.eps) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype),
    )
    outputs = ((params["mlp_out_norm"], inner), (params["experts_out_norm"], found))
    first, second = (norm(own, each, eps=spec.eps) for own, each in outputs)
    return first + second


def token_inputs(
    params: Mapping[str, Any],
    token_ids: Int[Array, "T"],
    x: Float[Array, "T E"],
    *,
    num_layers: int,
    eps: float,
    ops: Ops,
) -> Float[Array, "T L P"]:
    """Return each layer's input for each token, from its id and from its embedding x. params: table
    [V, L * P], project (applied to x), and the norm of the projection."""
    shape = (*token_ids.shape, num_layers, -1)
    own = embed({"table": params["table"]}, token_ids).reshape(shape)
    scaled = own * jnp.asarray(own.shape[-1] ** 0.5, own.dtype)
    seen = linear(params["project"], x, ops=ops) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    seen = norm(params["norm"], seen.reshape(shape), eps=eps)
    return (seen + scaled) * jnp.asarray(2**-0.5, x.dtype)


def with_cache_scales(layers: Mapping[Any, Any], i: int, spec: LayerSpec) -> dict[str, Any]:
    """Return a layer's params with the scales of the cache that it reads, its own or another's."""
    params: dict[str, Any] = layers[i]
    if spec.attention.kv_of is None:
        return params
    source = layers[spec.attention.kv_of]["attention"]
    scales = {name: source[name] for name in ("k_scale", "v_scale") if name in source}
    return {**params, "attention": {**params["attention"], **scales}}
