"""The threshold keeps exactly what the joint definition of top-k, top-p and min-p keeps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jspec.device.state import SamplingBatch, empty_sampling
from jspec.layers.linear import Shard
from jspec.sampling.filters import threshold

V = 12
Filters = tuple[int, float, float]  # top_k, top_p, min_p
NOTHING: Filters = (V, 1.0, 0.0)


def sampling_rows(filters: list[Filters]) -> SamplingBatch:
    top_k, top_p, min_p = (np.array(column) for column in zip(*filters, strict=True))
    zeros = jnp.zeros(len(filters), jnp.float32)
    return dataclasses.replace(
        empty_sampling(len(filters), vocab_size=V),
        seed=jnp.zeros((len(filters), 2), jnp.uint32),
        temperature=zeros,
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        min_p=jnp.asarray(min_p, jnp.float32),
    )


def kept_by_sorting(x: np.ndarray, filters: Filters) -> tuple[np.ndarray, float]:
    """Return (kept[V], distance of the closest comparison), in float64."""
    top_k, top_p, min_p = filters
    order = np.argsort(-x, kind="stable")
    ranked = x[order].astype(np.float64)
    p = np.exp(ranked - ranked[0])
    p /= p.sum()
    first_of_tie = np.searchsorted(-ranked, -ranked, side="left")  # how many are above
    mass_above = np.append(0.0, np.cumsum(p))[first_of_tie]
    by_k = first_of_tie < top_k
    by_p = (mass_above < top_p) | (top_p >= 1.0)
    by_min = p >= min_p * p[0]
    margins = [np.ones(1)]
    if min_p > 0:
        margins.append(np.abs(p / p[0] - min_p)[p < p[0]])
    if top_p < 1.0:
        margins.append(np.abs(mass_above - top_p))
    kept = np.zeros(len(x), bool)
    kept[order] = by_k & by_p & by_min & (ranked > -np.inf)
    return kept, float(np.min(np.concatenate(margins)))


@jax.jit
def _keep(logits: jax.Array, rows: SamplingBatch) -> jax.Array:
    found = threshold(logits[:, None], rows, shard=Shard())[:, 0]
    return (logits >= found[:, None]) & (logits > -jnp.inf)


def keep(x: np.ndarray, filters: Filters) -> np.ndarray:
    kept = _keep(jnp.asarray(x[None], jnp.float32), sampling_rows([filters]))
    return np.asarray(kept[0])


logit_values = st.one_of(
    st.sampled_from([-np.inf, -2.0, -1.0, -0.0, 0.0, 0.5, 0.5, 3.0, 30.0]),
    st.floats(-40, 40, width=32, allow_subnormal=False),
)
filter_values = st.tuples(
    st.integers(1, V + 3),
    st.one_of(st.just(1.0), st.floats(0.015625, 1.0, width=32)),
    st.one_of(st.just(0.0), st.just(1.0), st.integers(1, 39).map(lambda n: n / 40)),
)


@settings(max_examples=150)
@given(st.lists(logit_values, min_size=V, max_size=V), st.sampled_from([1, 0.05]), filter_values)
def test_keeps_what_the_definition_keeps(
    logits: list[float], scale: float, filters: Filters
) -> None:
    x = np.array(logits, np.float32) * np.float32(scale)
    x = np.where((x != 0) & (np.abs(x) < 1e-30), 0.0, x)  # devices flush subnormal numbers
    assume(np.isfinite(x).any())
    expected, margin = kept_by_sorting(x, filters)
    assume(margin > 1e-5)
    np.testing.assert_array_equal(keep(x, filters), expected)


def test_top_p_1_drops_nothing_however_unlikely() -> None:
    x = np.array([0.0, -20.0, -60.0, -1e4, -3e38], np.float32)
    assert keep(x, NOTHING).all()
    np.testing.assert_array_equal(keep(x, (V, 0.999999, 0.0)), [True, False, False, False, False])


def test_the_maximum_survives_any_filter() -> None:
    x = np.array([-3.0, -2.5, -2.5 - 1e-6, -np.inf], np.float32)
    smallest = float(np.finfo(np.float32).tiny)
    for filters in [(1, smallest, 1.0), (1, 1e-6, 0.5), (V, smallest, 0.0)]:
        assert keep(x, filters)[1]
        assert not keep(x, filters)[3]


@pytest.mark.parametrize("min_p", [0.05, 0.3, 0.9])
def test_min_p_is_relative_to_the_maximum(min_p: float) -> None:
    x = np.log(np.linspace(0.01, 1.0, V))
    np.testing.assert_array_equal(keep(x, (V, 1.0, min_p)), np.exp(x) >= min_p)
