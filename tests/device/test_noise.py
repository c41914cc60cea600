"""Shared noise: distinct where it must differ, equal where it must agree, Gumbel distributed."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.device import noise
from tests.support.goodness_of_fit import assert_fits

LINE, ACROSS = 4096, 64  # consecutive values on the axis looked at, and values across it
AXES = ("seed", "high word", "position", "id")
STARTS = (0, 2**32 - 2048, 0x9E3779B97F4A7C15)


def words(seeds: np.ndarray) -> jax.Array:
    """Split u64[n] into u32[n, 2], high and low word."""
    parts = np.stack((seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)), axis=-1)
    return jnp.asarray(parts.astype(np.uint32))


@jax.jit
def _bits(seed: jax.Array, position: jax.Array, token_id: jax.Array) -> jax.Array:
    return noise.noise_bits(noise.position_key(seed, position), token_id)


_gumbel_from_bits = jax.jit(noise.gumbel_from_bits)
_gumbel = jax.jit(noise.gumbel)
_position_key = jax.jit(noise.position_key)


def bits_along(axis: str, start: int) -> np.ndarray:
    """Return u32[LINE, ACROSS]: `axis` varies along the first dimension, the others along the
    second."""
    along = np.arange(LINE, dtype=np.uint64)[:, None]
    across = np.arange(ACROSS, dtype=np.uint64)[None, :]
    seed, position, token_id = np.uint64(start) + 0 * along, 7 + 0 * along, across + 0 * along
    if axis == "seed":
        seed = seed + along
    elif axis == "high word":
        seed = seed + (along << np.uint64(32))
    elif axis == "position":
        position = position + along
    else:
        seed, token_id = seed + across, along + 0 * across
    shape = (LINE, ACROSS)
    return np.asarray(
        _bits(
            words(np.broadcast_to(seed, shape)),
            jnp.asarray(np.broadcast_to(position, shape).astype(np.int32)),
            jnp.asarray(np.broadcast_to(token_id, shape).astype(np.int32)),
        )
    )


def unmix32(x: int) -> int:
    """Invert MurmurHash3's finaliser, in Python integers."""

    def unshift(y: int, by: int) -> int:
        x = y
        for _ in range(32 // by + 1):
            x = y ^ (x >> by)
        return x

    x = unshift(x, 16) * pow(0xC2B2AE35, -1, 2**32) % 2**32
    x = unshift(x, 13) * pow(0x85EBCA6B, -1, 2**32) % 2**32
    return unshift(x, 16)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8), st.integers(0, 2**31 - 1))
def test_key_and_position_give_the_seed_back(seeds: list[int], position: int) -> None:
    """So no two seeds share a key at a position."""
    array = np.array(seeds, np.uint64)
    k0, k1 = _position_key(words(array), jnp.full(8, position, jnp.int32))
    for i, seed in enumerate(seeds):
        h1 = (unmix32(int(k1[i])) - int(k0[i])) % 2**32
        mixed = int(noise.mix32(jnp.uint32((position + h1) % 2**32)))
        h0 = unmix32(int(k0[i])) ^ mixed
        assert unmix32(h0) ^ 0x9E3779B9 == seed % 2**32
        assert unmix32(h1) ^ h0 == seed >> 32


@pytest.mark.slow_cases(
    "high word-0", "position-0", "seed-0", "high word-4294965248", "position-4294965248"
)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("axis", AXES)
def test_neighbours_share_no_more_values_than_chance(axis: str, start: int) -> None:
    values = bits_along(axis, start)
    expected = values.size**2 / 2**33  # birthday collisions, 8
    shared = values.size - len(np.unique(values))
    assert shared <= expected + 5 * math.sqrt(expected)
    if axis != "id":
        # Sequences of two requests never coincide, shifted or not.
        pairs = values[:, :-1].astype(np.uint64) << np.uint64(32) | values[:, 1:]
        assert len(np.unique(pairs)) == pairs.size


def test_ids_of_one_position_never_share_a_value() -> None:
    """For one key the hash is a bijection of the token id."""
    values = np.asarray(
        _bits(words(np.array([3], np.uint64)), jnp.zeros(1, int), jnp.arange(2**17))
    )
    assert len(np.unique(values)) == 2**17


@pytest.mark.parametrize("lag", [1, 64])
@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_uncorrelated(axis: str, lag: int) -> None:
    g = np.asarray(_gumbel_from_bits(bits_along(axis, STARTS[1]))).astype(np.float64)
    near, far = g[:-lag].ravel(), g[lag:].ravel()
    assert abs(np.corrcoef(near, far)[0, 1]) < 5 / math.sqrt(near.size)


@pytest.mark.parametrize("axis", AXES)
def test_every_bit_moves_half_the_time_between_neighbours(axis: str) -> None:
    values = bits_along(axis, 0)
    moved = values[:-1] ^ values[1:]
    for bit in range(32):
        rate = ((moved >> np.uint32(bit)) & 1).mean()
        assert abs(rate - 0.5) < 5 * 0.5 / math.sqrt(moved.size)


