"""Attention of a single row with a single query on an NVIDIA GPU (Triton), with RoPE and KV write.

One launch rounds like kv_write/gpu.py and gpu.py. A program handles one kv head and a share of the
row's keys; the first share's program also writes the new key and value, and takes them from
registers, so no program reads what this launch writes.
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
from jaxtyping import Array, Float, Int

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_merge import merge_shares
from jspec.pallas_kernels.attention.gpu_plan import NUM_SMS, TILE_ROWS, tiles_of
from jspec.pallas_kernels.hopper import LOG2E, NOTHING
from jspec.pallas_kernels.kv_write.api import HeadNorms, Rotation
from jspec.pallas_kernels.kv_write.reference import finite, norm_halves, turn
from jspec.pallas_kernels.shapes import GPT_OSS_20B, QWEN3_30B_A3B

BLOCK = 64  # keys of one iteration
MOST_SHARES = 32  # heights per lane of the merge
LEAST_GROUP = 16  # M of the smallest tensor core tile
MOST_GROUP = 16  # heads of a kv head
# (H, G, D) for which a step of one row was faster with this kernel on an H200
# (benchmarks/results/step_trace_one_row_h200.json), and the longest row of that engine.
TIMED = {QWEN3_30B_A3B.heads, GPT_OSS_20B.heads}
MOST_KEYS = 8448


@dataclass(frozen=True, slots=True)
class _Static:
    num_heads: int
    num_shares: int
    scale: float
    window: int | None
    eps: float | None  # eps of the heads' norms; None: no norms


def serves(
    heads: jax.Array, kv_pages: jax.Array, rows: AttentionMetadata, *, num_heads: int
) -> bool:
    """Return whether the kernel supports heads[1, H + 2G, D] and this pool: one row, no tree."""
    num_kv, width = kv_pages.shape[2] // 2, kv_pages.shape[3]
    return (
        heads.shape[0] == rows.page_table.shape[0] == 1
        and rows.tail_mask is None
        and heads.shape[2] == width
        and width in (64, 128, 256)
        and num_heads % num_kv == 0
        and num_heads // num_kv <= MOST_GROUP
        and heads.dtype == kv_pages.dtype
    )


def pays(kv_pages: jax.Array, rows: AttentionMetadata, *, num_heads: int) -> bool:
    """Return whether the kernel was measured to be faster than the two that it replaces."""
    _, page_size, two_g, width = kv_pages.shape
    fits = rows.page_table.shape[1] * page_size <= MOST_KEYS
    return fits and (num_heads, two_g // 2, width) in TIMED


def rotate_write_and_attend(
    heads: Float[Array, "one heads D"],
    rotation: Rotation,
    kv_pages: Float[Array, "NP S G2 D"],
    rows: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, "H"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "one H D"], Float[Array, "NP S G2 D"]]:
    """Fulfil api.py for one row's heads (q, k, v) before norms and RoPE."""
    num_kv, page_size = kv_pages.shape[2] // 2, kv_pages.shape[1]
    blocks = -(-rows.page_table.shape[1] * page_size // BLOCK)
    static = _Static(
        num_heads=rotation.num_heads,
        num_shares=max(1, min(2 * NUM_SMS // num_kv, blocks, MOST_SHARES)),
        scale=scale,
        window=window,
        eps=None if rotation.norms is None else rotation.norms.eps,
    )
    parts, heights, kv_pages = _launch(heads, rotation, kv_pages, rows, static, interpret=interpret)
    valid = (rows.cu_q_lens[1:] > rows.cu_q_lens[:-1])[:, None]
    sizes: Any = {"num_heads": rotation.num_heads, "num_kv": num_kv}
    return merge_shares(parts, heights, valid, sinks, **sizes, interpret=interpret), kv_pages


def _launch(
    heads: jax.Array,
    rotation: Rotation,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    static: _Static,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_kv, width = kv_pages.shape[2] // 2, kv_pages.shape[3]
    _, stored = tiles_of(static.num_heads // num_kv)
    place: Int[Array, "4"] = jnp.stack(
        [rows.prefix_lens[0], rows.q_positions[0], rows.cu_q_lens[0], rows.cu_q_lens[1]]
    )
    norms: HeadNorms | None = rotation.norms
    operands = [heads, rotation.cos, rotation.sin, rows.page_table, place, kv_pages]
    operands += [] if norms is None else [norms.q, norms.k]
    shape = (static.num_shares, num_kv)
    out: tuple[jax.Array, jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_attend, static=static),
        grid=(num_kv, static.num_shares),
        out_shape=(
            jax.ShapeDtypeStruct((*shape, stored, width), heads.dtype),
            jax.ShapeDtypeStruct((*shape, TILE_ROWS), jnp.float32),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        input_output_aliases={5: 2},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attend_one_row",
    )(*operands)
    return out


def _attend(
    heads_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    table_ref: Any,
    place_ref: Any,
    _before: Any,  # the input pool, aliased to pool_ref
    *norms_and_out: Any,
    static: _Static,
) -> None:
    *norm_refs, parts_ref, heights_ref, pool_ref = norms_and_out
    head, share = pl.program_id(0), pl.program_id(1)
    page_size, two_g, width = pool_ref.shape[1:]
    half, group = width // 2, static.num_heads // (two_g // 2)
    only = head * 0  # jax 0.10 cannot interpret a store at a constant index
    prefix, position = plt.load(place_ref.at[only]), plt.load(place_ref.at[only + 1])
    is_row = plt.load(place_ref.at[only + 3]) > plt.load(place_ref.at[only + 2])
    lane = jnp.arange(half, dtype=jnp.int32)
    angles = (plt.load(cos_ref.at[only, lane])[None], plt.load(sin_ref.at[only, lane])[None])

    def rotated(which: jax.Array, mask: jax.Array, norm_ref: Any) -> list[jax.Array]:
        halves = [
            plt.load(heads_ref.at[only, which, lane[None] + start], mask=mask, other=0.0)
            for start in (0, half)
        ]
        first, second = (x.astype(jnp.float32) for x in halves)
        if norm_ref is not None:
            how: Any = {"width": width, "eps": static.eps, "dtype": heads_ref.dtype}
            first, second = norm_halves(
                (first, second),
                lambda i: plt.load(norm_ref.at[lane + i * half]).astype(jnp.float32)[None],
                **how,
            )
        return [x.astype(heads_ref.dtype) for x in turn(first, second, *angles)]

    row = jnp.arange(LEAST_GROUP, dtype=jnp.int32)
    is_head = row < group
    q_norm, k_norm = norm_refs or (None, None)
    q = rotated((head * group + row)[:, None], is_head[:, None], q_norm)

    def scored(products: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(seen, products * (static.scale * LOG2E), NOTHING)

    def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, mixed = carry
        key = (i * static.num_shares + share) * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        seen = (key < prefix) & is_row
        if static.window is not None:
            seen = seen & (position - key < static.window)
        index = jnp.where(seen, key // page_size, 0)
        page = plt.load(table_ref.at[only, index], mask=seen, other=0)[:, None]
        offset, mask = (key % page_size)[:, None], seen[:, None]
        k = [
            plt.load(pool_ref.at[page, offset, 2 * head, lane[None] + start], mask=mask, other=0.0)
            for start in (0, half)
        ]
        column = jnp.arange(width, dtype=jnp.int32)[None]
        v = plt.load(pool_ref.at[page, offset, 2 * head + 1, column], mask=mask, other=0.0)
        products = plt.dot(q[0], k[0], trans_b=True) + plt.dot(q[1], k[1], trans_b=True)
        scores = scored(products, seen[None])
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(seen[None], jnp.exp2(scores - new_top[:, None]), 0.0)
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + plt.dot(weights.astype(v.dtype), v)
        return new_top, total, mixed

    first = 0 * prefix
    if static.window is not None:
        first = jnp.maximum(position - static.window + 1, 0) // (BLOCK * static.num_shares)
    last = (prefix + BLOCK * static.num_shares - 1) // (BLOCK * static.num_shares)
    carry = (
        jnp.full((LEAST_GROUP,), NOTHING, jnp.float32),
        jnp.zeros((LEAST_GROUP,), jnp.float32),
        jnp.zeros((LEAST_GROUP, width), jnp.float32),
    )
    top, total, mixed = lax.fori_loop(first, last, block, carry)

    # The new key belongs to the first share.
    is_mine = (share == 0) & is_row
    one = jnp.zeros((1, 1), jnp.int32)
    num_kv = two_g // 2
    k_new = rotated(one + static.num_heads + head, one == 0, k_norm)
    k_new = [finite(x.astype(pool_ref.dtype)) for x in k_new]
    column = jnp.arange(width, dtype=jnp.int32)
    v_new = plt.load(heads_ref.at[only, static.num_heads + num_kv + head, column])
    v_new = finite(v_new.astype(pool_ref.dtype))
    inside = prefix < table_ref.shape[1] * page_size
    index = jnp.where(inside, prefix // page_size, 0)
    page = jnp.where(inside & is_row, plt.load(table_ref.at[only, index]), 0)
    offset = prefix % page_size
    first_half, second_half = (
        jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=1)
        for a, b in zip(q, k_new, strict=True)
    )
    products = first_half + second_half
    scores = scored(products, is_mine)
    new_top = jnp.maximum(top, scores)
    weight = jnp.where(is_mine, jnp.exp2(scores - new_top), 0.0)
    shrink = jnp.exp2(top - new_top)
    total = total * shrink + weight
    rounded = weight.astype(v_new.dtype).astype(jnp.float32)
    mixed = mixed * shrink[:, None] + rounded[:, None] * v_new.astype(jnp.float32)[None]

    @pl.when(share == 0)
    def _() -> None:
        for x, start in zip(k_new, (0, half), strict=True):
            where = pool_ref.at[page, offset, one + 2 * head, lane[None] + start]
            plt.store(where, x)
        plt.store(pool_ref.at[page, offset, 2 * head + 1, column], v_new)

    has_keys = total > 0
    mean = mixed / jnp.where(has_keys, total, 1.0)[:, None]
    height = jnp.where(has_keys, new_top + jnp.log2(jnp.where(has_keys, total, 1.0)), NOTHING)
    stored = row[:, None] < parts_ref.shape[2]
    into = jnp.minimum(row, parts_ref.shape[2] - 1)[:, None]
    plt.store(
        parts_ref.at[share, head, jnp.where(stored, row[:, None], into), column[None]],
        mean.astype(parts_ref.dtype),
        mask=stored,
    )
    plt.store(heights_ref.at[share, head, row], height)
