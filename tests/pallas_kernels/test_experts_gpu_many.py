"""The GPU's kernels of a whole MoE for any number of tokens: against the layers over XLA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.pallas_kernels.experts.gpu_router import score
from jspec.spec.layers.feed_forward import DenseSpec, Routing
from tests.pallas_kernels.chips import needs_gpu
from tests.pallas_kernels.moe_cases import (
    BY_SIGMOID,
    Case,
    check_a_row_that_is_not_finite,
    check_against_xla,
    on_the_chip,
    served_by,
    spec_of,
)

# Few, since each compiles: several blocks of some experts, E no multiple of a round; a tile of
# tokens and one more, all biases.
MANY = Case(40, 48, spec_of(6, 3, 32, Routing.SOFTMAX_THEN_TOP_NORMALIZED, bias=False))
BIASED = Case(33, 32, spec_of(5, 2, 16, Routing.TOP_THEN_SOFTMAX, bias=True))
SHARED = Case(18, 32, BY_SIGMOID)
GATED = replace(MANY, spec=replace(MANY.spec, shared=DenseSpec(inner=16), shared_gate=True))
CASES = (MANY, BIASED, SHARED, GATED)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 2**32 - 1))
def test_equals_xla_and_reads_no_untouched_expert(case: Case, seed: int) -> None:
    check_against_xla(case, seed)


@pytest.mark.parametrize("case", CASES)
def test_the_bundle_takes_these_kernels_alone(case: Case) -> None:
    program = served_by(case)
    names = ("score_many", "choose", "count", "blocks", "gate_up", "down", "sum_norm")
    assert [name for name in names if f"experts_{name}" not in program] == []
    assert "sort" not in program
    assert "top_k" not in program
    assert "ragged_dot" not in program


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("token", [0, 32])
def test_a_row_that_is_not_finite_stays_alone(token: int, value: float) -> None:
    check_a_row_that_is_not_finite(BIASED, token=token, value=value)


@pytest.mark.parametrize(
    ("tokens", "size", "num_experts", "shares"),
    [(1, 64, 3, 1), (33, 520, 20, 2), (40, 1100, 130, 4), (4300, 512, 64, 1)],
)
def test_the_scores_are_the_routers_product(
    tokens: int, size: int, num_experts: int, shares: int
) -> None:
    """The sizes are no multiples of tiles, with few shares that keep the multiprocessors busy."""
    rng = np.random.default_rng(size)
    x = jnp.asarray(rng.standard_normal((tokens, size)), jnp.float32)
    router = jnp.asarray(rng.standard_normal((size, num_experts)), jnp.float32)
    found = jax.jit(partial(score, interpret=True))(x, router)
    assert found.shape == (shares, tokens, num_experts)
    exact = np.asarray(x, np.float64) @ np.asarray(router, np.float64)
    np.testing.assert_allclose(np.sum(found, axis=0), exact, rtol=1e-4, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("tokens", [17, 64, 256, 1000])
@pytest.mark.parametrize("model", ["qwen", "gpt-oss", "glm"])
def test_equals_xla_on_the_chip(model: str, tokens: int) -> None:
    for mine, wanted in on_the_chip(model, tokens):
        # A token whose k-th and next expert are all but level may go to the other one.
        rows = np.abs(mine - wanted).max(axis=1) > 2**-5 * np.abs(wanted).max()
        assert rows.sum() <= tokens // 50
