"""Merging the softmax shares of a row's keys on an NVIDIA GPU (Pallas-Triton), in one launch: means
of values, weighted by 2^height, the log2 of each softmax denominator. A sink is one more height."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float

from jspec.device.pytree import pytree
from jspec.pallas_kernels.attention.gpu_plan import TILE_ROWS, tiles_of
from jspec.pallas_kernels.hopper import LOG2E, NOTHING


@pytree
class OtherShares:
    """Shares of shared prefixes, in the layout of gpu_shared.py."""

    parts: jax.Array  # [P, packs * G, stored, D]
    heights: jax.Array  # f32[P, packs * G, 64]
    pack_of: jax.Array  # i32[B], -1: in no pack
    place_of: jax.Array  # i32[B]


def merge_shares(
    parts: Float[Array, "P items stored D"],
    heights: Float[Array, "P items 64"],
    valid: Bool[Array, "B R"],
    sinks: Float[Array, "H"] | None = None,
    others: OtherShares | None = None,
    *,
    num_heads: int,
    num_kv: int,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Return the merged values of T = B * R queries in order, in the parts' dtype; 0 if not valid.
    items are B * G * tiles (gpu_plan.py); D is a power of two. others: of rows in packs."""
    batch, queries = valid.shape
    extra: tuple[jax.Array, ...] = () if sinks is None else (sinks,)
    if others is not None:
        extra = (*extra, others.parts, others.heights, others.pack_of, others.place_of)
    merged: jax.Array = pl.pallas_call(
        functools.partial(_merge_one, queries=queries, num_kv=num_kv, has_sinks=sinks is not None),
        grid=(batch * queries, num_heads),
        out_shape=jax.ShapeDtypeStruct((batch * queries, num_heads, parts.shape[3]), parts.dtype),
        compiler_params=plt.CompilerParams(num_warps=max(parts.shape[3] // 128, 1), num_stages=1),
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
    (batch, queries), group = valid.shape, num_heads // num_kv
    mixed = mixed.reshape(batch, num_kv, -1, mixed.shape[-1])[:, :, : queries * group]
    mixed = mixed.reshape(batch, num_kv, queries, group, -1)
    mixed = jnp.where(valid[:, None, :, None, None], mixed, 0).swapaxes(1, 2)
    return mixed.reshape(batch * queries, num_heads, -1)


def _merge_one(
    parts_ref: Any,
    heights_ref: Any,
    valid_ref: Any,
    *refs: Any,
    queries: int,
    num_kv: int,
    has_sinks: bool,
) -> None:
    """Merge one query and head. In: R = 2, group 4, query 1, head 6; Out: kv head 1, row 4 + 2."""
    sinks_ref, others_ref, out_ref = refs[:has_sinks], refs[has_sinks:-1], refs[-1]
    group = out_ref.shape[1] // num_kv
    tiles, _ = tiles_of(queries * group)
    token, head = pl.program_id(0), pl.program_id(1)
    batch_row, kv_head = token // queries, head // group
    row = token % queries * group + head % group
    item = (batch_row * num_kv + kv_head) * tiles + row // TILE_ROWS
    shares = [_shares_of(parts_ref, heights_ref, item, row % TILE_ROWS, exists=True)]
    if others_ref:
        other_parts, other_heights, pack_ref, place_ref = others_ref
        pack, place = plt.load(pack_ref.at[batch_row]), plt.load(place_ref.at[batch_row])
        item = jnp.maximum(pack, 0) * num_kv + kv_head
        row = place * queries * group + row
        shares.append(_shares_of(other_parts, other_heights, item, row, exists=pack >= 0))
    top = functools.reduce(jnp.maximum, [jnp.max(height) for height, _ in shares])
    if sinks_ref:
        sink = plt.load(sinks_ref[0].at[head]).astype(jnp.float32) * LOG2E
        top = jnp.maximum(top, sink)
    weights = [jnp.exp2(height - top) for height, _ in shares]
    total = sum(jnp.sum(weight) for weight in weights)
    if sinks_ref:
        total = total + jnp.exp2(sink - top)
    mixed: Any = 0.0
    for weight, (_, load_means) in zip(weights, shares, strict=True):
        mixed = mixed + jnp.sum(load_means() * weight[:, None], axis=0)
    is_valid = plt.load(valid_ref.at[batch_row, token % queries]) > 0
    out_ref[token, head, :] = jnp.where(is_valid, mixed / total, 0.0).astype(out_ref.dtype)


def _shares_of(parts_ref: Any, heights_ref: Any, item: Any, row: Any, *, exists: Any) -> Any:
    """Return (heights, -inf if missing; a loader of means, 0 if missing) of one row of a tile."""
    num_parts, _, _, width = parts_ref.shape
    part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)
    is_there = (part < num_parts) & exists
    height = plt.load(heights_ref.at[part, item, row], mask=is_there, other=NOTHING)
    height = jnp.where(is_there, height, -jnp.inf)

    def load_means() -> Any:
        column = jnp.arange(width, dtype=jnp.int32)
        place = parts_ref.at[part[:, None], item, row, column[None]]
        return plt.load(place, mask=is_there[:, None], other=0.0).astype(jnp.float32)

    return height, load_means
