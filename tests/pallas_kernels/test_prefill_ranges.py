"""The plan of a packed prefill: its ranges are the contract's visibility, by brute force."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries, visible_keys
from jspec.pallas_kernels.prefill.api import (
    NEW_FIRST,
    NEW_LAST,
    POOL_FIRST,
    POOL_LAST,
    ROW,
    join_spans,
    plan_packed,
)
from jspec.pallas_kernels.prefill.tuning import BlockSizes
from tests.pallas_kernels.packed_rows import row_lengths

_plan = jax.jit(
    plan_packed, static_argnames=("num_queries", "block_queries", "page_size", "writes", "window")
)
_visible = jax.jit(visible_keys, static_argnames=("window",))


def test_the_sizes_of_the_worked_example() -> None:
    sizes = BlockSizes()
    assert sizes.block_queries(512, 4) == 256
    assert sizes.block_queries(16, 4) == 32
    assert sizes.block_queries(256, 7) == 128
    assert [sizes.block_queries(n, 4) for n in (640, 1920, 2048, 1000)] == [128, 128, 256, 256]
    assert [sizes.block_keys(size) for size in (16, 128, 384)] == [512, 512, 384]
    assert (sizes.tile_queries(256, 4), sizes.tile_queries(128, 7)) == (128, 128)


def test_more_and_larger_heads_have_fewer_rows_and_keys() -> None:
    pools = ((1, 256), (2, 256), (8, 256), (8, 512), (16, 256), (32, 256))
    found = [BlockSizes.for_heads(*pool) for pool in pools]
    assert [x.rows for x in found] == [1024, 1024, 512, 512, 256, 128]
    assert [x.keys for x in found] == [512, 512, 512, 256, 256, 128]
    assert [x.tile for x in found] == [1024, 512, 512, 512, 512, 512]


@pytest.mark.parametrize("group", range(1, 33))
def test_a_block_is_whole_tiles_of_whole_rows_of_128(group: int) -> None:
    sizes = BlockSizes.for_heads(4)
    for num_queries in (1, 16, 100, 2048):
        queries = sizes.block_queries(num_queries, group)
        tile = sizes.tile_queries(queries, group)
        assert (queries % tile, tile * group % 128) == (0, 0)
        assert queries <= max(num_queries, 128)


def test_the_plan_of_the_worked_example() -> None:
    rows = AttentionMetadata(
        page_table=jnp.ones((2, 4), jnp.int32),
        prefix_lens=jnp.asarray([5, 0], jnp.int32),
        cu_q_lens=jnp.asarray([0, 2, 4], jnp.int32),
        q_positions=jnp.asarray([5, 6, 0, 1], jnp.int32),
    )
    plan = plan_packed(rows, 4, block_queries=4, page_size=4, writes=True, window=None)
    ranges = np.asarray(plan.ranges).T[:, [NEW_FIRST, NEW_LAST, POOL_FIRST, POOL_LAST]]
    assert ranges.tolist() == [[0, 1, 0, 5], [0, 2, 0, 5], [2, 3, 0, 0], [2, 4, 0, 0]]
    some_first, some_last, every_first, every_last = np.asarray(plan.spans)[:, 0].tolist()
    assert list(zip(some_first, some_last, strict=True)) == [(0, 5), (0, 0), (0, 4)]
    assert list(zip(every_first, every_last, strict=True)) == [(0, 0), (0, 0), (2, 1)]


@settings(max_examples=40)
@given(
    drawn=row_lengths(batch=3, queries=24, slots=30),
    writes=st.booleans(),
    window=st.sampled_from([None, 1, 6]),
    shift=st.integers(-2, 2),
)
def test_the_plan_says_who_sees_what(
    drawn: tuple[list[int], list[int]], writes: bool, window: int | None, shift: int
) -> None:
    """Ranges are the contract's visibility; spans are their union and their intersection."""
    lengths, prefixes = drawn
    rows = AttentionMetadata(
        page_table=jnp.ones((3, 7), jnp.int32),  # pages of 4: 28 slots, less than a row may want
        prefix_lens=jnp.asarray(prefixes, jnp.int32),
        cu_q_lens=jnp.asarray(np.append(0, np.cumsum(lengths)), jnp.int32),
        q_positions=jnp.asarray(
            [p + j + shift for p, n in zip(prefixes, lengths, strict=True) for j in range(n)]
            + [0] * (24 - sum(lengths)),
            jnp.int32,
        ),
    )
    plan = _plan(rows, 24, block_queries=8, page_size=4, writes=writes, window=window)
    ranges, spans = np.asarray(plan.ranges), np.asarray(plan.spans)
    index = index_queries(rows.cu_q_lens, 24, queries_per_row=None)
    within, valid, row_idx = (np.asarray(x) for x in (index.within, index.valid, index.row_idx))
    prefix = np.asarray(prefixes)[row_idx]
    seen = _visible(
        jnp.broadcast_to(jnp.arange(28), (24, 28)),
        within=index.within[:, None],
        prefix_len=jnp.asarray(prefix),
        q_len=jnp.zeros(24, jnp.int32),
        q_position=rows.q_positions[:, None],
        tail_mask=None,
        tail_positions=None,
        window=window,
    )[:, 0]
    new = [set(range(*ranges[[NEW_FIRST, NEW_LAST], t])) for t in range(24)]
    pool = [set(range(*ranges[[POOL_FIRST, POOL_LAST], t])) for t in range(24)]
    for t in range(24):
        slots = pool[t] | {u - t + int(within[t] + prefix[t]) for u in new[t]}
        expected = set(np.flatnonzero(seen[t])) if valid[t] else set()
        assert slots == expected
        assert not writes or all(slot < prefix[t] for slot in pool[t])
        assert ranges[ROW, t] == (row_idx[t] if valid[t] else 3)
    joined = np.asarray(join_spans(plan.spans, 3))
    for stream in range(4):
        owners = [t for t in range(24) if valid[t] and stream in (row_idx[t], 3)]
        some = set().union(*((new if stream == 3 else pool)[t] for t in owners))
        first, last = joined[:, 0, stream].tolist()
        assert (first, last) == (min(some), max(some) + 1) if some else last <= first
    for block in range(3):
        for stream in range(4):
            mine = [t for t in range(8 * block, 8 * block + 8) if valid[t]]
            keys = [
                new[t] if stream == 3 else pool[t] if row_idx[t] == stream else set() for t in mine
            ]
            first, last, every_first, every_last = spans[:, block, stream].tolist()
            some = set().union(*keys)
            assert (first, last) == (min(some), max(some) + 1) if some else last <= first
            if mine:
                assert set(range(every_first, min(every_last, 99))) == set.intersection(*keys)
