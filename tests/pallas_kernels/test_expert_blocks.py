"""Pairs sorted by expert and dealt out in blocks, against a loop over experts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.pallas_kernels.experts.blocks import ExpertBlocks, blocks_of, num_blocks, weighted_sum
from tests.pallas_kernels.expert_cases import Mixture, draw

SHAPES = ((1, 1, 1), (1, 2, 5), (7, 2, 3), (7, 3, 3), (33, 2, 6))  # T, k, X


@partial(jax.jit, static_argnames=("num_experts", "tile_m"))
def fields(ids: jax.Array, *, num_experts: int, tile_m: int) -> tuple[jax.Array, ...]:
    found = blocks_of(ids, num_experts=num_experts, tile_m=tile_m)
    return found.expert, found.num_pairs, found.source, found.place, found.num_used


def check_blocks(ids: np.ndarray, *, num_experts: int, tile_m: int) -> None:
    expert, num_pairs, source, place, num_used = (
        np.asarray(x)
        for x in fields(jnp.asarray(ids, jnp.int32), num_experts=num_experts, tile_m=tile_m)
    )
    flat, block = ids.reshape(-1), 0
    for each in range(num_experts):
        pairs = np.flatnonzero(flat == each)
        for start in range(0, len(pairs), tile_m):
            part = pairs[start : start + tile_m]
            assert (expert[block], num_pairs[block]) == (each, len(part))
            rows = block * tile_m + np.arange(len(part))
            np.testing.assert_array_equal(source[rows], part)
            np.testing.assert_array_equal(place[part], rows)
            block += 1
    assert num_used == block <= len(expert)
    np.testing.assert_array_equal(num_pairs[block:], 0)
    np.testing.assert_array_equal(expert[block:], expert[block - 1])
    assert ((source >= 0) & (source < len(flat))).all()


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.integers(0, 2**32 - 1),
    st.sampled_from((0.0, 0.5, 1.0)),
    st.sampled_from((2, 16)),
)
def test_every_pair_has_its_place(
    shape: tuple[int, int, int], seed: int, skew: float, tile_m: int
) -> None:
    tokens, top_k, num_experts = shape
    drawn = draw(Mixture(tokens, top_k, num_experts, 1, 1), seed=seed, skew=skew)
    check_blocks(np.asarray(drawn.ids), num_experts=num_experts, tile_m=tile_m)


@pytest.mark.parametrize(("pairs", "num_experts"), [(1, 128), (8, 128), (48, 3), (50, 3)])
def test_as_many_blocks_as_the_worst_routing_needs(pairs: int, num_experts: int) -> None:
    """One pair each, and all that is left to the first."""
    touched = min(pairs, num_experts)
    most = 0
    for alone in range(touched):  # experts with one pair; the rest of the pairs go to the next
        rest = pairs - alone
        most = max(most, alone + -(-rest // 16))
    assert most <= num_blocks(pairs, num_experts, 16) <= touched + pairs // 16


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ids are \(0, 2\); expected at least one"):
        blocks_of(jnp.zeros((0, 2), jnp.int32), num_experts=4, tile_m=16)


def test_the_sum_is_in_float32_and_takes_only_rows_of_pairs() -> None:
    """1 + 2**-8 + 2**-8 is 1 in bf16 if it is rounded on the way. The padding row is NaN."""
    blocks = ExpertBlocks(
        tile_m=2,
        expert=jnp.asarray([0, 1]),
        num_pairs=jnp.asarray([2, 1]),
        source=jnp.asarray([0, 1, 2, 0]),
        place=jnp.asarray([0, 1, 2]),
        num_used=jnp.asarray(2),
    )
    rows = jnp.asarray([[1.0], [2.0**-8], [2.0**-8], [jnp.nan]], jnp.bfloat16)
    total = weighted_sum(rows, blocks, jnp.ones((1, 3)))
    assert total.dtype == jnp.bfloat16
    assert float(total[0, 0]) == 1.0 + 2.0**-7
