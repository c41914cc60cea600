"""Writing K and V into pages, and moving an accepted tree path to the front.

A pool is [num_pages, page_size, 2 * G, D]: head 2g is K_g, head 2g + 1 is V_g. Page 0 is the
dummy: whatever must not be written anywhere else is written there. No index is ever negative.

What is written is finite (`finite`): a masked weight of 0 times NaN would be NaN, and one row's
overflow would reach every query whose product takes that row in, seen or not. The GPU's kernel
that writes (rotate_write_gpu.py) calls the same function.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

# What an infinity becomes: the largest number of float16. In the wider types their own largest
# would only overflow in the next product.
LARGE = 65504.0


def finite(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """x with NaN as 0 and an infinity as LARGE of its sign; what is finite keeps its bits.

    In:  1.5  inf    -inf    NaN
    Out: 1.5  65504  -65504  0
    """
    wide = x.astype(jnp.float32)
    stand_in = jnp.where(wide > 0, LARGE, jnp.where(wide < 0, -LARGE, 0.0))
    return jnp.where(jnp.abs(wide) < jnp.inf, x, stand_in.astype(x.dtype))


def interleave_kv(
    k: Float[Array, "T G Dk"], v: Float[Array, "T G Dv"], *, width: int
) -> Float[Array, "T G2 D"]:
    """[K_0, V_0, K_1, V_1, ...] along heads; K and V are zero-padded to the pool's `width`."""
    pairs = [jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (k, v)]
    return jnp.stack(pairs, axis=2).reshape(k.shape[0], 2 * k.shape[1], width)


def pool_rows(
    k: Float[Array, "T G Dk"], v: Float[Array, "T G Dv"], *, width: int, dtype: DTypeLike
) -> Float[Array, "T G2 D"]:
    """What a pool of `width` and `dtype` is given to hold: interleaved, rounded and finite."""
    return finite(interleave_kv(k, v, width=width).astype(dtype))


def page_slots(
    page_table: Int[Array, "B P"],
    row_idx: Int[Array, "*n"],
    slot: Int[Array, "*n"],
    valid: Bool[Array, "*n"],
    *,
    page_size: int,
) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
    """(page, offset) of slot `slot` of row `row_idx`; the dummy page where not valid.

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
    """pages[page, offset] = values, in place when the pool is donated."""
    return pages.at[page, offset].set(values.astype(pages.dtype), mode="promise_in_bounds")


def path_moves(
    page_table: Int[Array, "B P"],
    seq_lens: Int[Array, "B"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    *,
    page_size: int,
) -> tuple[
    tuple[Int[Array, "B M1"], Int[Array, "B M1"]],
    tuple[Int[Array, "B M1"], Int[Array, "B M1"]],
    Bool[Array, "B M1"],
]:
    """((from page, offset), (to page, offset), valid) of nodes 1.. of each path, [B, M - 1].

    What is not valid, behind num_accepted, goes from the dummy page to the dummy page.
    """
    batch, num_path = node_path.shape
    step = jnp.broadcast_to(jnp.arange(1, num_path, dtype=jnp.int32), (batch, num_path - 1))
    row_idx = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], step.shape)
    valid = step <= num_accepted[:, None]
    source = seq_lens[:, None] + jnp.where(valid, node_path[:, 1:], 0)
    target = seq_lens[:, None] + step
    from_slots = page_slots(page_table, row_idx, source, valid, page_size=page_size)
    return from_slots, page_slots(page_table, row_idx, target, valid, page_size=page_size), valid


def flat_moves(
    page_table: Int[Array, "B P"],
    seq_lens: Int[Array, "B"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    *,
    page_size: int,
) -> tuple[Int[Array, "B M1"], Int[Array, "B M1"], Int[Array, "B M1"]]:
    """(source, target, moves), i32[B, M - 1]: rows of a pool seen as [NP * S, 2G, D].

    `moves` is 0 for what lies behind the path, is in its place already or would go to page 0.

    In:  one row on page 2, S = 16, L = 7, node_path = [0, 1, 3, 0], num_accepted = 2
    Out: source = [40, 42, .], target = [40, 41, .], moves = [0, 1, 0]
    """
    (from_page, from_offset), (to_page, to_offset), valid = path_moves(
        page_table, seq_lens, node_path, num_accepted, page_size=page_size
    )
    source = from_page * page_size + from_offset
    target = to_page * page_size + to_offset
    moves = valid & (source != target) & (to_page > 0)
    return source, target, moves.astype(jnp.int32)


def compact_path(
    pages: Float[Array, "NP S G2 D"],
    page_table: Int[Array, "B P"],
    seq_lens: Int[Array, "B"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
) -> Float[Array, "NP S G2 D"]:
    """Moves the KV of the accepted nodes to the slots right behind the root.

    Slots L + node_path[i] go to L + i for 1 <= i <= num_accepted. All rows are read before any is
    written, so an overlap of sources and destinations cannot matter.

    In:  L = 7, node_path = [0, 1, 3], num_accepted = 2
    Out: slot 8 -> 8, slot 10 -> 9
    """
    (from_page, from_offset), (to_page, to_offset), _ = path_moves(
        page_table, seq_lens, node_path, num_accepted, page_size=pages.shape[1]
    )
    moved = pages.at[from_page, from_offset].get(mode="promise_in_bounds")
    # The barrier orders the reads before the write, so XLA never keeps a copy of the pool.
    moved = jax.lax.optimization_barrier(moved)
    return write_rows(pages, to_page, to_offset, moved)
