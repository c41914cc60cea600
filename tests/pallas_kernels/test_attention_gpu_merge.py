"""One softmax from its shares, against the definition; unwritten memory is poisoned."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.attention.gpu_merge import NOTHING, in_order, merge_shares, reference
from jspec.pallas_kernels.attention.gpu_plan import tiles_of
from tests.pallas_kernels.chips import needs_gpu

SHAPES = {  # parts, rows, queries, heads, kv heads
    "one token": (16, 1, 1, 32, 8),
    "rows of a chain": (4, 3, 4, 8, 2),
    "a whole tile": (2, 2, 16, 8, 2),
    "two tiles": (3, 2, 10, 16, 2),
    "a group of three": (5, 2, 3, 6, 2),
}


def problem(name: str, dtype: Any, *, sinks: bool) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Return shares, some without keys; the last query is padding, and NaN follows the rows."""
    num_parts, batch, queries, heads, num_kv = SHAPES[name]
    rng = np.random.default_rng(len(name))
    rows = queries * heads // num_kv
    tiles, stored = tiles_of(rows)
    items = batch * num_kv * tiles
    parts = rng.standard_normal((num_parts, items, stored, 64)).astype(np.float32)
    heights = (rng.standard_normal((num_parts, items, 64)) * 20).astype(np.float32)
    heights[rng.random(heights.shape) < 0.2] = NOTHING
    heights[0] = np.abs(heights[0]) % 50  # at least one share has keys
    packed = parts.reshape(num_parts, batch, num_kv, tiles * stored, 64)
    packed[:, :, :, rows:] = np.nan
    valid = np.ones((batch, queries), bool)
    valid[-1, -1] = queries == 1
    drawn = jnp.asarray(rng.standard_normal(heads), jnp.float32) if sinks else None
    arrays = (jnp.asarray(parts, dtype), jnp.asarray(heights), jnp.asarray(valid), drawn)
    return arrays, {"num_heads": heads, "num_kv": num_kv}


def check(name: str, dtype: Any, *, sinks: bool, interpret: bool) -> None:
    arrays, sizes = problem(name, dtype, sinks=sinks)
    mine = merge_shares(*arrays, **sizes, interpret=interpret)
    expected = reference(*arrays, **sizes)
    assert mine.shape == expected.shape
    assert mine.dtype == dtype
    atol = 1e-5 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(
        np.asarray(mine, np.float32), np.asarray(expected, np.float32), atol=atol
    )


@pytest.mark.slow_cases("rows", "a whole")
@pytest.mark.parametrize(
    ("name", "sinks"),
    [
        ("one token", False),
        ("two tiles", True),
        ("rows of a chain", True),
        ("a whole tile", False),
    ],
)
def test_equals_the_definition(name: str, sinks: bool) -> None:
    check(name, jnp.float32, sinks=sinks, interpret=True)


def test_equals_the_definition_in_bfloat16() -> None:
    check("a group of three", jnp.bfloat16, sinks=False, interpret=True)


def test_one_softmax_over_all_shares_is_what_the_definition_is() -> None:
    scores = np.random.default_rng(0).standard_normal((3, 7)) * 5  # three shares of seven keys
    values = np.random.default_rng(1).standard_normal((3, 7, 64))
    weights = np.exp(scores)
    means = (weights[..., None] * values).sum(1) / weights.sum(1)[:, None]
    whole = (weights[..., None] * values).sum((0, 1)) / weights.sum()
    parts = np.zeros((3, 1, 8, 64), np.float32)
    parts[:, 0, 0] = means
    heights = np.zeros((3, 1, 64), np.float32)
    heights[:, 0, 0] = np.log2(weights.sum(1))
    valid = jnp.ones((1, 1), bool)
    out = reference(jnp.asarray(parts), jnp.asarray(heights), valid, num_heads=1, num_kv=1)
    np.testing.assert_allclose(out[0, 0], whole, atol=1e-5)


def test_queries_come_back_in_order_and_padding_is_zero() -> None:
    mixed = jnp.arange(2 * 8, dtype=jnp.float32).reshape(2, 8, 1)  # G = 2, group 2, R = 2
    valid = jnp.asarray([[True, False]])
    out = in_order(mixed, valid, num_heads=4, num_kv=2)
    np.testing.assert_array_equal(out[..., 0], [[0, 1, 8, 9], [0, 0, 0, 0]])


@needs_gpu
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_definition_on_the_chip(name: str, sinks: bool) -> None:
    check(name, jnp.bfloat16, sinks=sinks, interpret=False)
