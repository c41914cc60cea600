"""Accepted paths, and pools with numbers only in their slots, for both kernels' tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.compaction.reference import compact_path

Pools = tuple[jax.Array, ...]
Compact = Callable[..., Pools]  # (pools, table, seq_lens, path, num_accepted) -> pools

# (batch, page_size, num_path, (2G, D), dtype)
SHAPES = pytest.mark.parametrize(
    ("batch", "page_size", "num_path", "row", "dtype"),
    [
        (5, 16, 4, (4, 128), jnp.bfloat16),
        (4, 1, 3, (2, 128), jnp.float32),
        (3, 4, 6, (2, 64), jnp.bfloat16),
        (6, 64, 2, (16, 128), jnp.float32),
        (5, 16, 4, (4, 64), jnp.float8_e4m3fn),
    ],
)


def reference(kv: Pools, *rows: Any) -> list[np.ndarray]:
    return [as_float32(jax.jit(compact_path)(pages, *rows)) for pages in kv]


def as_float32(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32))


def as_int32(*arrays: Any) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(x, jnp.int32) for x in arrays)


def random_case(
    seed: int,
    *,
    batch: int,
    page_size: int,
    num_path: int,
    row: tuple[int, int],
    dtype: Any,
    layers: int = 2,
) -> tuple[Pools, tuple[jax.Array, ...]]:
    """Return (pools, NaN except for the rows on a path; table, seq_lens, path, num_accepted).

    Row 0 is a padding row (all its pages are the dummy), row 1 has no moves, and the entries after
    a path are -1 or far outside.
    """
    rng = np.random.default_rng(seed)
    nodes, longest = 3 * num_path, 40
    pages_per_row = -(-(longest + nodes) // page_size)
    num_pages = 1 + batch * pages_per_row
    table = rng.permutation(np.arange(1, num_pages)).reshape(batch, pages_per_row)
    table[0] = 0
    seq_lens = rng.integers(0, longest + 1, batch)
    num_accepted = rng.integers(0, num_path, batch)
    num_accepted[1 % batch] = num_path - 1
    path = np.where(rng.random((batch, num_path)) < 0.5, -1, 10**6)
    path[:, 0] = 0
    pools = np.full((layers, num_pages, page_size, *row), np.nan, np.float32)
    for b in range(batch):
        count = num_accepted[b]
        chosen = np.sort(1 + rng.permutation(nodes - 1)[:count])
        path[b, 1 : count + 1] = 1 + np.arange(count) if b == 1 else chosen
        for node in path[b, : count + 1]:
            slot = seq_lens[b] + node
            at = table[b, slot // page_size], slot % page_size
            pools[:, at[0], at[1]] = rng.normal(size=(layers, *row))
    kv = tuple(jnp.asarray(pool, dtype) for pool in pools)
    return kv, as_int32(table, seq_lens, path, num_accepted)


def check_equals_the_reference(run: Compact, kv: Pools, rows: tuple[jax.Array, ...]) -> None:
    """Compare bit for bit, except for the dummy page, which the kernels leave alone."""
    for pool, pages, before in zip(run(kv, *rows), reference(kv, *rows), kv, strict=True):
        np.testing.assert_array_equal(as_float32(pool)[1:], pages[1:])
        np.testing.assert_array_equal(as_float32(pool)[0], as_float32(before[0]))


def check_sources_are_read_before_targets_are_written(run: Compact, path: list[int]) -> None:
    pool = jnp.broadcast_to(jnp.arange(16, dtype=jnp.float32).reshape(2, 8, 1, 1), (2, 8, 2, 128))
    (after,) = run((pool,), *as_int32([[1]], [1], [path], [3]))
    moved = [9.0 + node for node in path[1:]]
    assert after[1, :, 0, 0].tolist() == [8, 9, *moved, 13, 14, 15]


def check_what_leaves_the_table_is_dropped(run: Compact) -> None:
    pool = jnp.broadcast_to(jnp.arange(24, dtype=jnp.float32).reshape(3, 8, 1, 1), (3, 8, 2, 128))
    rows = as_int32([[1], [2]], [6, 0], [[0, 3, 4]] * 2, [2, 0])
    check_equals_the_reference(run, (pool,), rows)


def check_a_path_of_the_root_alone_launches_nothing(run: Compact) -> None:
    kv = (jnp.zeros((2, 8, 2, 128)),)
    assert run(kv, *as_int32([[1]], [6], [[0]], [0])) is kv


def check_layers_may_differ_in_their_kv_heads(run: Compact) -> None:
    """MiMo-V2-Flash's layers do, in no order."""
    sizes = {"batch": 3, "page_size": 16, "num_path": 4, "dtype": jnp.float32}
    (a, b), rows = random_case(5, row=(2, 128), **sizes)
    (c, d), same_rows = random_case(5, row=(4, 128), **sizes)
    for x, y in zip(rows, same_rows, strict=True):
        np.testing.assert_array_equal(x, y)
    check_equals_the_reference(run, (a, c, d, b), rows)
