"""Attention of rows of equal length over wide heads or latents, on an NVIDIA GPU (Pallas-Triton).

A program handles one row, one kv head, up to 64 of its queries (queries x heads of the group) and
every n-th block of the row's keys; gpu_merge.py merges the shares. Latents: see
latent_attention/reference.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from jspec.pallas_kernels.attention import gpu_plan
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_merge import in_order, merge_shares
from jspec.pallas_kernels.attention.gpu_plan import NUM_SMS, TILE_ROWS, tiles_of
from jspec.pallas_kernels.attention.tuning import WideTuning, choose_wide_tuning
from jspec.pallas_kernels.hopper import LOG2E, NOTHING
from jspec.pallas_kernels.kv_write.reference import records_of

MOST_QUERIES = 64  # of a row
# Shares of a row's keys; more would make the merge too expensive. Latents have one head.
MOST_SHARES, MOST_LATENT_SHARES = 16, 32
LEAST = 16  # of any side of a tensor core product
PIECE = 128  # most columns of a part whose sums are scaled at once


@dataclass(frozen=True, slots=True)
class _Static:
    """first, rest: widths of K's parts. V is as wide as the first; a latent's V is the first."""

    first: int
    rest: int
    is_latent: bool
    num_kv: int
    tiles: int
    stored: int
    shares: int
    block: int
    scale: float


def serves(
    q: jax.Array, pages: jax.Array, *, queries_per_row: int | None, window: int | None
) -> bool:
    """Return whether the kernel reads this pool: of q's dtype, without a window."""
    few = queries_per_row is not None and queries_per_row <= MOST_QUERIES
    return few and window is None and pages.dtype == q.dtype


