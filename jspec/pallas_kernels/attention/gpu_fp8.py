"""Decode attention over FP8 pools for at most 16 packed queries (group x R), on a GPU (Triton):
gpu.py without its second store of converted K and V."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jspec.pallas_kernels.attention import gpu_plan
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_merge import merge_shares
from jspec.pallas_kernels.attention.gpu_plan import NUM_SMS, TILE_ROWS, BlockPlan, tiles_of
from jspec.pallas_kernels.hopper import LOG2E, NOTHING
from jspec.spec.cache_entry import FP8

MOST_PACKED = 16  # M of the smallest tensor core product
MOST_SHARES = 32
PROGRAMS = 4 * NUM_SMS  # programs that run at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Parameters that affect speed only."""

    block: int = 64  # keys of one iteration
    num_warps: int = 2
    num_stages: int = 2
    splits: int | None = None  # shares of a row's keys; None: as many as run at once


@dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    num_kv: int
    group: int
    queries: int  # R
    splits: int
    scale: float
    windowed: bool
    tuning: Tuning
    is_direct: bool  # the result is final


def serves(kv_pages: jax.Array, *, queries_per_row: int, group: int) -> bool:
    """Return whether the kernel reads this pool, for this number of packed queries."""
    is_fp8 = kv_pages.dtype == FP8 and kv_pages.shape[3] in (64, 128)
    return is_fp8 and queries_per_row * group <= MOST_PACKED


