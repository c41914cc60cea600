"""RoPE of q and k, with q and k norms, fused with writing K and V to their pages (Pallas-Triton).

A program handles up to 16 heads of one token. Padding tokens have the dummy page 0, which several
programs may write at once and none reads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jspec.pallas_kernels.attention.gpu_plan import tiles_of
from jspec.pallas_kernels.kv_write.api import HeadNorms, KVScales
from jspec.pallas_kernels.kv_write.reference import norm_halves, stored, turn

HEADS_PER_PROGRAM = 16
VECTOR_BYTES, WARP = 16, 32  # bytes that a thread loads at once; threads of a warp


def serves(head_dim: int, pool_width: int) -> bool:
    """Return whether the kernel can be used: an even head_dim equal to the pool's D."""
    return head_dim % 2 == 0 and head_dim == pool_width


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
    queries_per_row: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Float[Array, "NP S G2 D"]]:
    """Compute reference.rotate_and_write in one launch. Raises ValueError for unfit heads.

    queries_per_row: None returns q as [T, H, D], else in the layout of gpu_plan.pack_queries, [B *
        G, rows, D], without its padding
    scales: of an FP8 pool; q is then in f16, times K's scale
    """
    tokens, total, width = heads.shape
    _check(heads, cos, kv_pages, num_heads=num_heads)
    block = min(HEADS_PER_PROGRAM, pl.next_power_of_2(total))
    half = pl.next_power_of_2(width // 2)
    threads = block * half * heads.dtype.itemsize // VECTOR_BYTES
    num_kv = (total - num_heads) // 2
    q_shape: tuple[int, ...] = (tokens, num_heads, width)
    if queries_per_row is not None:
        tiles, stored = tiles_of(num_heads // num_kv * queries_per_row)
        q_shape = (tokens // queries_per_row * num_kv, tiles * stored, width)
    operands: tuple[jax.Array, ...] = () if norms is None else (norms.q, norms.k)
    operands += () if scales is None else (scales.k, scales.v)
    q, pool = pl.pallas_call(
        functools.partial(
            _rotate_and_write,
            num_heads=num_heads,
            eps=None if norms is None else norms.eps,
            has_scales=scales is not None,
            queries_per_row=queries_per_row,
            block=block,
            half=half,
        ),
        grid=(tokens, pl.cdiv(total, block)),
        out_shape=(
            jax.ShapeDtypeStruct(q_shape, heads.dtype if scales is None else jnp.float16),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        input_output_aliases={5: 1},
        compiler_params=plt.CompilerParams(num_warps=min(max(threads // WARP, 1), 8), num_stages=1),
        interpret=interpret,
        name="rotate_and_write",
    )(heads, cos, sin, page, offset, kv_pages, *operands)
    return q, pool


def _check(heads: jax.Array, cos: jax.Array, kv_pages: jax.Array, *, num_heads: int) -> None:
    two_g, width = kv_pages.shape[2:]
    if heads.shape[1:] != (num_heads + two_g, width) or width % 2:
        raise ValueError(
            f"heads are {heads.shape[1:]}, the pool's {(two_g, width)}; expected"
            f" {(num_heads + two_g, width)} and an even width"
        )
    if cos.shape[1] != width // 2:
        raise ValueError(f"cos is {cos.shape[1]} wide; expected {width // 2}")


def _rotate_and_write(
    heads_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    page_ref: Any,
    offset_ref: Any,
    _: Any,  # the input pool, aliased to pool_ref
    *others: Any,
    num_heads: int,
    eps: float | None,
    has_scales: bool,
    queries_per_row: int | None,
    block: int,
    half: int,
) -> None:
    *scale_refs, q_ref, pool_ref = others
    k_scale: Any = None
    v_scale: Any = None
    total, width = heads_ref.shape[1:]
    num_kv = (total - num_heads) // 2
    token = pl.program_id(0)
    if has_scales:
        *scale_refs, k_ref, v_ref = scale_refs
        only = token * 0  # the interpreter cannot load at a constant index
        k_scale, v_scale = plt.load(k_ref.at[only]), plt.load(v_ref.at[only])
    head = (pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32))[:, None]
    lane = jnp.arange(half, dtype=jnp.int32)
    inside = lane < width // 2
    cos = plt.load(cos_ref.at[token, lane], mask=inside, other=0.0)[None]
    sin = plt.load(sin_ref.at[token, lane], mask=inside, other=0.0)[None]
    column, inside = lane[None], inside[None]

    # Heads that are not written to the pool get an index outside of it: the interpreter implements
    # a masked store by writing the old value back, which could overwrite another head's new value.
    # In:  H = 2, G = 1, head = [0 1 2 3 4], of which 4 is padding
    # Out: pool_head = [2 3 0 1 3]: K_0 and V_0 go to 0 and 1, all others to 2G = 2 or beyond
    is_query, is_key = head < num_heads, head < num_heads + num_kv
    key = 2 * (head - num_heads)
    pool_head = jnp.where(is_query, 2 * num_kv + head, jnp.where(is_key, key, key - 2 * num_kv + 1))
    page, offset = plt.load(page_ref.at[token]), plt.load(offset_ref.at[token])

    q_outer, q_inner = token, head
    if queries_per_row is not None:  # other heads get an index outside, as above
        group = num_heads // num_kv
        q_outer = token // queries_per_row * num_kv + head // group
        q_outer = jnp.where(is_query, q_outer, q_ref.shape[0])
        q_inner = token % queries_per_row * group + head % group

    loaded = [
        plt.load(heads_ref.at[token, head, column + start], mask=(head < total) & inside, other=0.0)
        for start in (0, width // 2)
    ]
    first, second = (x.astype(jnp.float32) for x in loaded)
    if eps is not None:
        how: Any = {"width": width, "eps": eps, "dtype": heads_ref.dtype}
        first, second = norm_halves(
            (first, second),
            lambda i: _scale(scale_refs, i * (width // 2), lane, is_query=is_query),
            **how,
        )
    turned = turn(first, second, cos, sin)
    for plain, rotated, start in zip(loaded, turned, (0, width // 2), strict=True):
        value = jnp.where(is_key, rotated.astype(plain.dtype), plain)
        query, kept = value, value
        if has_scales:
            wide = value.astype(jnp.float32)
            query = (wide * k_scale).astype(q_ref.dtype)
            kept = wide / jnp.where(is_key, k_scale, v_scale)
        plt.store(q_ref.at[q_outer, q_inner, column + start], query, mask=is_query & inside)
        plt.store(
            pool_ref.at[page, offset, pool_head, column + start],
            stored(kept, pool_ref.dtype),
            mask=(head >= num_heads) & (head < total) & inside,
        )


def _scale(refs: list[Any], start: int, lane: jax.Array, *, is_query: jax.Array) -> jax.Array:
    inside = lane < refs[0].shape[0] // 2
    q, k = (
        plt.load(ref.at[start + lane], mask=inside, other=0.0).astype(jnp.float32)[None]
        for ref in refs
    )
    return jnp.where(is_query, q, k)