def attend_rows(
    q: Float[Array, "T H Dq"],
    pages: Float[Array, "NP S *G2 D"],
    rows: AttentionMetadata,
    *,
    queries_per_row: int,
    scale: float,
    value_dim: int | None = None,
    sinks: Float[Array, "H"] | None = None,
    tuning: WideTuning | None = None,
    interpret: bool = False,
) -> Float[Array, "T H Dv"]:
    """Return out like attention/api.py, with Dv = D, or value_dim columns of a latent pool."""
    batch, num_heads, width = rows.page_table.shape[0], q.shape[1], q.shape[2]
    num_kv, num_records = records_of(pages)
    is_latent = num_records == 1
    first = (value_dim or width) if is_latent else width
    group = num_heads // num_kv
    tiles, stored = tiles_of(queries_per_row * group)
    tuning = tuning or choose_wide_tuning(first, rows=stored, is_latent=is_latent)
    items = batch * num_kv * tiles
    most = MOST_LATENT_SHARES if is_latent else MOST_SHARES
    blocks = -(-rows.page_table.shape[1] * pages.shape[1] // tuning.block)
    static = _Static(
        first=first,
        rest=width - first,
        is_latent=is_latent,
        num_kv=num_kv,
        tiles=tiles,
        stored=stored,
        shares=max(1, min(tuning.programs * NUM_SMS // items, blocks, most)),
        block=tuning.block,
        scale=scale,
    )
    plan = gpu_plan.plan_blocks(
        rows, queries_per_row=queries_per_row, group=group, window=None, block_tokens=tuning.block
    )
    packed = gpu_plan.pack_queries(q, batch, num_kv, queries_per_row, width=width)
    if tiles == 1:  # the kernel masks what is missing, which saves a launch
        packed = packed[:, : queries_per_row * group]
    wide = _wide(first)
    parts, heights = pl.pallas_call(
        functools.partial(_attend, static=static),
        grid=(items, static.shares),
        out_shape=(
            jax.ShapeDtypeStruct((static.shares, items, stored, wide), q.dtype),
            jax.ShapeDtypeStruct((static.shares, items, TILE_ROWS), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=tuning.warps, num_stages=tuning.stages),
        interpret=interpret,
        name="attend_wide",
    )(
        packed,
        rows.page_table,
        plan.bounds,
        plan.words,
        pages.reshape(*pages.shape[:2], num_kv * num_records, pages.shape[-1]),
    )
    sizes: Any = {"num_heads": num_heads, "num_kv": num_kv}
    if static.shares > 1 or sinks is not None:
        out = merge_shares(parts, heights, plan.valid, sinks, **sizes, interpret=interpret)
    else:
        out = in_order(parts[0], plan.valid, **sizes)
    return out[..., :first]


def _wide(size: int) -> int:
    return max(pl.next_power_of_2(size), LEAST)


def _attend(
    q_ref: Any,
    table_ref: Any,
    bounds_ref: Any,
    words_ref: Any,
    pool_ref: Any,
    parts_ref: Any,
    heights_ref: Any,
    *,
    static: _Static,
) -> None:
    item, share = pl.program_id(0), pl.program_id(1)
    packed, tile = item // static.tiles, item % static.tiles
    batch_row, head = packed // static.num_kv, packed % static.num_kv
    page_size, block = pool_ref.shape[1], static.block
    row = jnp.arange(max(pl.next_power_of_2(static.stored), LEAST), dtype=jnp.int32)
    is_row, query = (row < static.stored)[:, None], tile * static.stored + row
    only = item * 0  # jax 0.10 cannot interpret a load at a constant index
    edge, last, keys = (plt.load(bounds_ref.at[batch_row, only + i]) for i in (1, 2, 3))
    # (columns, end) of each part of K; the first parts are those of V.
    piece = min(_wide(static.first), PIECE)
    starts = range(0, _wide(static.first), piece)
    columns = [(start + jnp.arange(piece, dtype=jnp.int32)[None], static.first) for start in starts]
    if static.rest:
        rest = static.first + jnp.arange(_wide(static.rest), dtype=jnp.int32)[None]
        columns.append((rest, static.first + static.rest))
    q = [
        plt.load(
            q_ref.at[packed, query[:, None], column],
            mask=(is_row & (query < q_ref.shape[1])[:, None]) & (column < end),
            other=0.0,
        )
        for column, end in columns
    ]
    k_head = head if static.is_latent else 2 * head

    def absorb(i: jax.Array, carry: Any, *, is_masked: bool) -> Any:
        top, total, mixed = carry
        key = i * block + jnp.arange(block, dtype=jnp.int32)
        exists = key < keys
        index = jnp.where(exists, key // page_size, 0)
        page = plt.load(table_ref.at[batch_row, index], mask=exists, other=0)[:, None]
        offset = (key % page_size)[:, None]

        def record(which: Any, column: jax.Array, end: int) -> jax.Array:
            mask = exists[:, None] & (column < end)
            return plt.load(pool_ref.at[page, offset, which, column], mask=mask, other=0.0)

        k = [record(k_head, *of_part) for of_part in columns]
        v = k if static.is_latent else [record(k_head + 1, *of_part) for of_part in columns]
        products: Any = 0.0
        for a, b in zip(q, k, strict=True):
            products = products + plt.dot(a, b, trans_b=True)
        scores = products * (static.scale * LOG2E)
        if is_masked:
            place = words_ref.at[batch_row, tile, i - edge, key[None] % block // 32, row[:, None]]
            seen = ((plt.load(place) >> (key[None] % 32)) & 1) > 0
            scores = jnp.where(seen, scores, NOTHING)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new_top[:, None])
        if is_masked:
            weights = jnp.where(seen, weights, 0.0)
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        rounded = weights.astype(pool_ref.dtype)
        mixed = [x * shrink[:, None] + plt.dot(rounded, y) for x, y in zip(mixed, v, strict=False)]
        return new_top, total, mixed

    def turns(until: jax.Array) -> jax.Array:
        return jnp.maximum(until - share + static.shares - 1, 0) // static.shares

    carry: Any = (
        jnp.full(row.shape, NOTHING, jnp.float32),
        jnp.zeros(row.shape, jnp.float32),
        [jnp.zeros((row.shape[0], piece), jnp.float32) for _ in starts],
    )
    for first, end, is_masked in (
        (only, turns(edge), False),
        (turns(edge), turns(last), True),
    ):
        run = functools.partial(absorb, is_masked=is_masked)
        carry = lax.fori_loop(
            first,
            end,
            lambda turn, carry, run=run: run(turn * static.shares + share, carry),
            carry,
        )
    top, total, mixed = carry
    has_keys = total > 0
    total = jnp.where(has_keys, total, 1.0)
    for x, (column, _) in zip(mixed, columns, strict=False):
        mean = (x / total[:, None]).astype(parts_ref.dtype)
        plt.store(parts_ref.at[share, item, row[:, None], column], mean, mask=is_row)
    height = jnp.where(has_keys, top + jnp.log2(total), NOTHING)
    plt.store(heights_ref.at[share, item, row], height)
