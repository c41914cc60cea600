"""Merging the shares of a row's keys: one softmax from many, on an NVIDIA GPU (Pallas-Triton).

gpu.py cuts a row's keys into shares when few rows would leave the chip idle. Each
share gives a mean of values and its height, the log2 of its softmax denominator; the result is the
mean of the means, weighted by 2^height. A sink is one more height, without values. XLA would make
two or three kernels of it; here one program reads the shares of one query and head and writes them
to its place in the order of queries.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float

from jspec.pallas_kernels.attention.block_plan import TILE_ROWS
from jspec.pallas_kernels.attention.query_tiles import tiles_of
from jspec.pallas_kernels.hopper import LOG2E, NOTHING


def merge_shares(
    parts: Float[Array, "P items stored D"],
    heights: Float[Array, "P items 64"],
    valid: Bool[Array, "B R"],
    sinks: Float[Array, "H"] | None = None,
    *,
    num_heads: int,
    num_kv: int,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """The mixed values of T = B * R queries in order, in the parts' dtype; 0 where not valid.

    items are B * G * tiles, laid out by query_tiles.py; D is a power of two.
    """
    batch, queries = valid.shape
    extra = () if sinks is None else (sinks,)
    merged: jax.Array = pl.pallas_call(
        functools.partial(_merge_one, queries=queries, num_kv=num_kv),
        grid=(batch * queries, num_heads),
        out_shape=jax.ShapeDtypeStruct((batch * queries, num_heads, parts.shape[3]), parts.dtype),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="merge_shares",
    )(parts, heights, valid.astype(jnp.int32), *extra)
    return merged


def reference(
    parts: Float[Array, "P items stored D"],
    heights: Float[Array, "P items 64"],
    valid: Bool[Array, "B R"],
    sinks: Float[Array, "H"] | None = None,
    *,
    num_heads: int,
    num_kv: int,
) -> Float[Array, "T H D"]:
    """The definition of `merge_shares`, whole arrays at a time."""
    heights = heights[:, :, : parts.shape[2]]
    total = jnp.exp2(heights - jnp.max(heights, axis=0))
    mixed = jnp.sum(parts.astype(jnp.float32) * total[..., None], axis=0)
    mixed = mixed / jnp.sum(total, axis=0)[..., None]
    out = in_order(mixed, valid, num_heads=num_heads, num_kv=num_kv)
    if sinks is not None:
        height = jnp.max(heights, axis=0) + jnp.log2(jnp.sum(total, axis=0))
        height = in_order(height[..., None], valid, num_heads=num_heads, num_kv=num_kv)
        out = out / (1 + jnp.exp2(sinks.astype(jnp.float32)[:, None] * LOG2E - height))
    return out.astype(parts.dtype)


def in_order(
    mixed: Float[Array, "items stored D"], valid: Bool[Array, "B R"], *, num_heads: int, num_kv: int
) -> Float[Array, "T H D"]:
    """Results as the kernel of rows lays them, in the order of queries; 0 where not valid."""
    (batch, queries), group = valid.shape, num_heads // num_kv
    mixed = mixed.reshape(batch, num_kv, -1, mixed.shape[-1])[:, :, : queries * group]
    mixed = mixed.reshape(batch, num_kv, queries, group, -1)
    mixed = jnp.where(valid[:, None, :, None, None], mixed, 0).swapaxes(1, 2)
    return mixed.reshape(batch * queries, num_heads, -1)


def _merge_one(
    parts_ref: Any, heights_ref: Any, valid_ref: Any, *refs: Any, queries: int, num_kv: int
) -> None:
    """One query and head. In: R = 2, group = 4, query 1, head 6    Out: kv head 1, row 4 + 2."""
    *sinks_ref, out_ref = refs
    num_parts, _, _, width = parts_ref.shape
    group = out_ref.shape[1] // num_kv
    tiles, _ = tiles_of(queries * group)
    token, head = pl.program_id(0), pl.program_id(1)
    row = token % queries * group + head % group
    item = (token // queries * num_kv + head // group) * tiles + row // TILE_ROWS
    row = row % TILE_ROWS
    part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)
    column = jnp.arange(width, dtype=jnp.int32)
    exists = part < num_parts
    height = plt.load(heights_ref.at[part, item, row], mask=exists, other=NOTHING)
    top = jnp.max(height)
    if sinks_ref:
        sink = plt.load(sinks_ref[0].at[head]).astype(jnp.float32) * LOG2E
        top = jnp.maximum(top, sink)
    weight = jnp.where(exists, jnp.exp2(height - top), 0.0)
    total = jnp.sum(weight)
    if sinks_ref:
        total = total + jnp.exp2(sink - top)
    means = plt.load(
        parts_ref.at[part[:, None], item, row, column[None]], mask=exists[:, None], other=0.0
    )
    mixed = jnp.sum(means.astype(jnp.float32) * weight[:, None], axis=0) / total
    is_valid = plt.load(valid_ref.at[token // queries, token % queries]) > 0
    out_ref[token, head, :] = jnp.where(is_valid, mixed, 0.0).astype(out_ref.dtype)
