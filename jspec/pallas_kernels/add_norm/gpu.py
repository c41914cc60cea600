"""The residual add fused with the following RMSNorm, for NVIDIA GPUs (Triton), rounded as by XLA.
If a product with fp8 weights reads the norm, the same launch quantizes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Float

from jspec.device.fp8 import codes_of, scales_of
from jspec.pallas_kernels.fp8_product.api import QuantizedTokens, WithCodes
from jspec.pallas_kernels.fp8_product.gpu_tokens import shapes_of
from jspec.pallas_kernels.fp8_product.tuning import DEPTH

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
    if x.shape[0] == 0:
        return x, x
    total, normed = _launch(x, delta, scale, eps=eps, interpret=interpret)
    return total, normed


def add_norm_and_quantize(
    x: BFloat16[Array, "T E"],
    delta: BFloat16[Array, "T E"],
    scale: Float[Array, "E"],
    *,
    eps: float,
    by_blocks: bool,
    interpret: bool = False,
) -> tuple[BFloat16[Array, "T E"], WithCodes]:
    """Return what `add_and_norm` does, with the norm also quantized. T > 0."""
    num, size = x.shape
    total, normed, codes, scales = _launch(
        x,
        delta,
        scale,
        eps=eps,
        interpret=interpret,
        coded=shapes_of(num, size, by_blocks=by_blocks),
    )
    tokens = QuantizedTokens(codes=codes, scales=scales, num=num)
    return total, WithCodes(values=normed, tokens=tokens)


def _launch(
    x: jax.Array,
    delta: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    interpret: bool,
    coded: tuple[Any, ...] = (),
) -> tuple[jax.Array, ...]:
    """Run the kernel. coded: shapes of codes and scales, if the norm is quantized too."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    width = pl.next_power_of_2(x.shape[1])

    def add_and_norm_gpu(*refs: Any) -> None:  # the name that profiles show
        _body(*refs, eps=eps, width=width)

    found: tuple[jax.Array, ...] = pl.pallas_call(
        add_and_norm_gpu,
        grid=(x.shape[0],),
        out_shape=(out, out, *coded),
        compiler_params=plt.CompilerParams(num_warps=num_warps(width), num_stages=1),
        interpret=interpret,
        name="add_and_norm_gpu",
    )(x, delta, scale)
    return found


def num_warps(width: int) -> int:
    """Return the warps that give a thread ELEMENTS_PER_THREAD: 4096 -> 8, 64 -> 1, 32768 -> 16."""
    return min(max(width // (LANES * ELEMENTS_PER_THREAD), 1), MAX_WARPS)


def _body(
    x_ref: Any,
    delta_ref: Any,
    scale_ref: Any,
    total_ref: Any,
    normed_ref: Any,
    *coded_refs: Any,
    eps: float,
    width: int,
) -> None:
    """Process one row. Columns from E on are masked, since Triton's arrays are powers of two."""
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
    rounded = normed.astype(total.dtype)
    plt.store(normed_ref.at[row, column], rounded, mask=mask)
    if coded_refs:
        codes_ref, scales_ref = coded_refs
        codes = _quantized(rounded.astype(jnp.float32), scales_ref, row, mask)
        plt.store(codes_ref.at[row, column], codes, mask=mask)


def _quantized(x: jax.Array, scales_ref: Any, row: jax.Array, mask: jax.Array | None) -> jax.Array:
    if mask is not None:
        x = jnp.where(mask, x, 0.0)
    if scales_ref.shape[0] == 1:
        scale = scales_of(jnp.max(jnp.abs(x)))
        plt.store(scales_ref.at[row * 0, row], scale)
        return codes_of(x, scale)
    blocks = x.reshape(-1, DEPTH)
    scales = scales_of(jnp.max(jnp.abs(blocks), axis=1))
    block = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    plt.store(scales_ref.at[block, row], scales, mask=block < scales_ref.shape[0])
    return codes_of(blocks, scales[:, None]).reshape(-1)
