"""Writing K and V to pages.

A pool is [num_pages, page_size, 2 * G, D]: head 2g is K_g, head 2g + 1 is V_g. Page 0 is the dummy,
which takes all writes that must go nowhere else. Indices are never negative.

Written values are finite (`finite`): 0 times NaN is NaN, so one row's overflow would reach every
query whose product includes that slot, visible or not. The GPU kernel (gpu.py) uses it, too.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

# Replaces infinities: the largest float16. The maximum of a wider type would overflow in the next
# product.
LARGE = 65504.0


def finite(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Replace NaN by 0 and infinities by LARGE with their sign; finite values keep their bits.

    In:  1.5  inf    -inf    NaN
    Out: 1.5  65504  -65504  0
    """
    wide = x.astype(jnp.float32)
    stand_in = jnp.where(wide > 0, LARGE, jnp.where(wide < 0, -LARGE, 0.0))
    return jnp.where(jnp.abs(wide) < jnp.inf, x, stand_in.astype(x.dtype))


def interleave_kv(
    k: Float[Array, "T G Dk"], v: Float[Array, "T G Dv"], *, width: int
) -> Float[Array, "T G2 D"]:
    """Return heads [K_0, V_0, K_1, V_1, ...], zero-padded to the pool's `width`."""
    pairs = [jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (k, v)]
    return jnp.stack(pairs, axis=2).reshape(k.shape[0], 2 * k.shape[1], width)


def pool_rows(
    k: Float[Array, "T G Dk"], v: Float[Array, "T G Dv"], *, width: int, dtype: DTypeLike
) -> Float[Array, "T G2 D"]:
    """Return the values to store in a pool: interleaved, rounded to dtype and finite."""
    return finite(interleave_kv(k, v, width=width).astype(dtype))


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
    pages: Float[Array, "NP S G2 D"],
    page: Int[Array, "*n"],
    offset: Int[Array, "*n"],
    values: Float[Array, "*n G2 D"],
) -> Float[Array, "NP S G2 D"]:
    """Set pages[page, offset] = values, in place if the pool is donated."""
    return pages.at[page, offset].set(values.astype(pages.dtype), mode="promise_in_bounds")
