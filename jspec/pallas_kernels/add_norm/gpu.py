"""The residual add fused with the following RMSNorm, for NVIDIA GPUs (Triton).

Each program reads its row once and keeps the sum in registers. Rounding is that of XLA: the sum in
x's dtype, then the norm in float32, cast once at the end. Only the summation order of the squares
differs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

ELEMENTS_PER_THREAD = 16  # per operand: two 16-byte loads of bfloat16, all in flight at once
LANES, MAX_WARPS = 32, 16


def add_and_norm(
    x: Float[Array, "T E"],
    delta: Float[Array, "T E"],
    scale: Float[Array, "E"],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """Compute `reference.add_norm` in one kernel. T may be 0; E need not be a power of two."""
    num_rows, size = x.shape
    if num_rows == 0:
        return x, x
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    width = pl.next_power_of_2(size)

    def add_and_norm_gpu(*refs: Any) -> None:  # the name that profiles show
        _body(*refs, eps=eps, width=width)

    total, normed = pl.pallas_call(
        add_and_norm_gpu,
        grid=(num_rows,),
        out_shape=(out, out),
        compiler_params=plt.CompilerParams(num_warps=num_warps(width), num_stages=1),
        interpret=interpret,
        name="add_and_norm_gpu",
    )(x, delta, scale)
    return total, normed


def num_warps(width: int) -> int:
    """Return warps so that a thread has ELEMENTS_PER_THREAD: 4096 -> 8, 64 -> 1, 32768 -> 16."""
    return min(max(width // (LANES * ELEMENTS_PER_THREAD), 1), MAX_WARPS)


def _body(
    x_ref: Any,
    delta_ref: Any,
    scale_ref: Any,
    total_ref: Any,
    normed_ref: Any,
    *,
    eps: float,
    width: int,
) -> None:
    """Process one row. Columns from E on are masked, as Triton's arrays are powers of two."""
    size = scale_ref.shape[0]
    row, column = pl.program_id(0), jnp.arange(width)
    mask = None if width == size else column < size
    other = None if mask is None else 0.0

    def load(ref: Any) -> jax.Array:
        return plt.load(ref, mask=mask, other=other)

    scale = load(scale_ref.at[column])
    total = load(x_ref.at[row, column]) + load(delta_ref.at[row, column])
    plt.store(total_ref.at[row, column], total, mask=mask)
    wide = total.astype(jnp.float32)
    mean_square = jnp.sum(wide * wide) / size
    normed = wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)
    plt.store(normed_ref.at[row, column], normed.astype(total.dtype), mask=mask)
