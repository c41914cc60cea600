"""The engine's output has the target's distribution, also with speculation.

Thousands of requests that differ in their seed alone; the joint frequencies of two tokens that
verification chose are compared with the probabilities of dense forwards (chi-square).
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.layers.attention import causal_attention
from jspec.messages.request import Request, SamplingParams
from jspec.messages.step_options import SAMPLING
from jspec.training.dense import forward, lm_logits
from tests.speculative.engines import TARGET, Compiled, build, serve, spec_of, tiny_params
from tests.support.goodness_of_fit import assert_fits

IN_CI, BY_HAND = ("tree", "jointly"), pytest.mark.exhaustive
PROMPT = (5, 17, 200, 44, 9)
NUM_SEEDS = 1600
SHAPES = {"chain": (3, 1, 4), "tree": (3, 4, 16)}
FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.12},
    "min_p": {"min_p": 0.45},
    "jointly": {"top_k": 4, "top_p": 0.15, "min_p": 0.3, "temperature": 0.8},
}


@functools.cache
def real_engine(shape: tuple[int, int, int]) -> Compiled:
    """Return an engine with the head's own drafts, not the dial's."""
    return build(spec_of(*shape), page_size=16, dial=False, variants=(SAMPLING,))


@functools.cache
def dense_logits(ids: tuple[int, ...]) -> np.ndarray:
    """Return f64[V]: the target's logits after `ids`, by one dense forward."""
    params, _ = tiny_params()
    tokens = jnp.asarray(ids)[None]
    hidden, _ = forward(
        TARGET, params, tokens, dtype=jnp.float32, attend=lambda _: causal_attention
    )
    return np.asarray(lm_logits(params, hidden[0, -1]), np.float64)


def filtered(logits: np.ndarray, sampling: SamplingParams) -> dict[int, float]:
    """Return probabilities after the joint filters, by sorting."""
    p = np.exp((logits - logits.max()) / (sampling.temperature or 1.0))
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    top_k = sampling.top_k if sampling.top_k > 0 else len(p)
    keep = (
        (np.arange(len(p)) < top_k)
        & (before < sampling.top_p)
        & (p[order] >= sampling.min_p * p.max())
    )
    kept = order[keep]
    return {int(v): float(p[v] / p[kept].sum()) for v in kept}


def expected_pairs(sampling: SamplingParams, first: int) -> dict[tuple[int, int], float]:
    """Return P(second and third token | first) of the dense target and the filters."""
    pairs = {}
    for a, pa in filtered(dense_logits((*PROMPT, first)), sampling).items():
        for b, pb in filtered(dense_logits((*PROMPT, first, a)), sampling).items():
            pairs[a, b] = pa * pb
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        pytest.param(
            shape, name, id=f"{shape}-{name}", marks=() if (shape, name) == IN_CI else BY_HAND
        )
        for shape in SHAPES
        for name in FILTERS
    ],
)
def test_every_shape_and_filter_is_distributed_as_the_target_says(shape: str, name: str) -> None:
    """Grouped by the first token (prefill's), the next two (verification's) fit their joint."""
    sampling = SamplingParams(
        **{"temperature": 1.0, **FILTERS[name]}, max_new_tokens=3, ignore_eos=True
    )
    requests = [
        Request(request_id=f"s{seed}", prompt_ids=PROMPT, sampling=sampling, seed=seed)
        for seed in range(NUM_SEEDS)
    ]
    ids: list[tuple[int, ...]] = []
    accepted = 0
    for start in range(0, NUM_SEEDS, 128):
        served = serve(real_engine(SHAPES[shape]), requests[start : start + 128])
        ids.extend(served.ids)
        accepted += served.counters.num_accepted
    assert accepted > 0, "no draft was accepted: the walk was not exercised"
    first_probabilities = filtered(dense_logits(PROMPT), sampling)
    assert {row[0] for row in ids} <= set(first_probabilities)
    cells, counts = [], []
    for first, p_first in first_probabilities.items():
        for pair, p in expected_pairs(sampling, first).items():
            cells.append(p_first * p)
            counts.append(sum(row == (first, *pair) for row in ids))
    assert sum(counts) == NUM_SEEDS, "something outside the filters was emitted"
    assert_fits(np.asarray(counts), np.asarray(cells))


def test_the_reference_sees_a_wrong_distribution() -> None:
    """The statistic can fail: the same counts do not fit another temperature."""
    sampling = SamplingParams(temperature=1.0, top_k=3)
    wrong = SamplingParams(temperature=4.0, top_k=3)
    right_p = filtered(dense_logits(PROMPT), sampling)
    wrong_p = filtered(dense_logits(PROMPT), wrong)
    counts = np.asarray([round(NUM_SEEDS * p) for p in right_p.values()])
    assert_fits(counts, np.asarray(list(right_p.values())))
    with pytest.raises(AssertionError):
        assert_fits(counts, np.asarray([wrong_p[v] for v in right_p]))
