"""Moving the accepted path to the front of a row, against lists of slots in plain Python."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.compaction.reference import compact_path, flat_moves
from jspec.pallas_kernels.kv_write.reference import interleave_kv, page_slots, write_rows

_compact = jax.jit(compact_path)


@pytest.mark.parametrize(("page_size", "num_path"), [(1, 4), (4, 3), (16, 6), (64, 2)])
def test_the_accepted_path_moves_and_nothing_else_does(page_size: int, num_path: int) -> None:
    batch, nodes, longest = 3, 3 * num_path, 40
    pages_per_row = -(-(longest + nodes) // page_size)
    num_pages = 1 + batch * pages_per_row
    for seed in range(8):
        rng = np.random.default_rng([seed, page_size])
        table = rng.permutation(np.arange(1, num_pages)).reshape(batch, pages_per_row)
        pool = rng.normal(size=(num_pages, page_size, 4, 2)).astype(np.float32)
        seq_lens = rng.integers(0, longest + 1, batch)
        num_accepted = rng.integers(0, num_path, batch)
        path = np.zeros((batch, num_path), np.int64)
        expected = pool.copy()
        for b in range(batch):
            # Ascending, as paths are; the longest runs overlap their own destinations.
            count = num_accepted[b]
            path[b, 1 : count + 1] = np.sort(1 + rng.permutation(nodes - 1)[:count])
            slots = [pool[table[b, s // page_size], s % page_size] for s in range(longest + nodes)]
            for i in range(1, count + 1):
                to = seq_lens[b] + i
                source = slots[seq_lens[b] + path[b, i]]
                expected[table[b, to // page_size], to % page_size] = source
            path[b, count + 1 :] = rng.integers(0, nodes, num_path - 1 - count)  # never used
        after = _compact(
            jnp.asarray(pool),
            jnp.asarray(table, jnp.int32),
            jnp.asarray(seq_lens, jnp.int32),
            jnp.asarray(path, jnp.int32),
            jnp.asarray(num_accepted, jnp.int32),
        )
        np.testing.assert_array_equal(np.asarray(after)[1:], expected[1:])


def test_all_sources_are_read_before_any_is_written() -> None:
    """Path 0, 2, 3, 4: slot 3 is a destination of one move and the source of another."""
    pool = jnp.arange(16, dtype=jnp.float32).reshape(2, 8, 1, 1)
    after = _compact(
        pool,
        jnp.asarray([[1]], jnp.int32),
        jnp.asarray([1], jnp.int32),
        jnp.asarray([[0, 2, 3, 4]], jnp.int32),
        jnp.asarray([3], jnp.int32),
    )
    assert np.asarray(after)[1].ravel().tolist() == [8, 9, 11, 12, 13, 13, 14, 15]


def test_compaction_at_the_end_of_a_table_stays_inside() -> None:
    """Destinations past the table go to page 0, not to the row's own or another row's last page."""
    pool = np.arange(24, dtype=np.float32).reshape(3, 8, 1, 1)
    after = _compact(
        jnp.asarray(pool),
        jnp.asarray([[1], [2]], jnp.int32),
        jnp.asarray([7, 0], jnp.int32),
        jnp.asarray([[0, 1, 2], [0, 0, 0]], jnp.int32),
        jnp.asarray([2, 0], jnp.int32),
    )
    np.testing.assert_array_equal(np.asarray(after)[1:], pool[1:])


def test_page_slots_worked_example() -> None:
    page, offset = page_slots(
        jnp.asarray([[5, 9], [6, 0]], jnp.int32),
        jnp.asarray([0, 0, 0, 0, 1, 1], jnp.int32),
        jnp.asarray([1, 4, 7, 8, -1, 3], jnp.int32),
        jnp.asarray([True, True, False, True, True, True]),
        page_size=4,
    )
    assert page.tolist() == [5, 9, 0, 0, 0, 6]
    assert [o for p, o in zip(page.tolist(), offset.tolist(), strict=True) if p] == [1, 0, 3]
    assert min(offset.tolist()) >= 0


def test_flat_moves_worked_example() -> None:
    rows = [jnp.asarray(x, jnp.int32) for x in ([[2]], [7], [[0, 1, 3, -1]], [2])]
    source, target, moves = flat_moves(*rows, page_size=16)
    assert moves.tolist() == [[0, 1, 0]]
    assert (source[0, :2].tolist(), target[0, :2].tolist()) == ([40, 42], [40, 41])


def test_k_and_v_lie_side_by_side_and_are_padded_with_zeros() -> None:
    k = jnp.arange(1, 13, dtype=jnp.float32).reshape(2, 2, 3)
    v = -jnp.arange(1, 9, dtype=jnp.float32).reshape(2, 2, 2)
    out = np.asarray(jax.jit(partial(interleave_kv, width=4))(k, v))
    assert out.shape == (2, 4, 4)
    assert out[0].tolist() == [[1, 2, 3, 0], [-1, -2, 0, 0], [4, 5, 6, 0], [-3, -4, 0, 0]]


def test_written_rows_take_the_dtype_of_the_pool() -> None:
    pool = jnp.zeros((2, 2, 2, 1), jnp.bfloat16)
    values = jnp.full((1, 2, 1), 1.25, jnp.float32)
    after = write_rows(pool, jnp.asarray([1]), jnp.asarray([0]), values)
    assert after.dtype == jnp.bfloat16
    assert after[:, :, 0, 0].tolist() == [[0, 0], [1.25, 0]]
