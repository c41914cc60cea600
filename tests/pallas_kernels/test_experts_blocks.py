"""Pairs assigned to blocks, by XLA and by the GPU's kernels, against a loop over experts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.pallas_kernels.experts import gpu_blocks
from jspec.pallas_kernels.experts.api import ExpertBlocks, Mixed, num_blocks
from jspec.pallas_kernels.experts.reference import blocks_of
from tests.pallas_kernels.expert_cases import Mixture, draw

SHAPES = ((1, 1, 1), (1, 2, 5), (7, 2, 3), (7, 3, 3), (33, 2, 6))  # T, k, X


BLOCKS_OF = jax.jit(blocks_of, static_argnames=("num_experts", "tile_m"))
MAKE_BLOCKS = jax.jit(
    partial(gpu_blocks.make_blocks, interpret=True), static_argnames=("num_experts", "tile_m")
)


def check_blocks(found: ExpertBlocks, ids: np.ndarray, *, num_experts: int) -> None:
    """Check the laws of both: blocks in the order of the experts, rows in that of the pairs."""
    expert, num_pairs, token, place = (
        np.asarray(x) for x in (found.expert, found.num_pairs, found.token, found.place)
    )
    flat, block, tile_m = ids.reshape(-1), 0, found.tile_m
    for each in range(num_experts):
        pairs = np.flatnonzero(flat == each)
        for start in range(0, len(pairs), tile_m):
            part = pairs[start : start + tile_m]
            assert (expert[block], num_pairs[block]) == (each, len(part))
            rows = block * tile_m + np.arange(len(part))
            np.testing.assert_array_equal(token[rows], part // ids.shape[1])
            np.testing.assert_array_equal(place[part], rows)
            block += 1
    assert int(found.num_used) == block <= len(expert)
    np.testing.assert_array_equal(num_pairs[block:], 0)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
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
    ids = np.asarray(drawn.ids)
    for how in (BLOCKS_OF, MAKE_BLOCKS):
        found = how(drawn.ids, num_experts=num_experts, tile_m=tile_m)
        check_blocks(found, ids, num_experts=num_experts)
    found = BLOCKS_OF(drawn.ids, num_experts=num_experts, tile_m=tile_m)
    block, token = int(found.num_used), np.asarray(found.token)
    np.testing.assert_array_equal(found.expert[block:], found.expert[block - 1])
    assert ((token >= 0) & (token < tokens)).all()


def test_pairs_of_several_rounds_are_dealt_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_blocks, "ROUND", 16)
    drawn = draw(Mixture(33, 2, 6, 1, 1), seed=1, skew=0.0)
    found = gpu_blocks.make_blocks(drawn.ids, num_experts=6, tile_m=4, interpret=True)
    check_blocks(found, np.asarray(drawn.ids), num_experts=6)


@pytest.mark.parametrize(("pairs", "num_experts"), [(1, 128), (8, 128), (48, 3), (50, 3)])
def test_as_many_blocks_as_the_worst_routing_needs(pairs: int, num_experts: int) -> None:
    """One pair for each expert, and all others for the first."""
    touched = min(pairs, num_experts)
    most = 0
    for alone in range(touched):  # experts with one pair; the rest of the pairs go to the next
        rest = pairs - alone
        most = max(most, alone + -(-rest // 16))
    assert most <= num_blocks(pairs, num_experts, 16) <= touched + pairs // 16


def test_no_pairs_are_refused() -> None:
    for how in (blocks_of, gpu_blocks.make_blocks):
        with pytest.raises(ValueError, match=r"0 \(token, expert\) pairs; expected at least one"):
            how(jnp.zeros((0, 2), jnp.int32), num_experts=4, tile_m=16)


def test_the_sum_is_in_float32_and_takes_only_rows_of_pairs() -> None:
    """1 + 2**-8 + 2**-8 would be 1 if intermediate sums were rounded to bf16. Padding is NaN."""
    rows = jnp.asarray([[1.0], [jnp.nan], [2.0**-8], [2.0**-8]], jnp.bfloat16)
    ids, weights = jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3))
    total = Mixed(rows=rows, weights=weights, ids=ids, place=jnp.asarray([3, 0, 2])).sum()
    assert total.dtype == jnp.bfloat16
    assert float(total[0, 0]) == 1.0 + 2.0**-7
