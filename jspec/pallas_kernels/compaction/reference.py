"""Moving an accepted tree path to the front of its row's scratch slots, where KV is committed."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.pallas_kernels.kv_write.reference import page_slots, write_rows


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
    """Return ((from page, offset), (to page, offset), valid) of path nodes 1.., each [B, M - 1]."""
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
    """Return i32[B, M - 1] (source, target, moves): slots of a pool as [NP * S, 2G, D].

    `moves` is 0 after the path, for slots already in place and for targets on page 0.

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


def by_shape(
    kv: tuple[jax.Array, ...],
    compact: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
    """Apply `compact` to the pools of each shape at a time, since layers may differ in kv heads."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for layer, pages in enumerate(kv):
        alike.setdefault(pages.shape, []).append(layer)
    after = list(kv)
    for layers in alike.values():
        moved = compact(tuple(kv[layer] for layer in layers))
        for layer, pages in zip(layers, moved, strict=True):
            after[layer] = pages
    return tuple(after)


def compact_path(
    pages: Float[Array, "NP S *G2 D"],
    page_table: Int[Array, "B P"],
    seq_lens: Int[Array, "B"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
) -> Float[Array, "NP S *G2 D"]:
    """Move the KV of accepted nodes after the root: slots L + node_path[i] to L + i, 1 <= i <=
    num_accepted.

    In:  L = 7, node_path = [0, 1, 3], num_accepted = 2    Out: slot 8 -> 8, slot 10 -> 9
    """
    (from_page, from_offset), (to_page, to_offset), _ = path_moves(
        page_table, seq_lens, node_path, num_accepted, page_size=pages.shape[1]
    )
    moved = pages.at[from_page, from_offset].get(mode="promise_in_bounds")
    # The barrier orders reads before the write, so XLA keeps no copy of the pool.
    moved = jax.lax.optimization_barrier(moved)
    return write_rows(pages, to_page, to_offset, moved)
