"""One layer of a decoder over any `attend`: attention, then a dense or MoE feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jspec.device.weights import Weight
from jspec.layers.attention import attention, take_kept
from jspec.layers.delta_net import delta_net
from jspec.layers.latent_attention import latent_attention
from jspec.layers.linear import Shard
from jspec.layers.mlp import gated_mlp
from jspec.layers.moe import moe, moe_of_sum
from jspec.layers.norm import Residual, norm_for
from jspec.layers.sandwich import run_sandwich
from jspec.pallas_kernels.fp8_product.api import Activations, values_of
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.attention import AttentionSpec, LatentAttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import LayerSpec, Mixer
from jspec.spec.sandwich import SandwichSpec

Params = dict[str, Any]

MIXERS: Mapping[type[Mixer], Callable[..., jax.Array]] = {
    AttentionSpec: attention,
    LatentAttentionSpec: latent_attention,
    DeltaNetSpec: delta_net,
}


@dataclass(frozen=True, slots=True)
class LayerSettings:
    ops: Ops
    shard: Shard = field(default_factory=Shard)
    queries_per_row: int | None = None  # None: packed prefill chunks


def run_layer(
    params: Params,
    stream: Residual,
    positions: Int[Array, "*b"],
    attend: Callable[..., Any],
    *,
    spec: LayerSpec,
    settings: LayerSettings,
    kept: Int[Array, "R"] | None = None,
    token_input: Float[Array, "T P"] | None = None,
) -> Residual:
    """Apply x + attention(norm(x)), then x + ffn(norm(x)); the last add is left pending.

    kept: the tokens whose output is needed; others stop after K and V. token_input: of a
    SandwichSpec layer.
    """
    if isinstance(spec, SandwichSpec):
        shard = settings.shard.of_layer(params)
        own: dict[str, Any] = {"spec": spec, "shard": shard, "ops": settings.ops}
        return run_sandwich(
            params, stream, positions, attend, **own, kept=kept, token_input=token_input
        )
    is_plain = isinstance(spec.attention, AttentionSpec)
    reader = kernel_of(params["attention"], "qkv") if is_plain else None
    x, normed = norm_for(reader, params["input_norm"], stream, eps=spec.eps, ops=settings.ops)
    return run_sublayers(
        params, x, normed, positions, attend, spec=spec, settings=settings, kept=kept
    )


def run_sublayers(
    params: Params,
    x: Float[Array, "*b E"],
    read: Activations,
    positions: Int[Array, "*b"],
    attend: Callable[..., Any],
    *,
    spec: LayerSpec,
    settings: LayerSettings,
    kept: Int[Array, "R"] | None = None,
) -> Residual:
    """Apply x + attention(read), then x + ffn(norm(x)), as `run_layer` does."""
    ops = settings.ops
    shard = settings.shard.of_layer(params, defers=True)
    mixed = MIXERS[type(spec.attention)](
        params["attention"],
        read,
        positions,
        attend,
        spec=spec.attention,
        eps=spec.eps,
        shard=shard,
        ops=ops,
        kept=kept,
    )
    stream = Residual(x=take_kept(x, kept), delta=mixed)
    if isinstance(spec.ffn, MoESpec):
        return moe_of_sum(
            params["moe"],
            params["post_norm"],
            stream,
            spec=spec.ffn,
            eps=spec.eps,
            shard=settings.shard.of_layer(params),
            ops=ops,
        )
    reader = kernel_of(params["mlp"], "gate_up")
    x, normed = norm_for(reader, params["post_norm"], stream, eps=spec.eps, ops=ops)
    settings = replace(settings, shard=shard)
    return Residual(x=x, delta=feed_forward(params, normed, spec=spec, settings=settings))


def kernel_of(params: Params, name: str) -> Weight | None:
    kernel: Weight | None = params.get(name, {}).get("kernel")
    return kernel


def feed_forward(
    params: Params, x: Activations, *, spec: LayerSpec, settings: LayerSettings
) -> Float[Array, "*b E"]:
    ops, shard = settings.ops, settings.shard
    if isinstance(spec.ffn, MoESpec):
        x = values_of(x)
        flat = x.reshape(-1, x.shape[-1])
        return moe(params["moe"], flat, spec=spec.ffn, shard=shard, ops=ops).reshape(x.shape)
    return gated_mlp(
        params["mlp"],
        x,
        shard=shard,
        ops=ops,
        of_prompts=settings.queries_per_row is None,
        limit=spec.ffn.limit,
        gelu=spec.ffn.gelu,
    )
