"""Norms and RoPE of heads, and writing K and V to pages: the definition, which gpu.py fuses.

RoPE (Su et al., 2021) is half-split, as in Llama. A KV pool is [num_pages, page_size, 2 * G, D]:
head 2g is K_g, head 2g + 1 is V_g. A latent pool [num_pages, page_size, D] has one record per
token, which is both K and V of one head. Page 0 is the dummy, which takes all writes that must go
nowhere else. Indices are never negative.

Written values are finite: 0 times NaN is NaN, so one row's overflow would reach every query whose
product includes that slot. An FP8 pool (e4m3) holds K and V divided by the layer's scales, in
float32, then rounded to nearest, ties to even, and saturated. Every query sees the stored values,
also of tokens of its own step.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.pallas_kernels.add_norm.reference import rms_norm
from jspec.pallas_kernels.kv_write.api import HeadNorms, KVScales, Rotation

# Replaces infinities. It is the largest float16; that of a wider type would overflow in a product.
LARGE = 65504.0
LARGEST_FP8 = 448.0  # of e4m3


def finite(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Replace NaN by 0, infinities by LARGE: [1.5 inf -inf NaN] -> [1.5 65504 -65504 0]."""
    wide = x.astype(jnp.float32)
    stand_in = jnp.where(wide > 0, LARGE, jnp.where(wide < 0, -LARGE, 0.0))
    return jnp.where(jnp.abs(wide) < jnp.inf, x, stand_in.astype(x.dtype))


def stored(x: Float[Array, "*n"], dtype: DTypeLike) -> Float[Array, "*n"]:
    """Round to a pool's dtype: finite, and saturated in FP8, where conversion would give NaN.

    In:  [300 500 -inf NaN]    Out: [288 448 -448 0] in e4m3
    """
    if jnp.dtype(dtype).itemsize > 1:
        return finite(x.astype(dtype))
    return jnp.clip(finite(x.astype(jnp.float32)), -LARGEST_FP8, LARGEST_FP8).astype(dtype)


def scaled_queries(q: Float[Array, "*n"], scales: KVScales | None) -> Float[Array, "*n"]:
    """Return the queries to multiply with stored K: in float32 with scales, else unchanged."""
    return q if scales is None else q.astype(jnp.float32) * scales.k


def scaled_outputs(
    out: Float[Array, "*n"], scales: KVScales | None, dtype: DTypeLike
) -> Float[Array, "*n"]:
    return out if scales is None else (out.astype(jnp.float32) * scales.v).astype(dtype)


def records_of(pages: Float[Array, "NP S *G2 D"]) -> tuple[int, int]:
    """Return (kv heads, records of each): G and 2 of a KV pool, 1 and 1 of a latent pool."""
    return (1, 1) if pages.ndim == 3 else (pages.shape[2] // 2, 2)


def interleave_kv(
    k: Float[Array, "T G Dk"], v: Float[Array, "T G Dv"], *, width: int
) -> Float[Array, "T G2 D"]:
    """Return heads [K_0, V_0, K_1, V_1, ...], zero-padded to the pool's `width`."""
    pairs = [jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (k, v)]
    return jnp.stack(pairs, axis=2).reshape(k.shape[0], 2 * k.shape[1], width)


def pool_rows(
    k: Float[Array, "T G Dk"],
    v: Float[Array, "T G Dv"],
    *,
    width: int,
    dtype: DTypeLike,
    scales: KVScales | None = None,
) -> Float[Array, "T G2 D"]:
    """Return the values to store in a pool: interleaved, divided by scales, and `stored`."""
    if scales is not None:
        k, v = k.astype(jnp.float32) / scales.k, v.astype(jnp.float32) / scales.v
    return stored(interleave_kv(k, v, width=width), dtype)


def page_slots(
    page_table: Int[Array, "B P"],
    row_idx: Int[Array, "*n"],
    slot: Int[Array, "*n"],
    valid: Bool[Array, "*n"],
    *,
    page_size: int,
) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
    """Return (page, offset) of slot `slot` of row `row_idx`; the dummy page if not valid.

    In:  page_table = [[5, 9]], row_idx = [0, 0, 0], slot = [1, 4, 7], valid = [T, T, F], size 4
    Out: page = [5, 9, 0], offset = [1, 0, 3]
    """
    width = page_table.shape[1]
    inside = valid & (slot >= 0) & (slot < width * page_size)
    index = jnp.where(inside, slot // page_size, 0)
    page = page_table.at[row_idx, index].get(mode="promise_in_bounds")
    return jnp.where(inside, page, 0), jnp.where(slot >= 0, slot % page_size, 0)


def write_rows(
    pages: Float[Array, "NP S *G2 D"],
    page: Int[Array, "*n"],
    offset: Int[Array, "*n"],
    values: Float[Array, "*n *G2 D"],
) -> Float[Array, "NP S *G2 D"]:
    """Set pages[page, offset] = values, in place if the pool is donated."""
    return pages.at[page, offset].set(values.astype(pages.dtype), mode="promise_in_bounds")


def turn(
    first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return first * cos - second * sin, second * cos + first * sin


def norm_halves(
    halves: tuple[jax.Array, jax.Array],
    scale: Callable[[int], jax.Array],
    *,
    width: int,
    eps: float,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Norm heads of `width`, given as f32 halves [heads, half], and round them to dtype. scale:
    returns that of each half by its index; kernels load it there."""
    first, second = halves
    mean_square = jnp.sum(first * first + second * second, axis=1, keepdims=True) / width
    factor = jax.lax.rsqrt(mean_square + eps)
    first, second = (
        (x * factor * scale(i)).astype(dtype).astype(jnp.float32) for i, x in enumerate(halves)
    )
    return first, second


def rotate(
    x: Float[Array, "*b H D"], cos: Float[Array, "*b half"], sin: Float[Array, "*b half"]
) -> Float[Array, "*b H D"]:
    """Rotate the first 2 * half dims of every head by its token's angles, in float32."""
    half = cos.shape[-1]
    if 2 * half < x.shape[-1]:
        turned, left = jnp.split(x, (2 * half,), axis=-1)
        return jnp.concatenate((rotate(turned, cos, sin), left), axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(turn(first, second, cos, sin), axis=-1).astype(x.dtype)


def rotate_and_split(
    heads: Float[Array, "*b heads D"], rotation: Rotation
) -> tuple[Float[Array, "*b H D"], Float[Array, "*b G D"], Float[Array, "*b G D"]]:
    """Return (q, k, v), with q and k normed (if there are norms) and rotated."""
    first_k = rotation.num_heads
    first_v = (heads.shape[-2] + first_k) // 2
    q, k, v = jnp.split(heads, (first_k, first_v), axis=-2)
    if (norms := rotation.norms) is not None:
        q, k = rms_norm(q, norms.q, eps=norms.eps), rms_norm(k, norms.k, eps=norms.eps)
    return rotate(q, rotation.cos, rotation.sin), rotate(k, rotation.cos, rotation.sin), v


def rotate_and_write(
    heads: Float[Array, "T heads D"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    kv_pages: Float[Array, "NP S G2 D"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
    *,
    num_heads: int,
    norms: HeadNorms | None = None,
    scales: KVScales | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "NP S G2 D"]]:
    """Return (rotated q, the pool with each token's K and V at [page, offset]). heads: q, k, v."""
    q, k, v = rotate_and_split(heads, Rotation(cos=cos, sin=sin, num_heads=num_heads, norms=norms))
    values = pool_rows(k, v, width=kv_pages.shape[3], dtype=kv_pages.dtype, scales=scales)
    return q, write_rows(kv_pages, page, offset, values)
