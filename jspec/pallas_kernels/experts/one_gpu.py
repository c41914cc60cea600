"""The two products of one token's experts on an NVIDIA GPU (Triton): reading at full width.

One row needs no matrix unit and no ring in shared memory. A program takes a block of weights that
its registers hold, asks for all of it at once, and multiplies when it is there; so much is on its
way at any time as the programs hold that fit the chip. The order of the lines matters: the compiler
moves no read ahead of a barrier, and every sum over a block has some. few_gpu's tiles for 16 tokens
keep one program of 512 KiB on each of 96 multiprocessors at Qwen3-30B-A3B's sizes, each waiting for
the rank of its expert before it reads, and the last of them alone at the end.

So the first product is cut along its inputs, too. Its shares are added up by the programs of the
second, which also apply the bias and the gate, each for the inputs that it multiplies. They lie in
float32, 12 KiB a share of Qwen3's eight experts.

Rounded as the kernels for several tokens round, but for the order of the sums.
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

from jspec.core.model_spec import Gate, Routing
from jspec.pallas_kernels.experts.plan import OneTuning
from jspec.pallas_kernels.experts.reference import gated
from jspec.pallas_kernels.experts.routing_gpu import expert_at


def choose_and_gate_up(
    x: Float[Array, "one E"],
    router_shares: Float[Array, "S one X"],
    router_bias: Float[Array, "X"] | None,
    kernel: Float[Array, "X E I2"],
    *,
    top_k: int,
    routing: Routing,
    tuning: OneTuning,
    interpret: bool = False,
) -> tuple[Float[Array, "C k I2"], Int[Array, "one k"], Float[Array, "one k"]]:
    """(shares of each expert's gate and up product in f32, ids, weights): `routing_gpu.choose` in
    every program."""
    _, size, width = kernel.shape
    cuts, pair = tuning.cuts(size), (1, top_k)
    bias = () if router_bias is None else (router_bias,)
    out: tuple[jax.Array, jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_choose_and_gate_up, routing=routing, tuning=tuning),
        grid=(cuts, top_k, width // 2 // tuning.gate_up_n),
        out_shape=(
            jax.ShapeDtypeStruct((cuts, top_k, width), jnp.float32),
            jax.ShapeDtypeStruct(pair, jnp.int32),
            jax.ShapeDtypeStruct(pair, jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=tuning.gate_up_warps, num_stages=1),
        interpret=interpret,
        name="one_token_choose_gate_up",
    )(x, kernel, router_shares, *bias)
    return out


def down(
    shares: Float[Array, "C k I2"],
    ids: Int[Array, "one k"],
    params: Mapping[str, jax.Array],
    *,
    gate: Gate,
    dtype: Any,
    tuning: OneTuning,
    interpret: bool = False,
) -> Float[Array, "k E"]:
    """Each expert's gated row times its `down`."""
    size, top_k = params["down"].shape[2], ids.shape[1]
    bias = (params["gate_up_bias"],) if "gate_up_bias" in params else ()
    out: jax.Array = pl.pallas_call(
        functools.partial(_down, gate=gate, tuning=tuning),
        grid=(top_k, size // tuning.down_n),
        out_shape=jax.ShapeDtypeStruct((top_k, size), dtype),
        compiler_params=plt.CompilerParams(num_warps=tuning.down_warps, num_stages=1),
        interpret=interpret,
        name="one_token_down",
    )(shares, params["down"], ids, *bias)
    return out


def _choose_and_gate_up(
    x_ref: Any,
    kernel_ref: Any,
    router_ref: Any,
    *rest: Any,
    routing: Routing,
    tuning: OneTuning,
) -> None:
    """One cut of the inputs, the expert of one rank, one tile of gate columns and of up columns."""
    *router_bias_ref, out_ref, ids_ref, weights_ref = rest
    cut, place, tile = (pl.program_id(axis) for axis in range(3))
    only, inner = place * 0, out_ref.shape[2] // 2  # the token; no store at a constant index
    top_k, size = ids_ref.shape[1], x_ref.shape[1]
    start, step = cut * tuning.gate_up_k * tuning.gate_up_rounds, tuning.gate_up_k
    rounds = [
        start + i * step + jnp.arange(step, dtype=jnp.int32) for i in range(tuning.gate_up_rounds)
    ]
    insides = [None if size % (step * len(rounds)) == 0 else at < size for at in rounds]
    rows = [
        plt.load(x_ref.at[only, at], mask=inside, other=_zero(inside))
        for at, inside in zip(rounds, insides, strict=True)
    ]
    expert, weight = expert_at(
        place, router_ref, router_bias_ref, top_k=top_k, routing=routing, dtype=x_ref.dtype
    )
    # Gate's columns and then up's as one block, so that both are on their way and summed at once.
    # In:  gate_up_n 2, inner 6, tile 1      Out: 2 3 | 8 9
    lane = jnp.arange(2 * tuning.gate_up_n, dtype=jnp.int32)
    half = lax.div(lane, jnp.full_like(lane, tuning.gate_up_n))
    column = lane + half * (inner - tuning.gate_up_n) + tile * tuning.gate_up_n
    blocks = [
        _block(kernel_ref, expert, at, column, inside)
        for at, inside in zip(rounds, insides, strict=True)
    ]

    @pl.when((cut == 0) & (tile == 0))
    def _() -> None:
        plt.store(ids_ref.at[only, place], expert)
        plt.store(weights_ref.at[only, place], weight)

    parts = [_product(row, block) for row, block in zip(rows, blocks, strict=True)]
    plt.store(out_ref.at[cut, place, column], functools.reduce(jnp.add, parts))


def _block(
    kernel_ref: Any, expert: Any, at: jax.Array, columns: jax.Array, inside: Any
) -> jax.Array:
    """In a kernel: kernel[expert, at, columns]; `inside` of `at`, or None: all are."""
    mask = None if inside is None else inside[:, None]
    where = kernel_ref.at[expert, at[:, None], columns[None]]
    return plt.load(where, mask=mask, other=_zero(inside))


def _product(row: jax.Array, block: jax.Array) -> jax.Array:
    """In a kernel: row @ block, multiplied and summed in f32."""
    return jnp.sum(row.astype(jnp.float32)[:, None] * block.astype(jnp.float32), axis=0)


def _zero(mask: Any) -> float | None:
    return None if mask is None else 0.0


def _down(
    shares_ref: Any,
    kernel_ref: Any,
    ids_ref: Any,
    *bias_and_out: Any,
    gate: Gate,
    tuning: OneTuning,
) -> None:
    """The expert of one rank, one tile of output columns."""
    *bias_ref, out_ref = bias_and_out
    place, tile = pl.program_id(0), pl.program_id(1)
    inner = kernel_ref.shape[1]
    expert = plt.load(ids_ref.at[place * 0, place])
    column = tile * tuning.down_n + jnp.arange(tuning.down_n, dtype=jnp.int32)
    parts = []
    num_rounds, step = pl.cdiv(inner, tuning.down_k), tuning.down_k
    for first in range(0, num_rounds, tuning.down_held):  # what is asked for at once
        held = range(first, min(first + tuning.down_held, num_rounds))
        rounds = [i * step + jnp.arange(step, dtype=jnp.int32) for i in held]
        insides = [None if inner % step == 0 else at < inner for at in rounds]
        each = list(zip(rounds, insides, strict=True))
        blocks = [_block(kernel_ref, expert, at, column, inside) for at, inside in each]
        for (at, inside), block in zip(each, blocks, strict=True):
            row = _gated_row(
                shares_ref, bias_ref, place, expert, at, inside, gate=gate, dtype=out_ref.dtype
            )
            parts.append(_product(row, block))
    total = functools.reduce(jnp.add, parts)
    plt.store(out_ref.at[place, column], total.astype(out_ref.dtype))


def _gated_row(
    shares_ref: Any,
    bias_ref: list[Any],
    place: Any,
    expert: Any,
    at: jax.Array,
    inside: Any,
    *,
    gate: Gate,
    dtype: Any,
) -> jax.Array:
    """In a kernel: the gated inner row of one expert at columns `at`, rounded to dtype."""
    cuts, _, width = shares_ref.shape
    cut = jnp.arange(pl.next_power_of_2(cuts), dtype=jnp.int32)[:, None]
    mask = (cut < cuts) if inside is None else (cut < cuts) & inside[None]

    def summed(start: int) -> jax.Array:
        where = start + at
        parts = plt.load(shares_ref.at[cut, place, where[None]], mask=mask, other=0.0)
        total = jnp.sum(parts, axis=0).astype(dtype).astype(jnp.float32)
        if not bias_ref:
            return total
        bias = plt.load(bias_ref[0].at[expert, where], mask=inside, other=_zero(inside))
        return (total + bias.astype(jnp.float32)).astype(dtype).astype(jnp.float32)

    return gated(summed(0), summed(width // 2), gate=gate).astype(dtype)
