"""The GPU's kernels of a whole MoE for few tokens, interpreted: against the layers over XLA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.layers.linear import Shard
from jspec.layers.moe import moe_of_sum, route
from jspec.layers.norm import Residual, norm_of_sum
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.experts import gpu_few, gpu_router
from jspec.pallas_kernels.experts.gpu_router import choose, norm_and_score
from jspec.pallas_kernels.experts.tuning import MOST_TOKENS, ExpertsTuning, choose_few
from jspec.spec.layers.feed_forward import DenseSpec, MoESpec, Routing
from tests.pallas_kernels.chips import needs_gpu
from tests.pallas_kernels.moe_cases import (
    BY_SIGMOID,
    BY_SOFTMAX,
    EPS,
    MINE,
    XLA,
    Case,
    check_a_row_that_is_not_finite,
    check_against_xla,
    drawn,
    on_the_chip,
    served_by,
    spec_of,
)

# Few, since each compiles: one token; several; one expert a token, and E longer than a slice of
# the router; all experts, and ids that repeat in every token.
NORMALIZED = spec_of(6, 3, 32, Routing.SOFTMAX_THEN_TOP_NORMALIZED, bias=False)
TOP_FIRST = spec_of(5, 2, 16, Routing.TOP_THEN_SOFTMAX, bias=True)
GATED = replace(NORMALIZED, shared=DenseSpec(inner=32), shared_gate=True)
CASES = (
    Case(1, 48, NORMALIZED),
    Case(1, 32, TOP_FIRST),
    Case(7, 32, TOP_FIRST),
    Case(16, 272, spec_of(20, 1, 16, Routing.SOFTMAX_THEN_TOP, bias=False)),
    Case(5, 32, spec_of(3, 3, 32, Routing.SOFTMAX_THEN_TOP, bias=True)),
    Case(1, 48, BY_SIGMOID),
    Case(3, 32, BY_SIGMOID),
    Case(3, 48, GATED),
    Case(1, 48, GATED),
    Case(2, 32, replace(BY_SIGMOID, routing=Routing.SIGMOID_THEN_TOP, shared=DenseSpec(inner=16))),
)


THREE_OF = jax.jit(
    partial(choose, top_k=3, dtype=jnp.float32, interpret=True), static_argnames="routing"
)


def is_served(case: Case) -> bool:
    return "few_experts_down" in served_by(case)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 2**32 - 1))
def test_equals_xla_and_reads_no_untouched_expert(case: Case, seed: int) -> None:
    check_against_xla(case, seed)


@pytest.mark.parametrize("case", CASES)
def test_the_bundle_takes_the_kernels(case: Case) -> None:
    assert is_served(case)


@pytest.mark.slow_cases("case0]")
@pytest.mark.parametrize("case", [CASES[1], CASES[2]])
def test_bf16_is_within_a_few_roundings(case: Case) -> None:
    """The kernels gate in float32 and round once; XLA on a CPU rounds between."""
    case = replace(case, dtype=jnp.bfloat16)
    stream, params, scale = drawn(case, 3)
    found, expected = (f(stream, params, scale, spec=case.spec) for f in (MINE, XLA))
    for mine, wanted in zip(found, expected, strict=True):
        mine, wanted = (np.asarray(x, np.float32) for x in (mine, wanted))
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=2**-6 * np.abs(wanted).max())


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("token", [0, 6])
def test_a_row_that_is_not_finite_stays_alone(token: int, value: float) -> None:
    check_a_row_that_is_not_finite(CASES[2], token=token, value=value)


def test_groups_scaled_softmaxes_and_factors_are_left_to_the_other_kernels() -> None:
    ops = OPS["gpu_interpret"]

    def is_taken(spec: MoESpec, **router: jax.Array) -> bool:
        stream, params, scale = drawn(Case(7, 32, spec), 1)
        assert isinstance(stream.delta, jax.Array)
        params = params | {"router": params["router"] | router}
        given = (stream.x, stream.delta, scale["scale"], params)
        return ops.moe_of_sum(*given, eps=EPS, spec=spec) is not None

    assert is_taken(BY_SIGMOID)
    assert not is_taken(replace(BY_SIGMOID, num_groups=2))
    assert not is_taken(BY_SIGMOID, factors=jnp.ones(6))
    assert not is_taken(BY_SIGMOID, kernel=jnp.ones((32, 6), jnp.bfloat16))
    assert not is_taken(replace(CASES[0].spec, weight_scale=2.0))


@pytest.mark.parametrize("routing", BY_SOFTMAX)
def test_equal_logits_go_to_the_lower_expert(routing: Routing) -> None:
    """The logits are small integers, which no summation order can change."""
    spec = spec_of(20, 4, 16, routing, bias=True)
    rng = np.random.default_rng(5)
    logits = rng.integers(-2, 3, (3, 4, 20)).astype(np.float32)  # shares; their sum ties often
    bias = jnp.asarray(rng.integers(-1, 2, 20), jnp.bfloat16)
    ids, weights = choose(
        jnp.asarray(logits), bias, top_k=4, routing=routing, dtype=jnp.bfloat16, interpret=True
    )
    router = {"kernel": jnp.asarray(logits.sum(axis=0), jnp.bfloat16), "bias": bias}
    expected = route(router, jnp.eye(4, dtype=jnp.bfloat16), spec=spec)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-6)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0]), min_size=8, max_size=8
    )
)
def test_any_logits_give_different_experts(logits: list[float]) -> None:
    shares = jnp.asarray([[logits]], jnp.float32)
    for routing in BY_SOFTMAX:
        ids, _ = THREE_OF(shares, None, routing=routing)
        assert len(set(np.asarray(ids)[0].tolist())) == 3
        assert ((np.asarray(ids) >= 0) & (np.asarray(ids) < 8)).all()


@settings(max_examples=50, deadline=None)
@given(
    heights=st.lists(
        st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, 1.0]),
        min_size=8,
        max_size=8,
    ),
    num_experts=st.integers(3, 8),
)
def test_the_best_taken_one_by_one_are_those_of_all_pairs(
    heights: list[float], num_experts: int
) -> None:
    height, is_expert = jnp.asarray(heights, jnp.float32), jnp.arange(8) < num_experts
    one_by_one, pairs = (
        np.asarray(gpu_router._rank(height, is_expert, top_k=3, by_pairs=by_pairs))
        for by_pairs in (False, True)
    )
    np.testing.assert_array_equal(one_by_one, np.minimum(pairs, 3))


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """Use the CPU even where there is a GPU, which rounds bfloat16 otherwise; bits are compared."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("size", "num_experts"), [(32, 3), (256, 16), (300, 20)])
def test_the_norm_and_the_scores(size: int, num_experts: int) -> None:
    rng = np.random.default_rng(size)
    x, delta = (jnp.asarray(rng.standard_normal((3, size)), jnp.bfloat16) for _ in range(2))
    scale = {"scale": jnp.asarray(rng.random(size) + 0.5, jnp.bfloat16)}
    router = jnp.asarray(rng.standard_normal((size, num_experts)), jnp.bfloat16)
    found = norm_and_score(x, delta, scale["scale"], router, eps=EPS, interpret=True)
    total, normed = norm_of_sum(scale, Residual(x=x, delta=delta), eps=EPS, ops=OPS["xla"])
    np.testing.assert_array_equal(found[0], total)
    mine, wanted = (np.asarray(n, np.float32) for n in (found[1], normed))
    np.testing.assert_allclose(mine, wanted, rtol=2**-7)
    exact = np.asarray(found[1], np.float64) @ np.asarray(router, np.float64)
    np.testing.assert_allclose(np.sum(found[2], axis=0), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [{"tokens": 17}, {"size": 40}])
