"""A gated delta net around an `attend` function: projections, gates and the output's norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.layers.attention import take_kept
from jspec.layers.linear import Shard, linear
from jspec.layers.norm import norm
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.delta_net import DeltaNetSpec

# (inputs[T, C], decay f32[T, Hv], beta f32[T, Hv], convolution[W, C]) -> out f32[T, Hv, Dv]
AttendDelta = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def delta_net(
    params: dict[str, Any],
    x: Float[Array, "T I"],
    positions: Int[Array, "T"],
    attend: AttendDelta,
    *,
    spec: DeltaNetSpec,
    eps: float,
    shard: Shard,
    ops: Ops,
    kept: Int[Array, "R"] | None = None,
) -> Float[Array, "_ E"]:
    """Run one layer's projections around `attend`; arguments as in `attention.attention`.

    params: qkv gives the convolution's inputs; steps each head's step size, then its decay; gate
        the gate of each output; decay has the log of each head's rate, and a bias (dt_bias) added
        before softplus
    """
    del positions  # a recurrence needs none
    num_heads = spec.num_heads // shard.size
    step, rate = jnp.split(linear(params["steps"], x, ops=ops).astype(jnp.float32), 2, axis=-1)
    log_rate, dt_bias = (params["decay"][name].astype(jnp.float32) for name in ("log", "bias"))
    decay = -jnp.exp(log_rate) * jax.nn.softplus(rate + dt_bias)
    mixed = attend(
        linear(params["qkv"], x, ops=ops), decay, jax.nn.sigmoid(step), params["conv"]["kernel"]
    )
    mixed, x = take_kept(mixed, kept), take_kept(x, kept)
    gate = linear(params["gate"], x, ops=ops).astype(jnp.float32)
    normed = norm(params["norm"], mixed, eps=eps)
    heads = normed * jax.nn.silu(gate).reshape(-1, num_heads, spec.value_dim)
    flat = heads.reshape(heads.shape[0], -1).astype(x.dtype)
    return linear(params["out"], flat, ops=ops, reduce=shard)
