"""One row times a matrix on an NVIDIA GPU (Triton): the time is that of reading the matrix once.

A program takes a slice of the inputs and a tile of columns, asks for all of its weights at once,
and leaves one share of the sum. The shares are added by the kernel that reads the product anyway
(experts/routing_gpu.py), so there is no launch for that; XLA's products in splits have one.

What is multiplied and added is in float32; `Splits.sum` rounds once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from jspec.pallas_kernels.early_start import let_next_start

MOST_SHARES = 16  # whoever adds them reads them all
LEAST_WEIGHTS = 1 << 20  # below, a launch is most of the time, and any product will do


@dataclass(frozen=True, slots=True)
class RowTuning:
    """slice_k: inputs of a program; tile_n: its columns. Powers of two that divide K and N."""

    slice_k: int = 512
    tile_n: int = 64
    num_warps: int = 8


def choose_row(num_rows: int, size: int, width: int) -> RowTuning | None:
    """Tiles of [1, size] @ [size, width], or None: XLA's product."""
    tuning = RowTuning()
    fits = not size % tuning.slice_k and not width % tuning.tile_n
    few = size // tuning.slice_k <= MOST_SHARES
    is_large = size * width >= LEAST_WEIGHTS
    return tuning if num_rows == 1 and fits and few and is_large else None


def reference(
    x: Float[Array, "one K"], kernel: Float[Array, "K N"], *, slice_k: int
) -> Float[Array, "S one N"]:
    """The definition of `row_product`."""
    rows = x.astype(jnp.float32).reshape(1, -1, slice_k)
    slices = kernel.astype(jnp.float32).reshape(-1, slice_k, kernel.shape[1])
    return jnp.einsum("tsk,skn->stn", rows, slices)


def row_product(
    x: Float[Array, "one K"],
    kernel: Float[Array, "K N"],
    *,
    tuning: RowTuning,
    early: bool = False,
    interpret: bool = False,
) -> Float[Array, "S one N"]:
    """x @ kernel as S = K / slice_k shares in f32. early: as early_start has it.

    Raises ValueError for more rows than one, and for tiles that do not divide K and N.
    """
    (num_rows, size), width = x.shape, kernel.shape[1]
    if num_rows != 1 or size % tuning.slice_k or width % tuning.tile_n:
        raise ValueError(
            f"x is {x.shape}, the kernel {kernel.shape}; expected one row, and sizes that"
            f" {tuning.slice_k} and {tuning.tile_n} divide"
        )
    num_shares = size // tuning.slice_k
    shares: jax.Array = pl.pallas_call(
        functools.partial(_row_product, tuning=tuning, early=early and not interpret),
        grid=(width // tuning.tile_n, num_shares),
        out_shape=jax.ShapeDtypeStruct((num_shares, 1, width), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tuning.num_warps, num_stages=1),
        interpret=interpret,
        name="row_product",
    )(x, kernel)
    return shares


def _row_product(
    x_ref: Any, kernel_ref: Any, shares_ref: Any, *, tuning: RowTuning, early: bool
) -> None:
    """One tile of columns of one share."""
    tile, share = pl.program_id(0), pl.program_id(1)
    share = let_next_start(share) if early else share
    row = tile * 0  # jax 0.10 interprets no store at a constant index
    at = share * tuning.slice_k + jnp.arange(tuning.slice_k, dtype=jnp.int32)
    column = tile * tuning.tile_n + jnp.arange(tuning.tile_n, dtype=jnp.int32)
    weights = plt.load(kernel_ref.at[at[:, None], column[None]])
    x = plt.load(x_ref.at[row, at]).astype(jnp.float32)
    products = x[:, None] * weights.astype(jnp.float32)
    plt.store(shares_ref.at[share, row, column], jnp.sum(products, axis=0))
