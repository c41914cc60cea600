"""Attention for rows with a common prefix on a Hopper GPU: cascade attention (FlashInfer, vLLM).

gpu.py runs twice: over packs, up to 64 queries of rows with one prefix against all its keys, and
over each row's own keys after it. gpu_merge.py merges both.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.config.shared_prefixes import UNIT
from jspec.device.batch import SharedPrefixes
from jspec.device.pytree import pytree
from jspec.pallas_kernels.attention import gpu, gpu_plan
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_merge import OtherShares, merge_shares
from jspec.pallas_kernels.attention.gpu_plan import TILE_ROWS, BlockPlan, tiles_of
from jspec.pallas_kernels.attention.tuning import Tuning


@pytree
class Packs:
    """P packs of up to C rows with one prefix; other rows read all of their keys themselves."""

    rows: jax.Array  # i32[P, C], the rows of each pack; 0 for empty places
    num_keys: jax.Array  # i32[P], keys of the prefix; 0: empty pack
    pack_of: jax.Array  # i32[B], -1: in no pack
    place_of: jax.Array  # i32[B], place in its pack


def rows_a_pack(*, queries_per_row: int, group: int) -> int:
    """Return C, the rows whose queries fit into one tile. In: R = 4, group 4; Out: 4"""
    return TILE_ROWS // (queries_per_row * group)


def serves(*, queries_per_row: int, group: int) -> bool:
    return rows_a_pack(queries_per_row=queries_per_row, group=group) > 1


def pack_rows(shared: SharedPrefixes, *, capacity: int) -> Packs:
    """Assign the rows of each leader, in order, to packs of `capacity`.

    In:  leaders 0 0 2 0 3, num_keys 128 128 0 128 0, capacity 2
    Out: rows [0 1] [3 .], num_keys 128 128 0 0 0, pack_of 0 0 -1 1 -1, place_of 0 1 0 0 0
    """
    (batch,) = shared.leaders.shape
    # Twice as many packs as one prefix needs; rows of further prefixes are read individually.
    num_packs = min(2 * -(-batch // capacity), batch)
    index = jnp.arange(batch, dtype=jnp.int32)
    is_sharing = shared.num_keys > 0
    same = (shared.leaders[:, None] == shared.leaders) & is_sharing[:, None] & is_sharing
    rank = jnp.sum(same & (index < index[:, None]), axis=1, dtype=jnp.int32)
    opens = is_sharing & (rank % capacity == 0)
    number = jnp.cumsum(opens, dtype=jnp.int32) - 1
    opener = jnp.argmax(same & (rank == (rank - rank % capacity)[:, None]), axis=1)
    pack_of = jnp.where(is_sharing, number[opener], num_packs)
    place_of = jnp.where(is_sharing, rank % capacity, 0)
    rows = jnp.zeros((num_packs, capacity), jnp.int32)
    return Packs(
        rows=rows.at[pack_of, place_of].set(index, mode="drop"),
        num_keys=jnp.zeros(num_packs, jnp.int32).at[pack_of].max(shared.num_keys, mode="drop"),
        pack_of=jnp.where(pack_of < num_packs, pack_of, -1),
        place_of=place_of,
    )


def attend_shared(
    q: Float[Array, "BG rows D"],
    kv_pages: Float[Array, "NP S G2 D"],
    rows: AttentionMetadata,
    *,
    num_heads: int,
    queries_per_row: int,
    scale: float,
    sinks: Float[Array, "H"] | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Attend like gpu.attend_rows without a window, for q as gpu_plan.pack_queries returns it."""
    tuning = tuning or Tuning()
    if interpret:
        tuning = replace(tuning, weights="shared")
    batch, num_kv = rows.page_table.shape[0], kv_pages.shape[2] // 2
    group, block = num_heads // num_kv, tuning.block_tokens
    if rows.shared is None or not serves(queries_per_row=queries_per_row, group=group):
        raise ValueError(
            f"{queries_per_row} queries a row of groups of {group} and shared {rows.shared}; "
            f"expected rows that share, two of which fit into {TILE_ROWS} queries"
        )
    assert UNIT % block == 0
    capacity = rows_a_pack(queries_per_row=queries_per_row, group=group)
    packs = pack_rows(rows.shared, capacity=capacity)
    fixed = {"scale": scale, "windowed": False, "in_parts": True}
    pool = kv_pages.reshape(*kv_pages.shape[:2], -1)

    own = gpu.shape_of(
        (batch * queries_per_row, num_heads, q.shape[2]),
        kv_pages,
        rows,
        queries_per_row=queries_per_row,
        tuning=tuning,
        interpreted=interpret,
        **fixed,
    )
    plan = _after_prefix(
        gpu_plan.plan_blocks(
            rows, queries_per_row=queries_per_row, group=group, window=None, block_tokens=block
        ),
        packs,
        block_tokens=block,
    )
    of_packs = replace(
        rows, page_table=jnp.take(rows.page_table, packs.rows[:, 0], axis=0, mode="clip")
    )
    splits = gpu_plan.choose_splits(
        programs=-(-batch // capacity) * num_kv,
        max_blocks=-(-rows.page_table.shape[1] * kv_pages.shape[1] // block),
    )
    common = gpu.shape_of(
        (packs.rows.size * queries_per_row, num_heads, q.shape[2]),
        kv_pages,
        of_packs,
        queries_per_row=capacity * queries_per_row,
        tuning=replace(tuning, splits=tuning.splits or splits),
        interpreted=interpret,
        **fixed,
    )
    # Prefixes first: the rows' own keys keep the chip busy while these programs end.
    parts, heights = gpu.launch(
        _queries_of_packs(q, packs, num_kv=num_kv, per_row=queries_per_row * group),
        pool,
        of_packs.page_table,
        _plan_of_packs(packs, queries=capacity * queries_per_row, block_tokens=block),
        shape=common,
    )
    others = OtherShares(
        parts=parts, heights=heights, pack_of=packs.pack_of, place_of=packs.place_of
    )
    parts, heights = gpu.launch(
        q.reshape(-1, own.stored, own.width), pool, rows.page_table, plan, shape=own
    )
    return merge_shares(
        parts,
        heights,
        plan.valid,
        sinks,
        others,
        num_heads=num_heads,
        num_kv=num_kv,
        interpret=interpret,
    ).astype(q.dtype)


def _after_prefix(plan: BlockPlan, packs: Packs, *, block_tokens: int) -> BlockPlan:
    keys = jnp.take(packs.num_keys, packs.pack_of, mode="clip")
    first = jnp.where(packs.pack_of >= 0, keys // block_tokens, plan.bounds[:, 0])
    first = jnp.minimum(first, plan.bounds[:, 1])
    return replace(plan, bounds=plan.bounds.at[:, 0].set(first, mode="promise_in_bounds"))


def _plan_of_packs(packs: Packs, *, queries: int, block_tokens: int) -> BlockPlan:
    num_packs, zeros = packs.num_keys.shape[0], jnp.zeros_like(packs.num_keys)
    last = packs.num_keys // block_tokens
    return BlockPlan(
        bounds=jnp.stack([zeros, last, last, packs.num_keys, zeros + queries], axis=1),
        words=jnp.zeros((num_packs, 1, 1, block_tokens // 32, TILE_ROWS), jnp.int32),
        lowest=jnp.zeros((num_packs, 1, TILE_ROWS), jnp.int32),
        valid=jnp.ones((num_packs, queries), bool),
    )


def _queries_of_packs(q: jax.Array, packs: Packs, *, num_kv: int, per_row: int) -> jax.Array:
    """Return [P * G, stored, D]: per pack and kv head, the queries of its rows in order.

    In:  P = 1, C = 2, G = 1, rows [3 5], 2 queries each   Out: [q30 q31 q50 q51 . . . .]
    """
    num_packs, capacity = packs.rows.shape
    _, stored = tiles_of(capacity * per_row)
    q = q.reshape(-1, num_kv, *q.shape[1:])[:, :, :per_row]
    q = jnp.take(q, packs.rows, axis=0, mode="clip").swapaxes(1, 2)  # [P, G, C, per_row, D]
    q = q.reshape(num_packs * num_kv, capacity * per_row, q.shape[-1])
    return jnp.pad(q, ((0, 0), (0, stored - q.shape[1]), (0, 0)))
