"""MoE experts on an NVIDIA GPU (Triton), rounded like reference.run_experts.

Two kernels have a program per (block of pairs of one expert, tile of columns): gate, up and
activation, then down. Blocks of one expert are adjacent in the grid, for the L2 cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jspec.device.weights import Weight
from jspec.pallas_kernels.experts.api import ExpertBlocks, Mixed
from jspec.pallas_kernels.experts.gpu_blocks import make_blocks
from jspec.pallas_kernels.experts.gpu_fp8 import ColumnMajor, fp8_products, operand
from jspec.pallas_kernels.experts.reference import gated
from jspec.pallas_kernels.experts.tuning import ExpertsTuning, check_tiles, sizes_of
from jspec.spec.layers.feed_forward import Gate


def run_experts(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    params: dict[str, Any],
    *,
    gate: Gate,
    tuning: ExpertsTuning,
    interpret: bool = False,
) -> Mixed:
    """Return the terms that reference.run_experts sums. Raises ValueError for unfit sizes."""
    sizes = check_tiles(tuning, params)
    how: dict[str, Any] = {"tuning": tuning, "interpret": interpret}
    blocks = make_blocks(
        ids, num_experts=sizes.num_experts, tile_m=tuning.tile_m, interpret=interpret
    )
    mixed = gate_up_product(x, params, blocks, gate=gate, **how)
    rows = down_product(mixed, params["down"], blocks, size=sizes.size, **how)
    return Mixed(rows=rows, weights=weights, ids=ids, place=blocks.place)


def gate_up_product(
    x: Float[Array, "T E"],
    params: dict[str, Any],
    blocks: ExpertBlocks,
    *,
    gate: Gate,
    tuning: ExpertsTuning,
    interpret: bool = False,
) -> Float[Array, "rows I"]:
    """Return each pair's activated inner row, at its place; padding rows are not written."""
    sizes = sizes_of(params)
    operands = [x, operand(params["gate_up"]), blocks.expert, blocks.num_pairs, blocks.token]
    if "gate_up_bias" in params:
        operands.append(params["gate_up_bias"])
    return _call(
        functools.partial(_gate_up, gate=gate, tuning=tuning),
        operands,
        columns=sizes.inner,
        tile_n=tuning.gate_up_n,
        blocks=blocks,
        tuning=tuning,
        interpret=interpret,
        name="experts_gate_up",
    )


def down_product(
    inner_rows: Float[Array, "rows I"],
    down: Weight,
    blocks: ExpertBlocks,
    *,
    size: int,
    tuning: ExpertsTuning,
    interpret: bool = False,
) -> Float[Array, "rows E"]:
    """Return each pair's row times its expert's `down` [X, I, E]; padding is unwritten."""
    return _call(
        functools.partial(_down, tuning=tuning),
        [inner_rows, operand(down), blocks.expert, blocks.num_pairs],
        columns=size,
        tile_n=tuning.down_n,
        blocks=blocks,
        tuning=tuning,
        interpret=interpret,
        name="experts_down",
    )