def test_every_bit_of_the_seed_matters() -> None:
    base = np.uint64(0x0123456789ABCDEF)
    seeds = np.append(base ^ (np.uint64(1) << np.arange(64, dtype=np.uint64)), base)
    values = np.asarray(
        _bits(words(seeds)[:, None], jnp.zeros((65, 1), jnp.int32), jnp.arange(1024))
    )
    agreement = np.bitwise_count(values[:-1] ^ values[-1]).mean(axis=1)
    np.testing.assert_allclose(agreement, 16, atol=5 * math.sqrt(8 / 1024))


def test_mean_variance_and_distribution_are_gumbels() -> None:
    g = np.sort(np.asarray(_gumbel_from_bits(bits_along("seed", 0))).astype(np.float64).ravel())
    n, variance = g.size, math.pi**2 / 6
    assert abs(g.mean() - np.euler_gamma) < 5 * math.sqrt(variance / n)
    # The kurtosis of a Gumbel is 5.4: the variance of a sample variance is 4.4 s^4 / n.
    assert abs(g.var() - variance) < 5 * variance * math.sqrt(4.4 / n)
    cdf = np.exp(-np.exp(-g))
    ranks = np.arange(n + 1) / n
    distance = max(np.abs(cdf - ranks[1:]).max(), np.abs(cdf - ranks[:-1]).max())
    assert distance < 2.7 / math.sqrt(n)  # Kolmogorov: exceeded once in 10^6


def extreme_bits() -> np.ndarray:
    powers = 2 ** np.arange(32, dtype=np.int64)
    near = np.concatenate([powers + d for d in (-2, -1, 0, 1, 2)] + [2**32 - 1 - powers])
    return np.unique(np.clip(near, 0, 2**32 - 1)).astype(np.uint32)


def test_finite_and_decreasing_at_extreme_bit_patterns() -> None:
    g = np.asarray(_gumbel_from_bits(jnp.asarray(extreme_bits())))
    assert np.isfinite(g).all()
    assert (np.diff(g) <= 0).all()
    assert g[0] > 22.8  # -log(2**-33): odds of 1e-10 exist
    assert g[-1] < -2.8


def test_right_tail_is_exact() -> None:
    bits = np.unique(np.concatenate((np.arange(2**16), 2 ** np.arange(24))))
    exact = -np.log(-np.log1p(-(bits + 0.5) * 2.0**-32))
    g = np.asarray(_gumbel_from_bits(jnp.asarray(bits.astype(np.uint32))))
    np.testing.assert_allclose(g, exact, rtol=4e-7)
    assert len(np.unique(g[: 2**10])) == 2**10  # neighbours are told apart


@pytest.mark.parametrize("odds", [1e-1, 1e-5, 3e-9])
def test_odds_of_rare_tokens_are_right(odds: float) -> None:
    """P(g > t) over all 2**32 bit patterns, counted by bisection since g falls as the bits grow."""
    level = -math.log(-math.log1p(-odds))
    low, high = 0, 2**32
    while low < high:
        middle = (low + high) // 2
        if float(_gumbel_from_bits(jnp.full(1, middle, jnp.uint32))[0]) > level:
            low = middle + 1
        else:
            high = middle
    assert abs(low - odds * 2**32) <= 1 + 1e-6 * odds * 2**32


LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01]))


@pytest.mark.parametrize("axis", ["seed", "high word", "position"])
def test_gumbel_max_frequencies_are_softmax(axis: str) -> None:
    n = np.arange(20_000, dtype=np.uint64)
    seeds = {"seed": n, "high word": n << np.uint64(32), "position": 0 * n + np.uint64(99)}[axis]
    positions = n.astype(np.int32) if axis == "position" else np.full(n.shape, 12, np.int32)
    g = np.asarray(_gumbel(words(seeds), jnp.asarray(positions), jnp.arange(len(LOGITS))))
    chosen = np.argmax(LOGITS + g, axis=-1)
    assert_fits(np.bincount(chosen, minlength=len(LOGITS)), np.exp(LOGITS))
    # Consecutive draws are independent: the pairs have the product distribution.
    pairs = np.bincount(chosen[:-1] * len(LOGITS) + chosen[1:], minlength=len(LOGITS) ** 2)
    assert_fits(pairs, np.outer(np.exp(LOGITS), np.exp(LOGITS)).ravel())


@pytest.mark.parametrize("shape", [(1,), (2, 5), (17,)])
def test_a_value_does_not_depend_on_the_shape_it_is_computed_in(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, shape, np.uint64)
    positions = rng.integers(0, 2**20, shape, np.int32)
    ids = jnp.arange(321, dtype=jnp.int32)
    whole = np.asarray(_gumbel(words(seeds), jnp.asarray(positions), ids))
    assert whole.shape == (*shape, 321)
    assert whole.dtype == np.float32
    first = tuple(0 for _ in shape)
    alone = _gumbel(words(seeds[first])[None], jnp.asarray(positions[first])[None], ids)
    np.testing.assert_array_equal(alone[0], whole[first])
    some = ids[5:320:7]
    part = _gumbel(words(seeds), jnp.asarray(positions), some)
    np.testing.assert_array_equal(part, whole[..., 5:320:7])
    shifted = jax.jit(jax.vmap(noise.gumbel, in_axes=(0, 0, None)))
    np.testing.assert_array_equal(shifted(words(seeds), jnp.asarray(positions), ids), whole)