def attend_rows(
    q: jax.Array,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    scale: float,
    queries_per_row: int,
    packed_heads: int,
    window: int | None = None,
    sinks: jax.Array | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return out[T, H, D] in f16 as gpu.attend_rows does. q: in the layout of pack_queries."""
    tuning = tuning or Tuning()
    block = tuning.block
    _, page_size, two_g, width = kv_pages.shape
    num_kv, batch = two_g // 2, rows.page_table.shape[0]
    group = packed_heads // num_kv
    blocks = -(-rows.page_table.shape[1] * page_size // block)
    splits = tuning.splits or max(1, min(PROGRAMS // (batch * num_kv), blocks, MOST_SHARES))
    plan = gpu_plan.plan_blocks(
        rows, queries_per_row=queries_per_row, group=group, window=window, block_tokens=block
    )
    static = _Static(
        num_kv=num_kv,
        group=group,
        queries=queries_per_row,
        splits=splits,
        scale=scale,
        windowed=window is not None,
        tuning=tuning,
        is_direct=splits == 1 and sinks is None,
    )
    _, stored = tiles_of(group * queries_per_row)
    packed = q.reshape(batch * num_kv, stored, width)
    found = _launch(packed, kv_pages, rows.page_table, plan, static=static, interpret=interpret)
    if static.is_direct:
        return found[0]
    sizes: Any = {"num_heads": packed_heads, "num_kv": num_kv}
    parts, heights = found
    return merge_shares(parts, heights, plan.valid, sinks, **sizes, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("static", "interpret"), inline=False)
def _launch(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    plan: BlockPlan,
    *,
    static: _Static,
    interpret: bool,
) -> list[jax.Array]:
    (items, stored, width), batch = q.shape, page_table.shape[0]
    array: Any = jax.ShapeDtypeStruct
    shapes = [
        array((static.splits, items, stored, width), q.dtype),
        array((static.splits, items, TILE_ROWS), jnp.float32),
    ]
    if static.is_direct:
        heads = static.num_kv * static.group
        shapes = [array((batch * static.queries, heads, width), q.dtype)]
    found: Any = pl.pallas_call(
        functools.partial(_attend, static=static),
        grid=(static.num_kv, batch * static.splits),
        out_shape=shapes,
        compiler_params=plt.CompilerParams(
            num_warps=static.tuning.num_warps, num_stages=static.tuning.num_stages
        ),
        interpret=interpret,
        name="attend_fp8_rows",
    )(q, pool, page_table, plan.bounds, plan.words, plan.lowest)
    return list(found)


def _attend(
    q_ref: Any,
    pool_ref: Any,
    table_ref: Any,
    bounds_ref: Any,
    words_ref: Any,
    lowest_ref: Any,
    *out_refs: Any,
    static: _Static,
) -> None:
    head, share = pl.program_id(0), pl.program_id(1)
    row, split = share // static.splits, share % static.splits
    width, page_size = q_ref.shape[2], pool_ref.shape[1]
    block = static.tuning.block
    item = row * static.num_kv + head
    first, edge, last, keys, valid = (plt.load(bounds_ref.at[row, row * 0 + i]) for i in range(5))
    begin = first + (last - first) * split // static.splits
    end = first + (last - first) * (split + 1) // static.splits
    # Rows past the last query and head repeat that one.
    count = static.group * static.queries
    packed = jnp.minimum(jnp.arange(MOST_PACKED, dtype=jnp.int32), count - 1)
    lane = jnp.arange(width, dtype=jnp.int32)
    q = plt.load(q_ref.at[item, packed[:, None], lane[None]])
    last_page = jnp.maximum((keys - 1) // page_size, 0)
    lowest = plt.load(lowest_ref.at[row, row * 0, packed]) if static.windowed else None

    def read(i: jax.Array, *, masked: bool) -> tuple[jax.Array, jax.Array]:
        key = i * block + jnp.arange(block, dtype=jnp.int32)
        if page_size % block == 0:  # one page a block
            page = plt.load(table_ref.at[row, jnp.minimum(i * block // page_size, last_page)])
            offset = (i * block % page_size + jnp.arange(block, dtype=jnp.int32))[:, None]
        else:
            page = plt.load(table_ref.at[row, jnp.minimum(key // page_size, last_page)])[:, None]
            offset = (key % page_size)[:, None]
        is_there = (key < keys)[:, None] if masked else None
        how: dict[str, Any] = {"mask": is_there, "other": 0.0} if masked else {}
        k, v = (
            plt.load(pool_ref.at[page, offset, 2 * head + i, lane[None]], **how).astype(q.dtype)
            for i in range(2)
        )
        return k, v

    def seen(i: jax.Array, *, masked: bool) -> jax.Array | None:
        column = jnp.arange(block, dtype=jnp.int32)
        if masked:
            at = (row, row * 0, i - edge)
            bits = plt.load(words_ref.at[*at, row * 0, packed])[:, None]
            for w in range(1, block // 32):
                word = plt.load(words_ref.at[*at, row * 0 + w, packed])
                bits = jnp.where(column[None] < 32 * w, bits, word[:, None])
            return ((bits >> (column & 31)[None]) & 1) != 0
        if lowest is None:
            return None
        return (column + i * block)[None] >= lowest[:, None]

    def step(i: jax.Array, carry: tuple[jax.Array, ...], *, masked: bool) -> tuple[jax.Array, ...]:
        top, total, mixed = carry
        k, v = read(i, masked=masked)
        scores = plt.dot(q, k, trans_b=True) * (static.scale * LOG2E)
        sees = seen(i, masked=masked)
        scores = scores if sees is None else jnp.where(sees, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_top[:, None])
        fade = jnp.exp2(top - new_top)
        total = total * fade + jnp.sum(weights, axis=1)
        return new_top, total, mixed * fade[:, None] + plt.dot(weights.astype(v.dtype), v)

    carry: tuple[jax.Array, ...] = (
        jnp.full((MOST_PACKED,), NOTHING, jnp.float32),
        jnp.zeros((MOST_PACKED,), jnp.float32),
        jnp.zeros((MOST_PACKED, width), jnp.float32),
    )
    whole = jnp.clip(edge, begin, end)
    carry = lax.fori_loop(begin, whole, functools.partial(step, masked=False), carry)
    top, total, mixed = lax.fori_loop(whole, end, functools.partial(step, masked=True), carry)
    safe = jnp.maximum(total, 1e-30)
    mean = (mixed / safe[:, None]).astype(q.dtype)
    if static.is_direct:
        query, of_group = packed // static.group, packed % static.group
        place = (row * static.queries + query)[:, None]
        mean = jnp.where((query < valid)[:, None], mean, jnp.zeros_like(mean))
        in_heads = (head * static.group + of_group)[:, None]
        plt.store(out_refs[0].at[place, in_heads, lane[None]], mean)
        return
    plt.store(out_refs[0].at[split, item, packed[:, None], lane[None]], mean)
    height = jnp.where(total > 0, top + jnp.log2(safe), NOTHING)
    plt.store(out_refs[1].at[split, item, packed], height)
