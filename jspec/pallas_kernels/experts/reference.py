"""MoE experts with XLA's ragged product: the reference of the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.weights import dense
from jspec.spec.model_spec import Gate

CLAMP, SLOPE = 7.0, 1.702  # gpt-oss; Step-3.5-Flash uses CLAMP, too


def run_experts(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    params: dict[str, Any],
    *,
    gate: Gate,
) -> Float[Array, "T E"]:
    """Return sum_j weights[t, j] * expert_{ids[t, j]}(x[t]), without the bias of `down`.

    params: gate_up [X, E, 2I], down [X, I, E] and optionally gate_up_bias [X, 2I]; packed weights
    are unpacked first. The (token, expert) pairs are sorted by expert, stably, so that equal
    experts are contiguous:

        ids [[2 0] [0 1]]  ->  pairs in the order 1 2 3 0, group sizes [2 1 1]

    The sum over j is in float32, in the order of j.
    """
    down, gate_up = (dense(params[name], x.dtype) for name in ("down", "gate_up"))
    num_tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=gate_up.shape[0]).astype(jnp.int32)
    rows = jnp.take(x, order // top_k, axis=0, mode="clip")
    wide = jax.lax.ragged_dot(rows, gate_up, sizes)
    if "gate_up_bias" in params:
        wide = wide + jnp.take(params["gate_up_bias"], flat[order], axis=0, mode="clip")
    inner = gated(*jnp.split(wide, 2, axis=-1), gate=gate)
    out = jax.lax.ragged_dot(inner, down, sizes)
    back = jnp.take(out, jnp.argsort(order), axis=0, mode="clip")
    back = back.reshape(num_tokens, top_k, -1).astype(jnp.float32)
    return jnp.sum(back * weights[..., None], axis=1).astype(x.dtype)


def gated(
    first: Float[Array, "*b I"], up: Float[Array, "*b I"], *, gate: Gate
) -> Float[Array, "*b I"]:
    """Apply an expert's activation to its gate and up columns."""
    if gate is Gate.SILU:
        return jax.nn.silu(first) * up
    if gate is Gate.SILU_WITHIN_7:
        return jnp.minimum(jax.nn.silu(first), CLAMP) * jnp.clip(up, -CLAMP, CLAMP)
    first = jnp.minimum(first, CLAMP)
    up = jnp.clip(up, -CLAMP, CLAMP)
    return (up + 1) * (first * jax.nn.sigmoid(SLOPE * first))
