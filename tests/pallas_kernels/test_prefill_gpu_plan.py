"""The plan of packed prefill in blocks: every seen key is visited once, and no other is
unmasked."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.prefill.gpu_plan import (
    BEGIN,
    END,
    KEYS,
    OFFSET,
    WHOLE_BEGIN,
    WHOLE_END,
    packed_heads,
    plan_prefill,
)
from tests.pallas_kernels.packed_rows import row_lengths


def rows_of(lengths: Sequence[int], prefixes: Sequence[int], *, queries: int) -> AttentionMetadata:
    """Return rows of 20 pages of 16, positions as slots."""
    positions = np.zeros(queries, np.int32)
    start = 0
    for length, prefix in zip(lengths, prefixes, strict=True):
        positions[start : start + length] = prefix + np.arange(length)
        start += length
    return AttentionMetadata(
        page_table=jnp.zeros((len(lengths), 20), jnp.int32),
        prefix_lens=jnp.asarray(prefixes, jnp.int32),
        cu_q_lens=jnp.asarray(np.append(0, np.cumsum(lengths)), jnp.int32),
        q_positions=jnp.asarray(positions),
    )


_plan = jax.jit(
    plan_prefill,
    static_argnames=("num_queries", "group", "page_size", "window", "block_tokens", "consumers"),
)


def test_the_plan_of_the_worked_example() -> None:
    rows = rows_of([56, 8], [256, 0], queries=64)
    plan = _plan(
        rows, num_queries=64, group=4, page_size=16, window=None, block_tokens=128, consumers=2
    )
    np.testing.assert_array_equal(plan.bounds, [[1, 0, 2, 4], [0, 0, 1, 3]])
    first = [BEGIN, WHOLE_BEGIN, WHOLE_END, END]
    walks = np.asarray(plan.walks)
    np.testing.assert_array_equal(walks[0, :, first].T, [[0, 0, 0, 3], [0, 0, 0, 1]])
    np.testing.assert_array_equal(walks[1, 0, first], [0, 0, 2, 3])
    np.testing.assert_array_equal(walks[0, :, OFFSET], [0, 3])
    np.testing.assert_array_equal(walks[0, :, KEYS], [312, 8])


@pytest.mark.parametrize("window", [None, 70])
@given(drawn=row_lengths(batch=5, queries=80, slots=320))
def test_a_plan_walks_every_seen_key_once_and_masks_all_others(
    window: int | None, drawn: tuple[list[int], list[int]]
) -> None:
    tokens, tile = 64, 16
    lengths, prefixes = drawn
    rows = rows_of(lengths, prefixes, queries=80)
    plan = _plan(
        rows, num_queries=80, group=4, page_size=16, window=window, block_tokens=64, consumers=2
    )
    bounds, walks, lines = (np.asarray(x) for x in (plan.bounds, plan.walks, plan.lines))
    assert sorted(bounds[:, 0]) == [0, 1, 2]
    assert (np.diff(bounds[:, 3]) <= 0).all()  # heavy ones first
    starts = np.append(0, np.cumsum(lengths))
    for (block, first_row, last_row, steps), walk in zip(bounds, walks, strict=True):
        done = 0
        for row in range(first_row, last_row):
            begin, whole_begin, whole_end, end = walk[row, :4]
            assert 0 <= begin <= whole_begin <= whole_end <= end
            assert end == begin or walk[row, OFFSET] + begin == done
            done += end - begin
        assert done == steps
        for t in range(32 * block, 32 * block + 32):
            row = int(np.searchsorted(starts, t, side="right")) - 1
            _, last, owner = lines[t // tile, :, t % tile]
            if row >= len(lengths):
                assert (last, owner) == (0, len(lengths))  # a padding query
                continue
            slot = prefixes[row] + t - starts[row]
            lowest = 0 if window is None else max(slot - window + 1, 0)
            assert first_row <= row < last_row
            assert owner == row
            begin, whole_begin, whole_end, end = walk[row, :4] * tokens
            assert begin <= lowest <= slot < end
            assert tuple(lines[t // tile, :2, t % tile]) == (lowest, slot + 1)
            assert whole_begin == whole_end or (whole_begin >= lowest and whole_end <= slot + 1)
            others = [b for b in range(len(lengths)) if b != row]
            assert (walk[others, WHOLE_BEGIN] == walk[others, WHOLE_END]).all()


def test_heads_of_a_tile_fill_its_rows() -> None:
    assert [packed_heads(group) for group in (1, 2, 4, 5, 7, 8, 12, 16)] == [1, 2, 4, 1, 1, 8, 4, 8]
