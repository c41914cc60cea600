"""MoE routing on an NVIDIA GPU (Triton): router product, top-k, weights; for few tokens the norm.

The product is split along the inputs, and `choose` sums the shares. The best expert is taken k
times, and the lower index wins ties, as in lax.top_k: the ids are k distinct experts, even if
logits are not finite. Rounding is that of XLA; weights and a sigmoid's logits are in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jspec.spec.layers.feed_forward import MoESpec, Routing

SLICE = 256  # inputs of the router per program
TILE = 16  # experts per program: 32 bytes of a row of weights
MANY_TOKENS, MANY_EXPERTS, MANY_DEEP = 32, 64, 64  # tile of `score`, inputs per iteration
PROGRAMS = 132  # least programs of `score`, unless slices were shorter than SLICE
LOWEST = -(2**31)
HIGHEST = 2**31 - 1


def norm_and_score(
    x: Float[Array, "T E"],
    delta: Float[Array, "T E"],
    scale: Float[Array, "E"],
    router: Float[Array, "E X"],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"], Float[Array, "S T X"]]:
    """Return (x + delta, its RMSNorm times scale, S f32 shares of the logits without bias)."""
    (num_tokens, size), num_experts = x.shape, router.shape[1]
    num_shares = pl.cdiv(size, SLICE)
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed, shares = pl.pallas_call(
        functools.partial(_norm_and_score, eps=eps, width=pl.next_power_of_2(size)),
        grid=(num_tokens, pl.cdiv(num_experts, TILE), num_shares),
        out_shape=(
            row,
            row,
            jax.ShapeDtypeStruct((num_shares, num_tokens, num_experts), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="experts_score",
    )(x, delta, scale, router)
    return total, normed, shares


def _norm_and_score(
    x_ref: Any,
    delta_ref: Any,
    scale_ref: Any,
    router_ref: Any,
    total_ref: Any,
    normed_ref: Any,
    shares_ref: Any,
    *,
    eps: float,
    width: int,
) -> None:
    size, num_experts = router_ref.shape
    token, tile, share = (pl.program_id(axis) for axis in range(3))
    at = share * SLICE + jnp.arange(SLICE, dtype=jnp.int32)
    expert = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
    inside, is_expert = at < size, expert < num_experts
    weights = plt.load(
        router_ref.at[at[:, None], expert[None]],
        mask=inside[:, None] & is_expert[None],
        other=0.0,
    )
    column = jnp.arange(width, dtype=jnp.int32)

    def summed(where: jax.Array, mask: jax.Array) -> jax.Array:
        parts = [plt.load(ref.at[token, where], mask=mask, other=0.0) for ref in (x_ref, delta_ref)]
        return parts[0] + parts[1]

    wide = summed(column, column < size).astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(wide * wide) / size + eps)
    total = summed(at, inside)
    scale = plt.load(scale_ref.at[at], mask=inside, other=0.0).astype(jnp.float32)
    normed = (total.astype(jnp.float32) * factor * scale).astype(total.dtype)

    @pl.when(tile == 0)
    def _() -> None:
        plt.store(total_ref.at[token, at], total, mask=inside)
        plt.store(normed_ref.at[token, at], normed, mask=inside)

    products = normed.astype(jnp.float32)[:, None] * weights.astype(jnp.float32)
    plt.store(shares_ref.at[share, token, expert], jnp.sum(products, axis=0), mask=is_expert)


def score(
    x: Float[Array, "T E"], router: Float[Array, "E X"], *, interpret: bool = False
) -> Float[Array, "S T X"]:
    """Return f32 shares of the logits x @ router, T > 0; XLA uses too few programs for it."""
    (num_tokens, size), num_experts = x.shape, router.shape[1]
    tiles = pl.cdiv(num_tokens, MANY_TOKENS), pl.cdiv(num_experts, MANY_EXPERTS)
    most = max(1, min(pl.cdiv(PROGRAMS, tiles[0] * tiles[1]), size // SLICE))
    depth = pl.cdiv(pl.cdiv(size, most), MANY_DEEP) * MANY_DEEP
    num_shares = pl.cdiv(size, depth)
    shares: jax.Array = pl.pallas_call(
        functools.partial(_score, depth=depth),
        grid=(*tiles, num_shares),
        out_shape=jax.ShapeDtypeStruct((num_shares, num_tokens, num_experts), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="experts_score_many",
    )(x, router)
    return shares


def _score(x_ref: Any, router_ref: Any, shares_ref: Any, *, depth: int) -> None:
    (num_tokens, size), num_experts = x_ref.shape, router_ref.shape[1]
    share = pl.program_id(2)
    token = pl.program_id(0) * MANY_TOKENS + jnp.arange(MANY_TOKENS, dtype=jnp.int32)
    expert = pl.program_id(1) * MANY_EXPERTS + jnp.arange(MANY_EXPERTS, dtype=jnp.int32)
    is_token, is_expert = token < num_tokens, expert < num_experts
    step = jnp.arange(MANY_DEEP, dtype=jnp.int32)

    def add(k: jax.Array, total: jax.Array) -> jax.Array:
        at = share * depth + k * MANY_DEEP + step
        inside = at < size
        left = plt.load(
            x_ref.at[token[:, None], at[None]], mask=is_token[:, None] & inside[None], other=0.0
        )
        right = plt.load(
            router_ref.at[at[:, None], expert[None]],
            mask=inside[:, None] & is_expert[None],
            other=0.0,
        )
        return total + jnp.dot(left, right, preferred_element_type=jnp.float32)

    zeros = jnp.zeros((MANY_TOKENS, MANY_EXPERTS), jnp.float32)
    total = lax.fori_loop(0, depth // MANY_DEEP, add, zeros)
    plt.store(
        shares_ref.at[share, token[:, None], expert[None]],
        total,
        mask=is_token[:, None] & is_expert[None],
    )


def rule_of(router: Mapping[str, jax.Array], spec: MoESpec, *, dtype: Any) -> dict[str, Any]:
    """Return the arguments of `choose` for a router's params. dtype: of its inputs."""
    return {
        "top_k": spec.top_k,
        "routing": spec.routing,
        "dtype": jnp.float32 if spec.has_router_bias else dtype,
        "weight_scale": spec.weight_scale,
        "router_bias": router["router_bias"] if spec.has_router_bias else None,
    }


