"""An MoE layer for at most 16 tokens on an NVIDIA GPU (Triton): four launches for one token.

    norm_and_score -> [choose, for several tokens] -> gate_up -> down -> mixed_norm

A program handles one (token, expert) pair and one tile of columns, and ends if an earlier pair has
the same expert. Otherwise it multiplies the expert's weights by all of its tokens; rows of other
tokens are 0 and are not stored. For one token every program of the first product ranks the experts
itself (gpu_router). A shared expert of the same size runs as one more expert, X. Rounding is that
of gpu.py and add_norm/gpu.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jspec.device.weights import Weight
from jspec.pallas_kernels.experts.api import Mixed
from jspec.pallas_kernels.experts.gpu import biased, tile_products
from jspec.pallas_kernels.experts.gpu_fp8 import operand
from jspec.pallas_kernels.experts.gpu_router import (
    at_rank,
    choose,
    norm_and_score,
    ranked,
    rule_of,
    scores_of,
)
from jspec.pallas_kernels.experts.reference import gated
from jspec.pallas_kernels.experts.tuning import (
    MOST_TOKENS,
    RANKED_BY_PAIRS,
    RANKED_IN_PLACE,
    ExpertsTuning,
    check_tiles,
    sizes_of,
)
from jspec.spec.layers.feed_forward import Gate, MoESpec, Routing


class Shared(NamedTuple):
    """The dense weights of a shared expert that is as wide as the others."""

    gate_up: jax.Array  # [E, 2I]
    down: jax.Array  # [I, E]


def shared_of(params: Mapping[str, Mapping[str, Any]], spec: MoESpec) -> Shared | None:
    """Return the shared expert if it can run as one of the experts, else None. Weights must be
    row-major."""
    shared, experts = spec.shared, params["experts"]
    if shared is None or spec.bias or shared.inner != spec.inner or shared.limit is not None:
        return None
    parts = [params["shared"][name] for name in ("gate_up", "down")]
    if any(part.keys() != {"kernel"} for part in parts):
        return None
    kernels = [part["kernel"] for part in parts]
    arrays = (*kernels, experts["gate_up"], experts["down"])
    if any(not isinstance(x, jax.Array) or x.dtype != kernels[0].dtype for x in arrays):
        return None
    return Shared(kernels[0], kernels[1]) if spec.gate is Gate.SILU else None


def moe_of_sum(
    x: Float[Array, "T E"],
    delta: Float[Array, "T E"],
    scale: Float[Array, "E"],
    params: Mapping[str, Mapping[str, Any]],
    *,
    eps: float,
    spec: MoESpec,
    tuning: ExpertsTuning,
    shared: Shared | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"], Mixed]:
    """Return (x + delta, that sum's norm, the experts' output for it). params: of layers.moe.
    shared: added for every token. Raises ValueError for tokens or sizes that do not fit."""
    router, experts = params["router"], params["experts"]
    if not 1 <= x.shape[0] <= MOST_TOKENS:
        raise ValueError(f"{x.shape[0]} tokens; expected 1 to {MOST_TOKENS}")
    size = check_tiles(tuning, experts).size
    total, normed, shares = norm_and_score(
        x, delta, scale, router["kernel"], eps=eps, interpret=interpret
    )
    bias = router.get("bias")
    rule = {**rule_of(router, spec, dtype=x.dtype), "interpret": interpret}
    how: dict[str, Any] = {"gate": spec.gate, "tuning": tuning, "shared": shared}
    if x.shape[0] == 1 and spec.num_experts <= RANKED_IN_PLACE:
        inner, ids, weights = choose_and_gate_up(normed, shares, bias, experts, **rule, **how)
    else:
        ids, weights = choose(shares, bias, **rule, with_shared=shared is not None)
        inner = gate_up(normed, ids, experts, **how, interpret=interpret)
    of_down: dict[str, Any] = {"size": size, "tuning": tuning, "shared": shared}
    rows = down(inner, ids, experts["down"], **of_down, interpret=interpret)
    return (
        total,
        normed,
        Mixed(
            rows=rows,
            weights=weights,
            ids=ids,
            bias=experts.get("down_bias"),
            has_shared=shared is not None,
        ),
    )


def gate_up(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    params: Mapping[str, Any],
    *,
    gate: Gate,
    tuning: ExpertsTuning,
    shared: Shared | None = None,
    interpret: bool = False,
) -> Float[Array, "R I"]:
    """Return each pair's activated inner row, at t * k + j. A token's ids must be distinct."""
    inner = sizes_of(params).inner
    operands = [x, operand(params["gate_up"]), ids, *_bias(params)]
    if shared is not None:
        operands.append(shared.gate_up[None])
    out: jax.Array = pl.pallas_call(
        functools.partial(
            _gate_up,
            has_shared=shared is not None,
            gate=gate,
            tuning=tuning,
        ),
        grid=(ids.size, inner // tuning.gate_up_n),
        out_shape=jax.ShapeDtypeStruct((ids.size, inner), x.dtype),
        compiler_params=_compiler_params(tuning),
        interpret=interpret,
        name="few_experts_gate_up",
    )(*operands)
    return out


def choose_and_gate_up(
    x: Float[Array, "one E"],
    shares: Float[Array, "S one X"],
    logit_bias: Float[Array, "X"] | None,
    params: Mapping[str, Any],
    *,
    top_k: int,
    routing: Routing,
    dtype: Any,
    weight_scale: float,
    router_bias: Float[Array, "X"] | None,
    gate: Gate,
    tuning: ExpertsTuning,
    shared: Shared | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "k I"], Int[Array, "one k"], Float[Array, "one k"]]:
    """Run `choose` and `gate_up` for one token in one launch: (inner rows, ids, weights)."""
    inner = sizes_of(params).inner
    others = {**params, "logit_bias": logit_bias, "router_bias": router_bias}
    others["shared"] = None if shared is None else shared.gate_up[None]
    every = ("gate_up_bias", "logit_bias", "router_bias", "shared")
    names = tuple(name for name in every if others.get(name) is not None)
    num_places = top_k + (shared is not None)
    pair = (1, num_places)
    out: tuple[jax.Array, jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(
            _choose_and_gate_up,
            names=names,
            top_k=top_k,
            routing=routing,
            dtype=dtype,
            weight_scale=weight_scale,
            gate=gate,
            tuning=tuning,
        ),
        grid=(num_places, inner // tuning.gate_up_n),
        out_shape=(
            jax.ShapeDtypeStruct((num_places, inner), x.dtype),
            jax.ShapeDtypeStruct(pair, jnp.int32),
            jax.ShapeDtypeStruct(pair, jnp.float32),
        ),
        compiler_params=_compiler_params(tuning),
        interpret=interpret,
        name="few_experts_choose_gate_up",
    )(x, operand(params["gate_up"]), shares, *(others[name] for name in names))
    return out


def down(
    inner_rows: Float[Array, "R I"],
    ids: Int[Array, "T k"],
    kernel: Weight,
    *,
    size: int,
    tuning: ExpertsTuning,
    shared: Shared | None = None,
    interpret: bool = False,
) -> Float[Array, "R E"]:
    """Return each pair's row times its expert's `down` [X, I, E], at t * k + j. size: E."""
    extra = [] if shared is None else [shared.down[None]]
    out: jax.Array = pl.pallas_call(
        functools.partial(_down, tuning=tuning),
        grid=(ids.size, size // tuning.down_n),
        out_shape=jax.ShapeDtypeStruct((ids.size, size), inner_rows.dtype),
        compiler_params=plt.CompilerParams(
            num_warps=tuning.num_warps, num_stages=tuning.down_stages or tuning.num_stages
        ),
        interpret=interpret,
        name="few_experts_down",
    )(inner_rows, operand(kernel), ids, *extra)
    return out


def _compiler_params(tuning: ExpertsTuning) -> plt.CompilerParams:
    return plt.CompilerParams(num_warps=tuning.num_warps, num_stages=tuning.num_stages)


def _bias(params: Mapping[str, Any]) -> list[jax.Array]:
    return [params["gate_up_bias"]] if "gate_up_bias" in params else []


def _pairs_of(ids_ref: Any, pair: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (the pair's expert, whether the pair is its first, a mask of its tokens, the pairs of
    these tokens)."""
    num_tokens, top_k = ids_ref.shape
    expert = plt.load(ids_ref.at[pair // top_k, pair % top_k])
    token = jnp.arange(MOST_TOKENS, dtype=jnp.int32)[:, None]
    place = jnp.arange(pl.next_power_of_2(top_k), dtype=jnp.int32)[None]
    is_pair = (token < num_tokens) & (place < top_k)
    is_same = (plt.load(ids_ref.at[token, place], mask=is_pair, other=-1) == expert) & is_pair
    each = token * top_k + place
    has_it = jnp.sum(is_same.astype(jnp.int32), axis=1)
    before = jnp.sum((is_same & (each < pair)).astype(jnp.int32), axis=1)
    row = jnp.sum(jnp.where(is_same, each, 0), axis=1)
    # Other tokens are outside: the interpreter's masked store writes the old value back.
    nowhere = ids_ref.shape[0] * top_k + jnp.arange(MOST_TOKENS, dtype=jnp.int32)
    return expert, jnp.sum(before) == 0, has_it > 0, jnp.where(has_it > 0, row, nowhere)


def _gate_up(
    x_ref: Any,
    gate_up_ref: Any,
    ids_ref: Any,
    *rest: Any,
    has_shared: bool,
    gate: Gate,
    tuning: ExpertsTuning,
) -> None:
    *given, out_ref = rest
    bias_ref, shared_ref = (given[:-1], given[-1:]) if has_shared else (given, [])
    expert, is_first, has_it, row = _pairs_of(ids_ref, pl.program_id(0))
    how: dict[str, Any] = {"gate": gate, "tuning": tuning}
    tile = _gate_up_tile(x_ref, gate_up_ref, bias_ref, out_ref, **how)
    is_shared = expert == gate_up_ref.shape[0]
    pl.when(is_first & ~is_shared)(lambda: tile(expert, has_it, row))
    if shared_ref:
        tile_of_shared = _gate_up_tile(x_ref, shared_ref[0], [], out_ref, **how)
        pl.when(is_first & is_shared)(lambda: tile_of_shared(expert * 0, has_it, row))


def _choose_and_gate_up(
    x_ref: Any,
    gate_up_ref: Any,
    shares_ref: Any,
    *rest: Any,
    names: tuple[str, ...],
    top_k: int,
    routing: Routing,
    dtype: Any,
    weight_scale: float,
    gate: Gate,
    tuning: ExpertsTuning,
) -> None:
    *others, out_ref, ids_ref, weights_ref = rest
    given = {name: [ref] for name, ref in zip(names, others, strict=True)}
    place, num_experts = pl.program_id(0), shares_ref.shape[2]
    is_shared = place == top_k
    only = place * 0  # the token; jax 0.10 cannot interpret a store at a constant index
    rank, weight = ranked(
        scores_of(shares_ref, given.get("logit_bias", []), only, dtype=dtype),
        num_experts,
        given.get("router_bias", []),
        top_k=top_k,
        routing=routing,
        weight_scale=weight_scale,
        by_pairs=num_experts <= RANKED_BY_PAIRS,
    )
    found, chosen = at_rank(place[None], rank, weight)
    expert = jnp.sum(found)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        plt.store(ids_ref.at[only, place], jnp.where(is_shared, num_experts, expert))
        plt.store(weights_ref.at[only, place], jnp.where(is_shared, 1.0, jnp.sum(chosen)))

    lane = jnp.arange(MOST_TOKENS, dtype=jnp.int32)
    rows = (lane == 0, jnp.where(lane == 0, place, ids_ref.shape[1] + lane))
    how: dict[str, Any] = {"gate": gate, "tuning": tuning}
    tile = _gate_up_tile(x_ref, gate_up_ref, given.get("gate_up_bias", []), out_ref, **how)
    if "shared" not in given:
        tile(expert, *rows)
        return
    tile_of_shared = _gate_up_tile(x_ref, given["shared"][0], [], out_ref, **how)
    pl.when(~is_shared)(lambda: tile(expert, *rows))
    pl.when(is_shared)(lambda: tile_of_shared(only, *rows))


def _gate_up_tile(
    x_ref: Any,
    gate_up_ref: Any,
    bias_ref: list[Any],
    out_ref: Any,
    *,
    gate: Gate,
    tuning: ExpertsTuning,
) -> Callable[[jax.Array, jax.Array, jax.Array], None]:
    """Return a function of (expert, mask of its tokens, the row of each) for this tile."""
    inner, dtype = out_ref.shape[1], out_ref.dtype
    start = pl.program_id(1) * tuning.gate_up_n  # program_id must be outside of a condition

    def run(expert: jax.Array, has_it: jax.Array, row: jax.Array) -> None:
        column = start + jnp.arange(tuning.gate_up_n, dtype=jnp.int32)
        columns = (column, inner + column)
        token = jnp.arange(MOST_TOKENS, dtype=jnp.int32)
        sums = tile_products(
            x_ref,
            token,
            has_it,
            gate_up_ref,
            expert,
            columns,
            tile_k=tuning.gate_up_k,
        )
        first, up = biased(sums, bias_ref, expert, columns, dtype=dtype)
        result = gated(first, up, gate=gate).astype(dtype)
        plt.store(out_ref.at[row[:, None], column[None]], result, mask=has_it[:, None])

    return run


def _down(
    inner_ref: Any,
    down_ref: Any,
    ids_ref: Any,
    *shared_and_out: Any,
    tuning: ExpertsTuning,
) -> None:
    *shared_ref, out_ref = shared_and_out
    expert, is_first, has_it, row = _pairs_of(ids_ref, pl.program_id(0))
    start = pl.program_id(1) * tuning.down_n

    def run(weights_ref: Any, expert: jax.Array) -> None:
        column = start + jnp.arange(tuning.down_n, dtype=jnp.int32)
        (total,) = tile_products(
            inner_ref,
            row,
            has_it,
            weights_ref,
            expert,
            (column,),
            tile_k=tuning.down_k,
        )
        plt.store(
            out_ref.at[row[:, None], column[None]],
            total.astype(out_ref.dtype),
            mask=has_it[:, None],
        )

    is_shared = expert == down_ref.shape[0]
    pl.when(is_first & ~is_shared)(lambda: run(down_ref, expert))
    if shared_ref:
        pl.when(is_first & is_shared)(lambda: run(shared_ref[0], expert * 0))
