"""The last sum of an MoE layer fused with the following norm on an NVIDIA GPU (Triton)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from jspec.pallas_kernels.add_norm.gpu import MAX_WARPS, num_warps
from jspec.pallas_kernels.experts.api import Mixed

SUM_WARPS = 4  # times the warps of a norm alone


def mixed_norm(
    x: Float[Array, "T E"],
    mixed: Mixed,
    scale: Float[Array, "E"],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """Return (x + mixed.sum(), its RMSNorm times scale), rounded like add_norm. T > 0."""
    num_tokens, size = x.shape
    width = pl.next_power_of_2(size)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    operands = [x, mixed.rows, mixed.weights, mixed.ids, scale]
    parts = {"place": mixed.place, "bias": mixed.bias, "shared": mixed.shared}
    parts = {name: part for name, part in parts.items() if part is not None}
    total, normed = pl.pallas_call(
        functools.partial(_mixed_norm, eps=eps, width=width, names=tuple(parts)),
        grid=(num_tokens,),
        out_shape=(out, out),
        # A thread holds a part of top_k rows: with more threads, all loads are in flight at once.
        compiler_params=plt.CompilerParams(
            num_warps=min(SUM_WARPS * num_warps(width), MAX_WARPS), num_stages=1
        ),
        interpret=interpret,
        name="experts_sum_norm",
    )(*operands, *parts.values())
    return total, normed


def _mixed_norm(
    x_ref: Any,
    rows_ref: Any,
    weights_ref: Any,
    ids_ref: Any,
    scale_ref: Any,
    *rest: Any,
    eps: float,
    width: int,
    names: tuple[str, ...],
) -> None:
    *optional, total_ref, normed_ref = rest
    given = dict(zip(names, optional, strict=True))
    top_k, size = ids_ref.shape[1], scale_ref.shape[0]
    token, column = pl.program_id(0), jnp.arange(width, dtype=jnp.int32)
    mask = column < size

    def load(ref: Any) -> jax.Array:
        return plt.load(ref, mask=mask, other=0.0)

    def weighted(row: Any, ref: Any) -> jax.Array:
        places = [token * 0 + j for j in range(top_k)]  # jax 0.10 cannot interpret constants here
        parts = [
            load(ref.at[row(j), column]).astype(jnp.float32) * plt.load(weights_ref.at[token, j])
            for j in places
        ]
        return functools.reduce(jnp.add, parts).astype(x_ref.dtype)

    x, scale = load(x_ref.at[token, column]), load(scale_ref.at[column])

    def row_of(j: Any) -> Any:
        pair = token * top_k + j
        return plt.load(given["place"].at[pair]) if "place" in given else pair

    delta = weighted(row_of, rows_ref)
    if "bias" in given:
        delta = delta + weighted(lambda j: plt.load(ids_ref.at[token, j]), given["bias"])
    if "shared" in given:
        delta = delta + load(given["shared"].at[token, column])
    total = x + delta
    plt.store(total_ref.at[token, column], total, mask=mask)
    wide = total.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(wide * wide) / size + eps)
    normed = wide * factor * scale.astype(jnp.float32)
    plt.store(normed_ref.at[token, column], normed.astype(total.dtype), mask=mask)
