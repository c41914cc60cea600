"""The chosen token is drawn from softmax(filtered logits / T), and only from it."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.device.state import SamplingBatch, empty_sampling
from jspec.layers.linear import Shard
from jspec.pallas_kernels.bundles import OPS
from jspec.sampling.choose import choose
from tests.support.goodness_of_fit import assert_fits

V, DRAWS = 10, 20_000
LOGITS = np.array([1.2, 0.4, -0.3, 2.0, 1.9, -1.0, 0.0, 0.1, -6.0, 1.2], np.float32)
IDS = jnp.arange(V, dtype=jnp.int32)


def rows_of(
    seeds: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = V,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SamplingBatch:
    n = len(seeds)
    words = np.stack((seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)), axis=1)
    return dataclasses.replace(
        empty_sampling(n, vocab_size=V),
        seed=jnp.asarray(words.astype(np.uint32)),
        temperature=jnp.full(n, temperature, jnp.float32),
        top_k=jnp.full(n, top_k, jnp.int32),
        top_p=jnp.full(n, top_p, jnp.float32),
        min_p=jnp.full(n, min_p, jnp.float32),
    )


@partial(jax.jit, static_argnames=("filtered", "ops"))
def _choose(
    logits: jax.Array,
    rows: SamplingBatch,
    positions: jax.Array,
    *,
    filtered: bool,
    ops: str = "xla",
) -> jax.Array:
    return choose(
        logits,
        rows,
        positions=positions,
        token_ids=IDS,
        filtered=filtered,
        shard=Shard(),
        ops=OPS[ops],
    )


def draw(rows: SamplingBatch, *, filtered: bool) -> np.ndarray:
    """Return i32[draws]: one token per row, all at position 31."""
    n = rows.temperature.shape[0]
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (n, 1, V))
    return np.asarray(
        _choose(logits, rows, jnp.full((n, 1), 31, jnp.int32), filtered=filtered)
    ).ravel()


def kept(p: np.ndarray, *, top_k: int = V, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Apply the joint definition, token by token."""
    return np.array(
        [
            (p > own).sum() < top_k
            and (p[p > own].sum() < top_p or top_p >= 1)
            and own >= min_p * p.max()
            for own in p
        ]
    )


FILTERS = [
    {},
    {"top_k": 3},
    {"top_k": 4},  # two tokens tie for the fourth place: both stay
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.85, "min_p": 0.1},
]


@pytest.mark.parametrize(
    ("filters", "temperature"), [*zip(FILTERS, [0.5, 1.0, 2.5] * 2, strict=True)], ids=str
)
def test_frequencies_over_seeds_are_the_filtered_softmax(
    filters: dict[str, float], temperature: float
) -> None:
    scaled = LOGITS.astype(np.float64) / temperature
    p = np.exp(scaled) / np.exp(scaled).sum()
    p = np.where(kept(p, **filters), p, 0.0)  # type: ignore[arg-type]
    seeds = np.arange(DRAWS, dtype=np.uint64)
    rows = rows_of(seeds, temperature=temperature, **filters)  # type: ignore[arg-type]
    chosen = draw(rows, filtered=True)
    assert_fits(np.bincount(chosen, minlength=V), p / p.sum())


@pytest.mark.parametrize("filtered", [False, True])
def test_temperature_0_is_argmax_and_ties_take_the_lowest_id(filtered: bool) -> None:
    logits = np.zeros((3, 2, V), np.float32)
    logits[0, 0, [4, 7]] = 2.0
    logits[0, 1] = -np.inf
    logits[0, 1, [6, 9]] = -5.0
    logits[1, 0, :] = [-0.0, 0.0] * (V // 2)
    logits[2, 1, 9] = 1e-30
    rows = rows_of(np.arange(3, dtype=np.uint64), temperature=0.0, top_p=0.9)
    chosen = _choose(jnp.asarray(logits), rows, jnp.ones((3, 2), jnp.int32), filtered=filtered)
    np.testing.assert_array_equal(chosen, [[4, 6], [0, 0], [0, 9]])


@pytest.mark.parametrize("temperature", [1e-3, 1e-37])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """Dividing logits by them may overflow; filters must not drop all tokens then."""
    logits = jnp.asarray(np.stack((LOGITS, LOGITS - 60.0)))[:, None]
    rows = rows_of(np.arange(2, dtype=np.uint64), temperature=temperature, top_p=0.9)
    for filtered in (False, True):
        chosen = _choose(logits, rows, jnp.ones((2, 1), jnp.int32), filtered=filtered)
        np.testing.assert_array_equal(chosen, [[3], [3]])


def test_a_choice_depends_on_its_own_row_and_position_only() -> None:
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(6, 5, V)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 1000, (6, 5)), jnp.int32)
    rows = rows_of(rng.integers(0, 2**64, 6, np.uint64), top_k=7, top_p=0.9)
    whole = np.asarray(_choose(logits, rows, positions, filtered=True))
    for b, n in [(0, 0), (3, 4), (5, 1)]:
        one = jax.tree.map(lambda x, b=b: x[b : b + 1], rows)
        alone = _choose(
            logits[b : b + 1, n : n + 1], one, positions[b : b + 1, n : n + 1], filtered=True
        )
        assert int(alone[0, 0]) == whole[b, n]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ops", ["xla", "gpu_interpret"])
def test_nan_is_not_chosen_and_filters_that_keep_all_change_nothing(
    ops: str, temperature: float
) -> None:
    """A batch is filtered if one of its rows needs it, but that must not change a row's choice."""
    logits = np.broadcast_to(LOGITS, (6, 1, V)).copy()
    logits[1, 0, [0, 3]] = np.nan
    logits[2, 0, :] = np.nan
    logits[3, 0, [2, 7]] = np.inf
    logits[4, 0, :] = -np.inf
    logits[5, 0, [1, 2, 3]] = np.nan, np.inf, -np.inf
    rows = rows_of(np.arange(6, dtype=np.uint64), temperature=temperature)
    positions = jnp.full((6, 1), 31, jnp.int32)
    plain, filtered = (
        _choose(jnp.asarray(logits), rows, positions, filtered=filtered, ops=ops).ravel()
        for filtered in (False, True)
    )
    np.testing.assert_array_equal(filtered, plain)
    assert int(plain[1]) not in (0, 3)
    assert plain[2:].tolist() == [0, 2, 0, 2]


def test_a_row_of_nan_changes_no_other_row() -> None:
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (4, 1, V))
    rows = rows_of(np.arange(4, dtype=np.uint64), top_k=7, top_p=0.9, min_p=0.01)
    positions = jnp.full((4, 1), 31, jnp.int32)
    expected = np.asarray(_choose(logits, rows, positions, filtered=True))
    for bad in (np.nan, np.inf, -np.inf):
        found = np.asarray(_choose(logits.at[1].set(bad), rows, positions, filtered=True))
        np.testing.assert_array_equal(np.delete(found, 1), np.delete(expected, 1))
        assert 0 <= found[1, 0] < V
