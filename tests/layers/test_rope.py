"""RoPE against a rotation in float64, Llama 3.1's scaling at its landmarks, other scalings against
transformers."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.files.json_files import Fields
from jspec.layers.rope import angles_of, inverse_frequencies
from jspec.pallas_kernels.kv_write.reference import rotate
from jspec.spec.rope import RopeConfig, YarnConfig
from jspec.spec.rope_io import read_rope
from tests.support.golden_arrays import arrays_of

YARN = arrays_of(Path(__file__).parents[1] / "golden" / "yarn.npz")
LLAMA31 = RopeConfig(
    theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


@partial(jax.jit, static_argnames="rope")
def _rotate(x: jax.Array, positions: jax.Array, *, rope: RopeConfig) -> jax.Array:
    return rotate(x, *angles_of(positions, head_dim=x.shape[-1], rope=rope))


@pytest.mark.parametrize("rope", [RopeConfig(), RopeConfig(theta=500000.0), LLAMA31])
def test_pairs_turn_by_position_times_frequency(rope: RopeConfig) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 4000])
    out = np.asarray(_rotate(jnp.asarray(x), jnp.asarray(positions, jnp.int32), rope=rope))
    pairs = x[..., :8].astype(np.float64) + 1j * x[..., 8:]
    inv = inverse_frequencies(16, rope).astype(np.float64)
    turned = pairs * np.exp(1j * positions[:, None, None] * inv)
    expected = np.concatenate((turned.real, turned.imag), axis=-1)
    np.testing.assert_allclose(out, expected, atol=2e-3)  # f32 angles of up to 4000
    np.testing.assert_allclose(out[:3], expected[:3], atol=2e-6)
    np.testing.assert_array_equal(out[0], x[0])


def test_scores_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 32)), jnp.float32) for _ in range(2))
    turn = partial(_rotate, rope=RopeConfig())

    def score(q_position: int, k_position: int) -> float:
        at = [jnp.full(1, p, jnp.int32) for p in (q_position, k_position)]
        return float(jnp.sum(turn(q, at[0]) * turn(k, at[1])))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_unscaled_frequencies() -> None:
    inv = inverse_frequencies(8, RopeConfig(theta=10000.0))
    np.testing.assert_allclose(inv, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_llama31_scaling_slows_long_waves_only() -> None:
    """Waves under 8192 / 4 tokens stay, those over 8192 / 1 slow eightfold, those between blend."""
    plain = inverse_frequencies(128, RopeConfig(theta=500000.0)).astype(np.float64)
    scaled = inverse_frequencies(128, LLAMA31).astype(np.float64)
    wave = 2 * math.pi / plain
    np.testing.assert_allclose(scaled[wave < 2048], plain[wave < 2048], rtol=1e-6)
    np.testing.assert_allclose(scaled[wave > 8192], plain[wave > 8192] / 8, rtol=1e-6)
    between = (wave > 2048) & (wave < 8192)
    assert between.any()
    share = (8192 / wave[between] - 1) / 3
    np.testing.assert_allclose(
        scaled[between], plain[between] * ((1 - share) / 8 + share), rtol=1e-6
    )


@pytest.mark.parametrize(
    "case",
    [
        *("gpt_oss", "qwen3", "both_mscales", "stated_factor", "short_context", "kimi_k2"),
        *("one_step", "linear", "dynamic"),
    ],
)
def test_scaled_frequencies_equal_transformers(case: str) -> None:
    """The expected values are transformers', in float32 (tests/golden/make_yarn_golden.py)."""
    table = json.loads(str(YARN[f"{case}.table"]))
    rope = read_rope(Fields(Path("config.json"), {"rope_parameters": table}))
    expected = YARN[f"{case}.frequencies"]
    found = inverse_frequencies(2 * expected.size, rope)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    factor = 1.0 if rope.yarn is None else rope.yarn.attention_factor
    assert factor == pytest.approx(float(YARN[f"{case}.attention_factor"]))


def test_yarn_s_cosines_and_sines_carry_the_attention_factor() -> None:
    yarn = RopeConfig(factor=32.0, yarn=YarnConfig(attention_factor=1.25))
    cos, sin = angles_of(jnp.arange(9), head_dim=64, rope=yarn)
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-5)
    np.testing.assert_array_equal(cos[0], 1.25)


def test_dtype_is_kept_and_angles_are_float32() -> None:
    x = jnp.ones((1, 1, 4), jnp.bfloat16)
    position = jnp.full(1, 1001, jnp.int32)  # bf16 would round it to 1000
    out = _rotate(x, position, rope=RopeConfig())
    assert out.dtype == jnp.bfloat16
    exact = _rotate(x.astype(jnp.float32), position, rope=RopeConfig())
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=1e-2)
