"""The best candidates of a draft on GPUs: equal to the definition, interpreted, and run where there
is a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.sample.gpu_rank import rank
from jspec.pallas_kernels.sample.reference import rank as rank_reference
from jspec.pallas_kernels.sample.tuning import SampleTuning
from jspec.speculative.tree import LOWEST
from tests.pallas_kernels.chips import needs_gpu

SMALL = SampleTuning(chunk=256)
WIDTH = 600  # two chunks of SMALL and a part
FIXED: dict[str, Any] = {"lowest": LOWEST}


@partial(jax.jit, static_argnames="topk")
def interpreted(*arrays: Any, topk: int) -> tuple[jax.Array, ...]:
    return rank(*arrays, **FIXED, topk=topk, tuning=SMALL, interpret=True)


defined = jax.jit(partial(rank_reference, **FIXED), static_argnames="topk")


def assert_close(got: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]) -> None:
    """Compare scores and columns to the bit, the sum except for its order."""
    for left, right in zip(got[:2], wanted[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    np.testing.assert_allclose(got[2], wanted[2], rtol=2e-6)
    assert all(np.isfinite(x).all() for x in got)


def inputs(num_rows: int, width: int, per_row: int = 1) -> tuple[jax.Array, ...]:
    """Return inputs: every other batch row is greedy; ids have gaps, like a draft vocabulary's."""
    rng = np.random.default_rng(width)
    batch = num_rows // per_row
    return (
        jnp.asarray(rng.normal(size=(num_rows, width)) * 3, jnp.float32),
        jnp.asarray(np.arange(batch) % 2 * 0.8, jnp.float32),
        jnp.asarray(rng.integers(0, 2**32, (batch, 2), np.uint32)),
        jnp.asarray(rng.integers(0, 10_000, num_rows), jnp.int32),
        jnp.asarray(np.sort(rng.choice(4 * width, width, replace=False)), jnp.int32),
    )


@pytest.mark.parametrize(
    ("num_rows", "per_row", "width", "topk"),
    [(4, 1, WIDTH, 1), (6, 3, 100, 1), (6, 3, WIDTH, 4), (2, 1, 256 + 3, 8), (2, 2, 3, 5)],
)
def test_interpreted_it_is_the_definition(
    num_rows: int, per_row: int, width: int, topk: int
) -> None:
    """Also where the last chunk, or the whole vocabulary, has fewer columns than candidates."""
    arrays = inputs(num_rows, width, per_row)
    assert_close(interpreted(*arrays, topk=topk), defined(*arrays, topk=topk))


ODD = st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e30])


@settings(max_examples=20, deadline=None)
@given(
    key=st.integers(0, 2**32 - 1),
    step=st.sampled_from([0.0, 1e-6, 0.1, 10.0, 1e30]),
    temperature=st.sampled_from([0.0, 1e-20, 0.3, 1.0, 50.0]),
    odd=st.lists(st.tuples(st.integers(0, WIDTH - 1), ODD), max_size=3),
    all_odd=st.sampled_from([None, np.nan, -np.inf, np.inf]),
    topk=st.sampled_from([1, 3]),
)
def test_any_row_has_the_best_that_the_definition_has(
    key: int,
    step: float,
    temperature: float,
    odd: list[tuple[int, float]],
    all_odd: float | None,
    topk: int,
) -> None:
    """Flat, peaked and tied rows, infinities and NaN; one row of NaN alone."""
    rng = np.random.default_rng(key)
    logits = (rng.integers(-40, 40, (4, WIDTH)) * step).astype(np.float32)
    for column, value in odd:
        logits[0, column] = value
    if all_odd is not None:
        logits[1] = all_odd
    _, _, seed, positions, token_ids = inputs(4, WIDTH)
    arrays = jnp.asarray(logits), jnp.full((4,), temperature), seed, positions, token_ids
    assert_close(interpreted(*arrays, topk=topk), defined(*arrays, topk=topk))


@pytest.mark.parametrize("topk", [1, 4, 20])
def test_both_bundles_rank_alike(topk: int) -> None:
    logits, temperature, seed, positions, token_ids = inputs(6, WIDTH, 3)
    found = [
        ops.rank(
            logits.reshape(2, 3, -1),
            topk=topk,
            temperature=temperature,
            seed=seed,
            positions=positions.reshape(2, 3),
            token_ids=token_ids,
            **FIXED,
        )
        for ops in (OPS["xla"], OPS["gpu_interpret"])
    ]
    assert_close(found[1], found[0])


@needs_gpu
@pytest.mark.parametrize(("num_rows", "topk"), [(1, 1), (64, 1), (64, 4), (3, 16)])
def test_runs_on_a_gpu(num_rows: int, topk: int) -> None:
    arrays = inputs(num_rows, 128_256)
    got = jax.jit(partial(rank, **FIXED, topk=topk))(*arrays)
    wanted = defined(*arrays, topk=topk)
    np.testing.assert_array_equal(got[1], wanted[1])
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(got[2], wanted[2], rtol=1e-5)
