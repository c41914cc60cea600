"""MoE experts with XLA's ragged product, and the blocks of pairs: the reference of the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.device.weights import PACKED, dense
from jspec.pallas_kernels.experts.api import ExpertBlocks, Mixed, num_blocks
from jspec.pallas_kernels.gated_mlp.reference import gated as silu_gated
from jspec.spec.layers.feed_forward import Gate

PRODUCTS = ("gate_up", "down")  # the weights of an expert
CLAMP, SLOPE = 7.0, 1.702  # gpt-oss; Step-3.5-Flash uses CLAMP, too


def run_experts(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    params: dict[str, Any],
    *,
    gate: Gate,
    shards: int = 1,
) -> Float[Array, "T E"]:
    """Return sum_j weights[t, j] * expert_{ids[t, j]}(x[t]), without the bias of `down`.

    params: gate_up [X, E, 2I], down [X, I, E] and optionally gate_up_bias [X, 2I]; packed weights
        are unpacked first
    shards: the number of shards of the experts, of which params has one. With several, the id X
        stands for an expert of another shard, whose term is 0, and the sum stays in float32

    Pairs are sorted by expert, stably. The sum over j is in float32, in the order of j.
    """
    x, params = unpacked(x, params)
    down, gate_up = params["down"], params["gate_up"]
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
    if shards > 1:
        return Mixed(rows=back, weights=weights, ids=ids).own_sum(gate_up.shape[0])
    back = back.reshape(num_tokens, top_k, -1).astype(jnp.float32)
    return jnp.sum(back * weights[..., None], axis=1).astype(x.dtype)


def unpacked(
    x: Float[Array, "T E"], params: dict[str, Any]
) -> tuple[Float[Array, "T E"], dict[str, Any]]:
    """Return (x, params with weights unpacked to x's dtype).

    The barrier lets weights be unpacked only once x is known. Otherwise XLA unpacks several layers
    before it uses the first, and unpacks all layers of a loop in front of it.
    """
    packed = {name: params[name] for name in PRODUCTS if isinstance(params[name], PACKED)}
    if not packed:
        return x, params
    x, packed = jax.lax.optimization_barrier((x, packed))
    return x, params | {name: dense(weight, x.dtype) for name, weight in packed.items()}


def gated(
    first: Float[Array, "*b I"], up: Float[Array, "*b I"], *, gate: Gate
) -> Float[Array, "*b I"]:
    if gate is Gate.GELU:
        return jax.nn.gelu(first, approximate=True) * up
    if gate is not Gate.CLAMPED:
        return silu_gated(first, up, limit=CLAMP if gate is Gate.SILU_WITHIN_7 else None)
    first = jnp.minimum(first, CLAMP)
    up = jnp.clip(up, -CLAMP, CLAMP)
    return (up + 1) * (first * jax.nn.sigmoid(SLOPE * first))


def blocks_of(ids: Int[Array, "T k"], *, num_experts: int, tile_m: int) -> ExpertBlocks:
    """Sort the pairs by expert, stably, and assign them to blocks. Raises ValueError for 0 pairs.

    Pairs with the id num_experts, of another shard, are in no block, and their place is
    unspecified. Blocks without pairs have the last block's expert, and padding rows some pair's
    token.

    In:  ids [[2 0] [0 1]], tile_m 2 (pairs are 0: (0, 2), 1: (0, 0), 2: (1, 0), 3: (1, 1))
    Out: expert [0 1 2], num_pairs [2 1 1], token [0 1 | 1 . | 0 .], place [4 0 1 2]
    """
    flat = ids.reshape(-1)
    total = flat.shape[0]
    num = num_blocks(total, num_experts, tile_m)
    each = jnp.arange(num_experts, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.sum(flat[:, None] == each, axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(sizes) - sizes  # start of an expert's pairs in `order`
    needed = (sizes + tile_m - 1) // tile_m
    ends = jnp.cumsum(needed)
    first_block = ends - needed

    block = jnp.arange(num, dtype=jnp.int32)
    used = jnp.minimum(block, ends[-1] - 1)
    expert = jnp.sum(used[:, None] >= ends, axis=1, dtype=jnp.int32)
    ahead = (used - first_block[expert]) * tile_m  # pairs of its expert in the blocks before
    left = jnp.clip(sizes[expert] - ahead, 0, tile_m)
    sorted_row = (starts[expert] + ahead)[:, None] + jnp.arange(tile_m, dtype=jnp.int32)
    pair = jnp.take(order, sorted_row.reshape(-1), mode="clip")

    rank = jnp.arange(total, dtype=jnp.int32)
    of_pair = flat[order]
    row = first_block[of_pair] * tile_m + rank - starts[of_pair]
    place = jnp.zeros_like(rank).at[order].set(row, mode="drop", unique_indices=True)
    return ExpertBlocks(
        tile_m=tile_m,
        expert=expert,
        num_pairs=jnp.where(block < ends[-1], left, 0),
        token=pair // ids.shape[1],
        place=place,
        num_used=ends[-1],
    )
