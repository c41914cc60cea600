"""Products of fp8 weights: close to the exact product, and each row depends only on itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.device.fp8 import LARGEST, FP8Weight
from jspec.device.weights import weight_of
from jspec.pallas_kernels.fp8_product.reference import quantize
from jspec.pallas_kernels.ops import Ops
from jspec.spec.weight_format import FP8, ArraySpec

FORMS = pytest.mark.parametrize("has_blocks", [False, True], ids=["channels", "blocks"])
ROWS, INPUTS, OUTPUTS = 6, 200, 160  # two blocks each, the second in part
product = jax.jit(partial(Ops.fp8_product, Ops()))


def random_weight(seed: int, *, has_blocks: bool) -> FP8Weight:
    rng = np.random.default_rng(seed)

    def array(spec: ArraySpec) -> jax.Array:
        if spec.dtype == "float32":
            return jnp.asarray(rng.uniform(0.5, 2.0, spec.shape), jnp.float32)
        return jnp.asarray(rng.standard_normal(spec.shape), spec.dtype)

    made: FP8Weight = weight_of(FP8(has_blocks=has_blocks), (INPUTS, OUTPUTS), array)
    return made


def tokens(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-3, 4, (ROWS, 1))
    return (rng.standard_normal((ROWS, INPUTS)) * sizes).astype(np.float32)


@FORMS
def test_a_product_is_that_of_the_numbers_but_for_the_rounding_of_the_tokens(
    has_blocks: bool,
) -> None:
    """A code has 4 significant bits: half a unit in the last place is at most 1/16 of a number, and
    2^-10 of the largest for those below the smallest normal one.
    """
    weight, x = random_weight(0, has_blocks=has_blocks), tokens(1)
    numbers = np.asarray(weight.dense(jnp.float32), np.float64)
    most = np.abs(x).max(axis=-1, keepdims=True)
    error = np.abs(x) / 16 + most * 2.0**-10 / LARGEST
    np.testing.assert_array_less(
        np.abs(np.asarray(product(x, weight), np.float64) - x @ numbers),
        error @ np.abs(numbers) + 1e-5,
    )
    codes, scales = quantize(jnp.asarray(x), weight.block)
    of_each = np.repeat(np.asarray(scales, np.float64), weight.block or INPUTS, axis=-1)[:, :INPUTS]
    exact = (np.asarray(codes, np.float64) * of_each) @ numbers
    np.testing.assert_allclose(product(x, weight), exact, rtol=1e-4, atol=1e-5 * most.max())
    assert product(jnp.asarray(x, jnp.bfloat16), weight).dtype == jnp.bfloat16


@FORMS
@settings(max_examples=20)
@given(data=st.data())
def test_a_row_depends_on_no_other(has_blocks: bool, data: st.DataObject) -> None:
    """Rows are equal bit for bit whatever the others are: zeros, NaN, or far larger ones."""
    weight = random_weight(2, has_blocks=has_blocks)
    x = tokens(data.draw(st.integers(0, 99)))
    other = x.copy()
    row = data.draw(st.integers(0, ROWS - 1))
    for each in set(range(ROWS)) - {row}:
        value = data.draw(st.sampled_from([0.0, np.nan, np.inf, -1e30, 1e-40]))
        other[each, data.draw(st.integers(0, INPUTS - 1)) :] = value
    np.testing.assert_array_equal(product(other, weight)[row], product(x, weight)[row])


@FORMS
def test_zeros_and_tiny_numbers_are_finite_and_large_ones_saturate(has_blocks: bool) -> None:
    weight = random_weight(3, has_blocks=has_blocks)
    block = weight.block
    x = np.zeros((3, INPUTS), np.float32)
    x[1, 0], x[2, :2] = 1e-40, (3e38, -3e38)
    codes, scales = jax.jit(partial(quantize, block=block))(x)
    assert codes.dtype == jnp.float8_e4m3fn
    assert scales.shape == (3, 2 if has_blocks else 1)
    assert not np.asarray(codes[:2], np.float32).any()
    np.testing.assert_array_equal(np.asarray(codes[2, :2], np.float32), (LARGEST, -LARGEST))
    assert np.isfinite(np.asarray(scales)).all()
    assert not np.asarray(product(x, weight)[:2]).any()