def choose(
    shares: Float[Array, "S T X"],
    bias: Float[Array, "X"] | None,
    *,
    top_k: int,
    routing: Routing,
    dtype: Any,
    weight_scale: float = 1.0,
    router_bias: Float[Array, "X"] | None = None,
    with_shared: bool = False,
    interpret: bool = False,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Return (each token's experts, best first; f32 weights).

    dtype: of the rounded logits. router_bias: affects the choice only. with_shared: add expert X,
    the shared one, with weight 1.
    """
    num_tokens = shares.shape[1]
    shape = (num_tokens, top_k + with_shared)
    ids, weights = pl.pallas_call(
        functools.partial(
            _choose,
            routing=routing,
            dtype=dtype,
            weight_scale=weight_scale,
            has_bias=bias is not None,
            top_k=top_k,
        ),
        grid=(num_tokens,),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.int32, jnp.float32)),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="experts_choose",
    )(shares, *(part for part in (bias, router_bias) if part is not None))
    return ids, weights


def _choose(
    shares_ref: Any,
    *rest: Any,
    routing: Routing,
    dtype: Any,
    weight_scale: float,
    has_bias: bool,
    top_k: int,
) -> None:
    *biases, ids_ref, weights_ref = rest
    token, num_experts = pl.program_id(0), shares_ref.shape[2]
    rank, weight = ranked(
        scores_of(shares_ref, biases[:has_bias], token, dtype=dtype),
        num_experts,
        biases[has_bias:],
        top_k=top_k,
        routing=routing,
        weight_scale=weight_scale,
    )
    num_places = ids_ref.shape[1]
    place = jnp.arange(pl.next_power_of_2(num_places), dtype=jnp.int32)
    expert, chosen = at_rank(place, rank, weight)
    if num_places > top_k:
        expert = jnp.where(place < top_k, expert, num_experts)
        chosen = jnp.where(place < top_k, chosen, 1.0)
    plt.store(ids_ref.at[token, place], expert, mask=place < num_places)
    plt.store(weights_ref.at[token, place], chosen, mask=place < num_places)


def scores_of(shares_ref: Any, bias_ref: list[Any], token: Any, *, dtype: Any) -> jax.Array:
    """Return a token's logits, f32[X] zero-padded to a power of two. For use in kernels."""
    num_shares, _, num_experts = shares_ref.shape
    share = jnp.arange(pl.next_power_of_2(num_shares), dtype=jnp.int32)
    expert = jnp.arange(pl.next_power_of_2(num_experts), dtype=jnp.int32)
    is_expert = expert < num_experts
    parts = plt.load(
        shares_ref.at[share[:, None], token, expert[None]],
        mask=(share < num_shares)[:, None] & is_expert[None],
        other=0.0,
    )
    scores = jnp.sum(parts, axis=0).astype(dtype).astype(jnp.float32)
    if bias_ref:
        bias = plt.load(bias_ref[0].at[expert], mask=is_expert, other=0.0)
        scores = (scores + bias.astype(jnp.float32)).astype(dtype).astype(jnp.float32)
    return scores


def ranked(
    scores: jax.Array,
    num_experts: int,
    router_bias_ref: list[Any],
    *,
    top_k: int,
    routing: Routing,
    weight_scale: float,
    by_pairs: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return (each expert's rank, i32[X]; f32[X] weight if in the top-k). For use in kernels.

    by_pairs: compare all pairs of experts at once instead of taking the best k times; faster for
    few experts and several warps, whose every maximum is an exchange
    """
    expert = jnp.arange(scores.shape[0], dtype=jnp.int32)
    is_expert = expert < num_experts
    if router_bias_ref:
        power = jnp.where(is_expert, 1.0 / (1.0 + jnp.exp(-scores)), 0.0)
        router_bias = plt.load(router_bias_ref[0].at[expert], mask=is_expert, other=0.0)
        height = power + router_bias.astype(jnp.float32)
        rank = _rank(height, is_expert, top_k=top_k, by_pairs=by_pairs)
        if routing is Routing.SIGMOID_THEN_TOP_NORMALIZED:
            power = power / (jnp.sum(jnp.where(rank < top_k, power, 0.0)) + 1e-20)
        return rank, power * weight_scale
    peak = jnp.max(jnp.where(is_expert, scores, -jnp.inf))
    power = jnp.where(is_expert, jnp.exp(scores - peak), 0.0)
    if routing is Routing.TOP_THEN_SOFTMAX:
        height = scores
    else:
        power = power / jnp.sum(power)
        height = power
    rank = _rank(height, is_expert, top_k=top_k, by_pairs=by_pairs)
    if routing is not Routing.SOFTMAX_THEN_TOP:
        power = power / jnp.sum(jnp.where(rank < top_k, power, 0.0))
    return rank, power


def _rank(height: jax.Array, is_expert: jax.Array, *, top_k: int, by_pairs: bool) -> jax.Array:
    """Return each entry's place among the K highest, K or more for others. Equal ones are in the
    order of their indices, NaN are first: [1 3 NaN 3], K = 3 -> [3 1 0 2]."""
    bits = lax.bitcast_convert_type(height, jnp.int32)
    key = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the floats
    # One key for all NaN: the sign of a NaN may differ when it is recomputed.
    key = jnp.where(height != height, HIGHEST, key)
    key = jnp.where(is_expert, key, LOWEST)
    index = jnp.arange(height.shape[0], dtype=jnp.int32)
    if by_pairs:
        is_before = index[None] < index[:, None]
        is_ahead = (key[None] > key[:, None]) | ((key[None] == key[:, None]) & is_before)
        return jnp.sum(is_ahead.astype(jnp.int32), axis=1)
    rank = jnp.full(height.shape, top_k, jnp.int32)
    for place in range(top_k):
        is_best = index == jnp.argmax(key)
        rank = jnp.where(is_best, place, rank)
        key = jnp.where(is_best, LOWEST, key)
    return rank


def at_rank(place: jax.Array, rank: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the expert of rank place[i], its weight) for every i. For use in kernels."""
    expert = jnp.arange(rank.shape[0], dtype=jnp.int32)
    is_it = rank[None] == place[:, None]
    ids = jnp.sum(jnp.where(is_it, expert[None], 0), axis=1)
    return ids, jnp.sum(jnp.where(is_it, weight[None], 0.0), axis=1)
