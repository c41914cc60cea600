"""The K best candidates of a level: the TPU's rounds choose what lax.top_k chooses."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.layers.linear import Shard
from jspec.speculative.draft import largest_in_rounds, top_candidates


@settings(deadline=None, max_examples=40)
@given(
    topk=st.integers(2, 6),
    seed=st.integers(0, 1 << 16),
    ties=st.sampled_from([1, 2, 5, 1 << 20]),
)
def test_rounds_are_top_k_ties_included(topk: int, seed: int, ties: int) -> None:
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(-ties, ties, (2, 3, 17)) * 0.25, jnp.float32)
    values, idx = jax.jit(largest_in_rounds, static_argnames="topk")(x, topk=topk)
    expected_values, expected_idx = jax.lax.top_k(x, topk)
    assert idx.dtype == expected_idx.dtype
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(idx, expected_idx)


def test_rounds_take_all_columns_of_a_row_once() -> None:
    x = jnp.asarray([[0.0, -jnp.finfo(jnp.float32).max, 7.0, 7.0, 0.0]])
    values, idx = largest_in_rounds(x, topk=5)
    np.testing.assert_array_equal(idx, [[2, 3, 0, 4, 1]])
    np.testing.assert_array_equal(values, jnp.take_along_axis(x, idx, axis=1))


@pytest.mark.parametrize(("platform", "has_top_k"), [("tpu", False), ("cpu", True), ("cuda", True)])
def test_only_a_tpu_goes_by_rounds(platform: str, *, has_top_k: bool) -> None:
    best = partial(top_candidates, topk=4, shard=Shard(1))
    scaled = jax.ShapeDtypeStruct((2, 4, 500), jnp.float32)
    ids = jax.ShapeDtypeStruct((500,), jnp.int32)
    text = jax.jit(best).trace(scaled, ids).lower(lowering_platforms=(platform,)).as_text()
    assert ("top_k" in text) == has_top_k
