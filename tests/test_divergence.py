"""The rate of first divergence: counting, comparing, and failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.divergence import (
    Configuration,
    Measurement,
    Settings,
)
from benchmarks.divergence_counts import compare, first_divergence
from benchmarks.divergence_pairs import (
    WIDENING,
    Pair,
    dummy_pair,
    random_prompts,
    wide_config,
    wide_tensor,
    with_heads,
)
from benchmarks.workloads import WORKLOADS
from jspec.layers.rope import angles_of
from jspec.pallas_kernels.kv_write.reference import rotate
from jspec.spec.model_spec import ModelSpec

SETTINGS = Settings(
    num_prompts=3, prompt_tokens=12, new_tokens=8, num_rows=1, num_alone=1, seconds=600
)


@pytest.mark.parametrize(
    ("ids", "reference", "expected"),
    [
        ((5, 6, 9), (5, 6, 7), 2),
        ((9, 6, 7), (5, 6, 7), 0),
        ((5, 6, 7), (5, 6, 7), None),
        ((5, 6), (5, 6, 7), 2),
        ((5, 6, 7), (5, 6), 2),
        ((), (), None),
    ],
)
def test_the_first_divergence(
    ids: tuple[int, ...], reference: tuple[int, ...], expected: int | None
) -> None:
    assert first_divergence(ids, reference) == expected


def test_a_prompt_counts_up_to_its_first_divergence() -> None:
    """4 tokens without one and 2 up to one; tokens after it do not count."""
    same = (1, 2, 3, 4)
    row = compare([same, (1, 9, 3, 9)], [same, same])
    assert (row["num_prompts"], row["num_diverged"], row["tokens_compared"]) == (2, 1, 6)
    assert row["per_1000_tokens"] == pytest.approx(1000 / 6, abs=1e-3)
    low, high = row["interval_95"]
    assert low < row["per_1000_tokens"] < high
    assert (row["first_positions"], row["median_first_position"]) == ([1], 1)


# The pairs.


def attended(x: np.ndarray, weights: dict[str, np.ndarray], config: ModelSpec) -> np.ndarray:
    """Causal attention of the tokens x[T, E] with Hugging Face's projections; float32."""
    heads = config.one_layer.attention
    q, k, v = (
        jnp.asarray(x @ weights[f"{name}_proj.weight"].T).reshape(len(x), -1, heads.head_dim)
        for name in "qkv"
    )
    angles = angles_of(7 + jnp.arange(len(x)), head_dim=heads.head_dim, rope=heads.rope)
    q, k = rotate(q, *angles), rotate(k, *angles)
    k, v = (jnp.repeat(y, heads.num_heads // heads.num_kv_heads, axis=1) for y in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) * heads.head_dim**-0.5
    scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)
    out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
    return np.asarray(out.reshape(len(x), -1) @ weights["o_proj.weight"].T)


def test_wide_heads_are_the_same_function() -> None:
    config = WORKLOADS["tiny"].target
    own = config.one_layer.attention
    widths = {"q": own.num_heads, "k": own.num_kv_heads, "v": own.num_kv_heads}
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.5, shape).astype(np.float32)

    weights = {
        f"{name}_proj.weight": draw(heads * own.head_dim, config.hidden_size)
        for name, heads in widths.items()
    }
    weights["o_proj.weight"] = draw(config.hidden_size, own.num_heads * own.head_dim)
    wide = {
        name: wide_tensor(name, weight, head_dim=own.head_dim) for name, weight in weights.items()
    }
    assert wide["q_proj.weight"].shape[0] == WIDENING * weights["q_proj.weight"].shape[0]
    x = draw(9, config.hidden_size)
    expected = attended(x, weights, config)
    np.testing.assert_allclose(attended(x, wide, wide_config(config)), expected, atol=2e-5)
    turned_wrongly = with_heads(wide_config(config), rope=own.rope)
    assert np.abs(attended(x, wide, turned_wrongly) - expected).max() > 0.01


# Whole runs.


@pytest.fixture
def tiny(tmp_path: Path) -> Pair:
    pair = dummy_pair(WORKLOADS["tiny"], tmp_path / "pair")
    return replace(pair, prompts=random_prompts(pair, (3, 12)))


def measurement_of(pair: Pair, tmp_path: Path, **more: float) -> Measurement:
    engine = {"compilation_cache_dir": "", "chunked_prefill_size": 32}
    settings = replace(SETTINGS, engine=engine, **more)  # type: ignore[arg-type]
    return Measurement(pair, settings, tmp_path / "deep" / "divergence.json")


def test_a_failure_costs_one_configuration(tiny: Pair, tmp_path: Path) -> None:
    measurement = measurement_of(tiny, tmp_path)
    todo = (
        Configuration(dtype="float12", backend="xla", mode="plain"),
        Configuration(dtype="float32", backend="pallas", mode="plain"),
    )
    measurement.run(todo)
    engines = measurement.engines
    assert "float12" in engines["float12/xla/plain"]["error"]
    assert "on cpu devices" in engines["float32/pallas/plain"]["skipped"]
    assert not measurement.is_sound
    stored = json.loads((tmp_path / "deep" / "divergence.json").read_text(encoding="utf-8"))
    assert (stored["engines"], stored["rows"]) == (engines, [])
    assert (stored["head_dim"], stored["settings"]["new_tokens"]) == (8, 8)
