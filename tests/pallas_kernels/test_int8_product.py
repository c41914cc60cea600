"""Products of int8 weights: exact but for the rounding of the tokens, each row by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jspec.device.int8 import INT8Weight
from jspec.device.weights import quantized_weight
from jspec.pallas_kernels.int8_product.reference import int8_product, quantize
from jspec.pallas_kernels.ops import Ops
from jspec.spec.weight_format import INT8

ROWS, INPUTS, OUTPUTS = 6, 200, 48
product = jax.jit(partial(Ops.product, Ops()))
int8_product_of = partial(int8_product, out_dtype=jnp.float32)


def random_weight(seed: int) -> INT8Weight:
    rng = np.random.default_rng(seed)
    return INT8Weight(
        codes=jnp.asarray(rng.integers(-128, 128, (INPUTS, OUTPUTS)), jnp.int8),
        scales=jnp.asarray(rng.uniform(0.5, 2.0, OUTPUTS), jnp.float32),
    )


def tokens(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-3, 4, (ROWS, 1))
    return (rng.standard_normal((ROWS, INPUTS)) * sizes).astype(np.float32)


def test_a_product_is_that_of_the_numbers_but_for_the_rounding_of_the_tokens() -> None:
    weight, x = random_weight(0), tokens(1)
    numbers = np.asarray(weight.dense(jnp.float32), np.float64)
    codes, scales = map(np.asarray, jax.jit(quantize)(x))
    assert codes.dtype == np.int8
    most = np.abs(x).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(scales, most / 127, rtol=1e-6)
    np.testing.assert_array_equal(codes, np.rint(x / scales))
    assert (np.abs(codes.astype(int)).max(axis=-1) == 127).all()
    exact = (codes * scales.astype(np.float64)) @ numbers
    size = np.abs(codes * scales) @ np.abs(numbers)
    found = product(x, weight)
    assert (np.abs(np.asarray(found, np.float64) - exact) <= 4e-7 * size).all()
    half_a_step = (most / 127 / 2) * np.abs(numbers).sum(axis=0)
    assert (np.abs(np.asarray(found, np.float64) - x @ numbers) <= half_a_step * 1.001).all()
    assert product(jnp.asarray(x, jnp.bfloat16), weight).dtype == jnp.bfloat16


def test_sums_of_more_than_sixteen_bits_are_exact() -> None:
    weight = INT8Weight(codes=jnp.full((5000, 2), -128, jnp.int8), scales=jnp.ones(2))
    found = product(jnp.full((1, 5000), 127.0), weight)
    np.testing.assert_allclose(found, np.full((1, 2), -128 * 127 * 5000), rtol=1e-6)


def test_one_token_is_multiplied_as_eight_which_matrix_units_take() -> None:
    weight, x = random_weight(3), tokens(4)
    np.testing.assert_array_equal(product(x[:1], weight), product(x, weight)[:1])
    shapes = [
        equation.invars[0].aval.shape
        for equation in jax.make_jaxpr(int8_product_of)(x[:1], weight).eqns
        if equation.primitive.name == "dot_general"
    ]
    assert shapes == [(8, INPUTS)]


def test_rounding_is_to_the_nearest_code_and_to_even() -> None:
    x = jnp.asarray([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 2.4999, -126.6, 0.0]])
    codes, scales = quantize(x)
    assert scales[0, 0] == 1.0
    np.testing.assert_array_equal(codes[0], [127, 0, 2, 2, 0, -2, 2, -127, 0])


@settings(max_examples=20)
@given(data=st.data())
def test_a_row_depends_on_no_other(data: st.DataObject) -> None:
    """Rows are equal bit for bit whatever the others are; a NaN or an infinity stays in its row."""
    weight = random_weight(2)
    x = tokens(data.draw(st.integers(0, 99)))
    other = x.copy()
    row = data.draw(st.integers(0, ROWS - 1))
    values: dict[int, float] = {}
    for each in set(range(ROWS)) - {row}:
        values[each] = data.draw(st.sampled_from([0.0, np.nan, np.inf, -1e30, 1e-40]))
        other[each, data.draw(st.integers(0, INPUTS - 1)) :] = values[each]
    found = np.asarray(product(other, weight))
    np.testing.assert_array_equal(found[row], product(x, weight)[row])
    for each, value in values.items():
        assert np.isfinite(found[each]).any() == np.isfinite(value)


def test_zeros_and_tiny_numbers_give_zeros() -> None:
    x = np.zeros((2, INPUTS), np.float32)
    x[1, 0] = 1e-40
    found = np.asarray(product(x, random_weight(3)))
    assert np.isfinite(found).all()
    assert not found.any()


@pytest.mark.parametrize("fault", [None, np.nan, np.inf])
def test_shards_of_the_inputs_use_the_scale_of_the_whole_row(fault: float | None) -> None:
    """So the codes, and the text, are the same with any number of shards."""
    mesh = Mesh(jax.devices()[:2], ("tensor",))
    weight, x = random_weight(4), tokens(5)
    if fault is not None:
        x[2, 7] = fault  # of the first shard alone
    columns, whole = PartitionSpec(None, "tensor"), PartitionSpec()

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(columns, INT8Weight(codes=PartitionSpec("tensor"), scales=whole)),
        out_specs=(columns, whole),
        check_vma=False,
    )
    def run(x: jax.Array, weight: INT8Weight) -> tuple[jax.Array, jax.Array]:
        summand = int8_product(x, weight, out_dtype=jnp.float32, axis="tensor")
        return quantize(x, axis="tensor")[0], jax.lax.psum(summand, "tensor")

    codes, sums = run(x, weight)
    fine = [row for row in range(ROWS) if fault is None or row != 2]
    expected, _ = quantize(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(codes)[fine], np.asarray(expected)[fine])
    np.testing.assert_allclose(sums[fine, :], product(x, weight)[fine, :], rtol=1e-4, atol=1e-5)
    assert np.isfinite(np.asarray(sums[2])).any() == (fault is None)


def test_a_weight_s_scales_are_its_channels_largest_magnitudes() -> None:
    numbers = np.random.default_rng(6).standard_normal((INPUTS, OUTPUTS)).astype(np.float32)
    numbers[:, 3] = 0
    weight = quantized_weight(jnp.asarray(numbers), INT8())
    np.testing.assert_allclose(
        weight.scales, np.maximum(np.abs(numbers).max(axis=0), 2.0**-100) / 127, rtol=1e-6
    )
    error = np.abs(np.asarray(weight.dense(jnp.float32)) - numbers)
    assert (error <= np.asarray(weight.scales) * 0.5001).all()
    numbers[5, 7] = np.nan
    faulty = np.isnan(quantized_weight(jnp.asarray(numbers), INT8()).scales)
    np.testing.assert_array_equal(faulty, np.arange(OUTPUTS) == 7)
