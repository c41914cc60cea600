"""MoE experts for few tokens on a TPU (Mosaic): each weight is read in place, once.

A grid step multiplies one block of pairs of one expert (api.py) by one tile of its columns. Columns
are the outer grid axis, so adjacent blocks of one expert use the same tile, which is not copied
again. Weights are read in the order in which XLA stores them (`is_stored_transposed`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jspec.pallas_kernels.experts.api import ExpertBlocks, Mixed
from jspec.pallas_kernels.experts.reference import blocks_of, gated
from jspec.spec.layers.feed_forward import Gate

# Average rows per expert up to which the kernel is used instead of XLA's product. Estimated: at
# this many rows every chip is still bound by reading weights.
MOST_ROWS_AN_EXPERT = 64
LEAST_ROWS = 16  # per block: a packed tile of bfloat16
LANES = 128
TILE_BYTES = 3 << 20  # bytes of a tile of weights; two are in VMEM, whose default limit is 16 MiB


def choose_tile_m(num_pairs: int, num_experts: int) -> int | None:
    """Return pairs per block; None: use XLA's grouped product."""
    rows = -(-num_pairs // num_experts)
    if not 0 < rows <= MOST_ROWS_AN_EXPERT:
        return None
    return max(LEAST_ROWS, pl.next_power_of_2(rows))


def run_experts(
    x: Float[Array, "T E"],
    ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    params: dict[str, jax.Array],
    *,
    gate: Gate,
    tile_m: int,
    shards: int = 1,
    interpret: bool = False,
) -> Float[Array, "T E"]:
    """Compute reference.run_experts. Raises ValueError for 0 tokens. interpret: run anywhere."""
    num_experts = params["down"].shape[0]
    blocks = blocks_of(ids, num_experts=num_experts, tile_m=tile_m)
    if shards > 1:  # index maps need a block even without pairs
        blocks = replace(blocks, num_used=jnp.maximum(blocks.num_used, 1))
    rows = jnp.take(x, blocks.token, axis=0, mode="clip")
    wide = grouped_product(rows, params["gate_up"], blocks, interpret=interpret)
    if "gate_up_bias" in params:
        expert = jnp.repeat(blocks.expert, tile_m)
        wide = wide + jnp.take(params["gate_up_bias"], expert, axis=0, mode="clip")
    inner = gated(*jnp.split(wide, 2, axis=-1), gate=gate)
    out = grouped_product(inner, params["down"], blocks, interpret=interpret)
    mixed = Mixed(rows=out, weights=weights, ids=ids, place=blocks.place)
    return mixed.sum() if shards == 1 else mixed.own_sum(num_experts)


def grouped_product(
    rows: Float[Array, "rows K"],
    weights: Float[Array, "X K N"],
    blocks: ExpertBlocks,
    *,
    interpret: bool = False,
) -> Float[Array, "rows N"]:
    """Return each block's rows times its expert's weights; unused blocks are not written."""
    _, size, columns = weights.shape
    tile_m, tile_n = blocks.tile_m, _tile_columns(size, columns, weights.dtype.itemsize)
    transposed = is_stored_transposed(size, columns)

    def used(block: Any, num_used: Any) -> Any:
        return jnp.minimum(block, num_used[0] - 1)

    weights_spec = pl.BlockSpec((1, size, tile_n), lambda n, b, expert, _: (expert[b], 0, n))
    if transposed:
        weights = jnp.swapaxes(weights, 1, 2)  # the stored order: no copy
        weights_spec = pl.BlockSpec((1, tile_n, size), lambda n, b, expert, _: (expert[b], n, 0))
    out: jax.Array = pl.pallas_call(
        partial(_product, transposed=transposed),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], columns), rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(columns, tile_n), blocks.expert.shape[0]),
            in_specs=[
                pl.BlockSpec((tile_m, size), lambda _n, b, _, num_used: (used(b, num_used), 0)),
                weights_spec,
            ],
            out_specs=pl.BlockSpec(
                (tile_m, tile_n), lambda n, b, _, num_used: (used(b, num_used), n)
            ),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="experts_product",
    )(blocks.expert, blocks.num_used[None], rows, weights)
    return out


def is_stored_transposed(size: int, columns: int) -> bool:
    """Return whether XLA stores [X, size, columns] with `size` last: the axis with less padding to
    128.

    In:  2880, 1440    Out: True, since 1440 -> 1536 is 7% and 2880 -> 2944 is 2%
    """
    padded_size, padded_columns = (pl.cdiv(n, LANES) * LANES for n in (size, columns))
    return padded_columns * size > padded_size * columns


def _tile_columns(size: int, columns: int, itemsize: int) -> int:
    """Return tile columns: whole vectors within TILE_BYTES, spread evenly; all if at most 128."""
    if columns <= LANES:
        return columns
    most = max(TILE_BYTES // (size * itemsize * LANES), 1)
    vectors = pl.cdiv(columns, LANES)
    return pl.cdiv(vectors, pl.cdiv(vectors, most)) * LANES


def _product(
    expert_ref: Any,  # used by the index maps only
    num_used_ref: Any,
    rows_ref: Any,
    weights_ref: Any,
    out_ref: Any,
    *,
    transposed: bool,
) -> None:
    del expert_ref

    @pl.when(pl.program_id(1) < num_used_ref[0])
    def _() -> None:
        total = jax.lax.dot_general(
            rows_ref[...],
            weights_ref[0],
            (((1,), (1 if transposed else 0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        out_ref[...] = total.astype(out_ref.dtype)