def test_what_the_kernels_do_not_serve_is_left_to_others(change: dict[str, Any]) -> None:
    assert not is_served(replace(CASES[2], **change))


def test_a_shard_of_a_mixture_is_left_to_others() -> None:
    """Its sum over the shards comes before the residual."""
    case = CASES[2]
    stream, params, scale = drawn(case, 0)
    one = partial(moe_of_sum, spec=case.spec, eps=EPS, ops=OPS["gpu_interpret"])
    text = str(jax.make_jaxpr(partial(one, shard=Shard(2, None)))(params, scale, stream))
    assert "few_experts" not in text
    assert "experts_gate_up" in text


@pytest.mark.parametrize(("size", "inner", "num_experts"), [(2048, 768, 128), (2880, 2880, 32)])
@pytest.mark.parametrize("tokens", [1, MOST_TOKENS])
def test_real_sizes_are_served(size: int, inner: int, num_experts: int, tokens: int) -> None:
    tuning = choose_few(tokens, num_experts=num_experts, size=size, inner=inner)
    assert tuning is not None
    assert tuning.problem(size, inner) is None


def test_only_one_token_of_qwen_has_deeper_rings() -> None:
    def stages(tokens: int, size: int, inner: int) -> tuple[int, int]:
        tuning = choose_few(tokens, num_experts=32, size=size, inner=inner)
        assert tuning is not None
        return tuning.num_stages, tuning.down_stages

    assert stages(1, 2048, 768) == (6, 8)
    assert stages(2, 2048, 768) == stages(1, 2880, 2880) == stages(1, 2048, 256) == (4, 0)


@pytest.mark.parametrize(
    "change",
    [{"num_tokens": 0}, {"num_tokens": 17}, {"num_experts": 257}, {"size": 2888}, {"inner": 100}],
)
def test_what_has_no_plan(change: dict[str, int]) -> None:
    fits = {"num_tokens": 4, "num_experts": 128, "size": 2048, "inner": 768}
    assert choose_few(**fits) is not None
    assert choose_few(**(fits | change)) is None


@pytest.mark.parametrize(
    ("tokens", "tuning", "message"),
    [
        (17, ExpertsTuning(), "17 tokens; expected 1 to 16"),
        (7, ExpertsTuning(gate_up_n=32), "gate_up_n 32 does not divide I 16"),
    ],
)
def test_the_kernels_refuse_what_they_do_not_serve(
    tokens: int, tuning: ExpertsTuning, message: str
) -> None:
    case = replace(CASES[2], tokens=tokens)
    stream, params, scale = drawn(case, 0)
    if tuning.gate_up_n == 32:
        tuning = replace(tuning, gate_up_k=16, down_n=16, down_k=16)
    assert isinstance(stream.delta, jax.Array)
    with pytest.raises(ValueError, match=message):
        gpu_few.moe_of_sum(
            stream.x, stream.delta, scale["scale"], params, eps=EPS, spec=case.spec, tuning=tuning
        )


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("model", ["qwen", "gpt-oss", "glm"])
def test_equals_xla_on_the_chip(model: str, tokens: int) -> None:
    for mine, wanted in on_the_chip(model, tokens):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=2**-5 * np.abs(wanted).max())
