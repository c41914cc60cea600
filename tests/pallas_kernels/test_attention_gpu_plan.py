"""The plan of blocks against the mask rule, slot by slot, and the laws of shares and edges."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.pallas_kernels.attention.api import AttentionMetadata, visible_keys
from jspec.pallas_kernels.attention.gpu_plan import (
    MAX_PLACED,
    MAX_SPLITS,
    NUM_SMS,
    TILE_ROWS,
    BlockPlan,
    can_place,
    choose_splits,
    num_edge_blocks,
    plan_blocks,
    tiles_of,
)


def seen_by_plan(plan: BlockPlan, b: int, *, num_rows: int, block: int) -> np.ndarray:
    """Return bool[num_rows, slots]: whole blocks, then bits, none outside the bounds."""
    first, edge, last, *_ = (int(x) for x in np.asarray(plan.bounds)[b])
    assert first <= edge < last
    slot = np.arange(last * block)
    seen = np.zeros((num_rows, last * block), bool)
    seen[:, first * block : edge * block] = True
    seen &= slot >= np.asarray(plan.lowest)[b].reshape(-1)[:num_rows, None]
    words = np.asarray(plan.words).view(np.uint32)[b]  # [tiles, edges, words, 64]
    assert last - edge <= words.shape[1]
    bits = words[..., None, :] >> np.arange(32, dtype=np.uint32)[:, None] & 1
    bits = np.moveaxis(bits, -1, 1).reshape(words.shape[0] * TILE_ROWS, -1)
    seen[:, edge * block :] = bits[:num_rows, : (last - edge) * block]
    return seen


def draw_plan_rows(
    rng: np.random.Generator, *, batch: int, queries: int, tail: int | None
) -> AttentionMetadata:
    width = tail or 1
    prefix = rng.integers(max(width - queries, 0), 300, batch)
    lens = rng.integers(1, queries + 1, batch)
    positions = prefix[:, None] + np.arange(queries)
    mask = rng.integers(0, 2**32, (batch * queries, -(-width // 32)), dtype=np.uint32)
    mask[:, -1] &= np.uint32((1 << ((width - 1) % 32 + 1)) - 1)
    start = prefix + queries - width
    tail_positions = start[:, None] + np.sort(rng.integers(0, width, (batch, width)), axis=1)
    if tail:
        positions = tail_positions[:, width - queries :]
    return AttentionMetadata(
        page_table=jnp.zeros((batch, 4), jnp.int32),
        prefix_lens=jnp.asarray(prefix, jnp.int32),
        cu_q_lens=jnp.asarray(np.append(0, np.cumsum(lens)), jnp.int32),
        q_positions=jnp.asarray(positions.reshape(-1), jnp.int32),
        tail_mask=jnp.asarray(mask) if tail else None,
        tail_positions=jnp.asarray(tail_positions, jnp.int32) if tail else None,
    )


@pytest.mark.slow_cases("4-4", "40-40")
@pytest.mark.parametrize(
    ("queries", "tail", "window", "block"),
    [
        (1, None, None, 64),
        (5, None, None, 128),
        (4, 4, None, 64),
        (3, 40, 70, 64),
        (5, None, 3, 64),
        (40, 40, 9, 128),
    ],
)
def test_the_plan_says_what_the_mask_rule_says(
    queries: int, tail: int | None, window: int | None, block: int
) -> None:
    batch, group = 60, 2
    rows = draw_plan_rows(np.random.default_rng(0), batch=batch, queries=queries, tail=tail)
    plan = jax.jit(
        functools.partial(
            plan_blocks, queries_per_row=queries, group=group, window=window, block_tokens=block
        )
    )(rows)
    num_keys = np.asarray(rows.prefix_lens) + np.diff(np.asarray(rows.cu_q_lens))
    slot = np.arange(-(-340 // block) * block, dtype=np.int32)
    mask = rows.tail_mask
    expected = visible_keys(
        jnp.broadcast_to(slot, (batch, len(slot))),
        within=jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32), (batch, queries)),
        prefix_len=rows.prefix_lens,
        q_len=jnp.full_like(rows.prefix_lens, queries),
        q_position=rows.q_positions.reshape(batch, queries),
        tail_mask=None if mask is None else mask.reshape(batch, queries, -1),
        tail_positions=rows.tail_positions,
        window=window,
    )
    for b in range(batch):
        assert np.asarray(plan.bounds)[b, 3] == num_keys[b]
        seen = seen_by_plan(plan, b, num_rows=queries * group, block=block)
        right = np.asarray(expected)[b] & (slot < num_keys[b])
        valid = np.asarray(plan.valid)[b]
        assert valid.sum() == np.diff(np.asarray(rows.cu_q_lens))[b]
        np.testing.assert_array_equal(valid, np.arange(queries) < np.asarray(plan.bounds)[b, 4])
        right = np.repeat(right[valid], group, axis=0)
        np.testing.assert_array_equal(seen[np.repeat(valid, group)], right[:, : seen.shape[1]])
        assert not right[:, seen.shape[1] :].any()


@given(st.integers(1, 4096), st.integers(1, 2048))
def test_splits_fill_the_chip_about_twice_and_no_more(programs: int, max_blocks: int) -> None:
    splits = choose_splits(programs=programs, max_blocks=max_blocks)
    assert 1 <= splits <= min(max_blocks, MAX_SPLITS)
    assert splits == 1 or programs * splits <= 2 * NUM_SMS
    if splits < min(max_blocks, MAX_SPLITS):
        assert programs * (splits + 1) > 2 * NUM_SMS


@given(st.integers(1, 64), st.integers(0, 300), st.sampled_from([64, 128]))
def test_edge_blocks_hold_the_whole_tail(tail: int, start: int, block: int) -> None:
    edges = num_edge_blocks(tail=tail, queries_per_row=1, block_tokens=block)
    needed = (start + tail - 1) // block - start // block + 1
    assert needed <= edges <= (tail - 2) // block + 2


@given(st.integers(1, 64), st.integers(1, 64))
def test_tiles_whose_queries_can_be_placed_hold_them_whole_and_few(
    queries: int, group: int
) -> None:
    first = [q * group // TILE_ROWS for q in range(queries)]
    last = [(q * group + group - 1) // TILE_ROWS for q in range(queries)]
    assert last[-1] + 1 == tiles_of(queries * group)[0]
    most = max(first.count(tile) for tile in first)
    assert can_place(queries, group) == (first == last and most <= MAX_PLACED)