def _call(
    body: Callable[..., None],
    operands: list[Any],
    *,
    columns: int,
    tile_n: int,
    blocks: ExpertBlocks,
    tuning: ExpertsTuning,
    interpret: bool,
    name: str,
) -> jax.Array:
    """Launch `body`; blocks are the first grid axis, so blocks of one expert are adjacent."""
    num_blocks = blocks.expert.shape[0]
    shape = (num_blocks * tuning.tile_m, columns)
    out: jax.Array = pl.pallas_call(
        body,
        grid=(num_blocks, columns // tile_n),
        out_shape=jax.ShapeDtypeStruct(shape, operands[0].dtype),
        compiler_params=plt.CompilerParams(
            num_warps=tuning.num_warps, num_stages=tuning.num_stages
        ),
        interpret=interpret,
        name=name,
    )(*operands)
    return out


def _gate_up(
    x_ref: Any,
    gate_up_ref: Any,
    expert_ref: Any,
    num_pairs_ref: Any,
    token_ref: Any,
    *bias_and_out: Any,
    gate: Gate,
    tuning: ExpertsTuning,
) -> None:
    *bias_ref, out_ref = bias_and_out
    inner, tile_n, dtype = out_ref.shape[1], tuning.gate_up_n, out_ref.dtype
    block, start = pl.program_id(0), pl.program_id(1) * tile_n
    num_pairs = plt.load(num_pairs_ref.at[block])

    @pl.when(num_pairs > 0)
    def _() -> None:
        expert = plt.load(expert_ref.at[block])
        lane = jnp.arange(tuning.tile_m, dtype=jnp.int32)
        row, is_pair = block * tuning.tile_m + lane, lane < num_pairs
        token = plt.load(token_ref.at[row])
        column = start + jnp.arange(tile_n, dtype=jnp.int32)
        sums = tile_products(
            x_ref,
            token,
            is_pair,
            gate_up_ref,
            expert,
            (column, inner + column),
            tile_k=tuning.gate_up_k,
        )
        first, up = biased(sums, bias_ref, expert, (column, inner + column), dtype=dtype)
        result = gated(first, up, gate=gate).astype(dtype)
        plt.store(out_ref.at[row[:, None], column[None]], result, mask=is_pair[:, None])


def _down(
    inner_ref: Any,
    down_ref: Any,
    expert_ref: Any,
    num_pairs_ref: Any,
    out_ref: Any,
    *,
    tuning: ExpertsTuning,
) -> None:
    block, start = pl.program_id(0), pl.program_id(1) * tuning.down_n
    num_pairs = plt.load(num_pairs_ref.at[block])

    @pl.when(num_pairs > 0)
    def _() -> None:
        expert = plt.load(expert_ref.at[block])
        lane = jnp.arange(tuning.tile_m, dtype=jnp.int32)
        row, is_pair = block * tuning.tile_m + lane, lane < num_pairs
        column = start + jnp.arange(tuning.down_n, dtype=jnp.int32)
        (total,) = tile_products(
            inner_ref,
            row,
            is_pair,
            down_ref,
            expert,
            (column,),
            tile_k=tuning.down_k,
        )
        plt.store(
            out_ref.at[row[:, None], column[None]],
            total.astype(out_ref.dtype),
            mask=is_pair[:, None],
        )


def biased(
    sums: tuple[jax.Array, ...],
    bias_ref: list[Any],
    expert: jax.Array,
    columns: tuple[jax.Array, ...],
    *,
    dtype: Any,
) -> list[jax.Array]:
    """Round products to dtype, add their expert's bias if any, round again; f32. For kernels."""
    wide = [total.astype(dtype).astype(jnp.float32) for total in sums]
    if bias_ref:
        added = [plt.load(bias_ref[0].at[expert, c]).astype(jnp.float32) for c in columns]
        wide = [
            (total + bias[None]).astype(dtype).astype(jnp.float32)
            for total, bias in zip(wide, added, strict=True)
        ]
    return wide


def tile_products(
    rows_ref: Any,
    row: jax.Array,
    is_pair: jax.Array,
    weights_ref: Any,
    expert: jax.Array,
    columns: tuple[jax.Array, ...],
    *,
    tile_k: int,
) -> tuple[jax.Array, ...]:
    """Return f32 rows[row] @ weights[expert, :, c] for c of `columns`, 0 where not is_pair."""
    if isinstance(weights_ref, ColumnMajor):
        return fp8_products(rows_ref, row, is_pair, weights_ref, expert, columns, tile_k=tile_k)
    step = jnp.arange(tile_k, dtype=jnp.int32)

    def add(k: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = k * tile_k + step
        left = plt.load(rows_ref.at[row[:, None], at[None]], mask=is_pair[:, None], other=0.0)
        right = (plt.load(weights_ref.at[expert, at[:, None], c[None]]) for c in columns)
        parts = (jnp.dot(left, w, preferred_element_type=jnp.float32) for w in right)
        return tuple(total + part for total, part in zip(sums, parts, strict=True))

    zeros = tuple(jnp.zeros((row.shape[0], c.shape[0]), jnp.float32) for c in columns)
    whole: tuple[jax.Array, ...] = jax.lax.fori_loop(0, rows_ref.shape[1] // tile_k, add, zeros)
    return whole
