"""The GPU's product of one row, interpreted, and the sum that it leaves to the norm after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.layers.norm import Residual, norm_of_sum
from jspec.pallas_kernels.choose import OPS
from jspec.pallas_kernels.experts.routing_gpu import norm_and_score
from jspec.pallas_kernels.row_product.gpu import RowTuning, choose_row, reference, row_product
from jspec.pallas_kernels.row_product.splits import Splits
from tests.pallas_kernels.chips import needs_gpu

EPS = 1e-5
SMALL = RowTuning(slice_k=16, tile_n=32, num_warps=1)


def drawn(size: int, width: int, *, dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(size)
    x = jnp.asarray(rng.standard_normal((1, size)), dtype)
    return x, jnp.asarray(rng.standard_normal((size, width)) * size**-0.5, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_shares_are_the_products_of_the_slices(dtype: Any) -> None:
    x, kernel = drawn(48, 64, dtype=dtype)
    found = row_product(x, kernel, tuning=SMALL, interpret=True)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, reference(x, kernel, slice_k=16), rtol=1e-5, atol=1e-6)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(np.sum(found, axis=0), exact, rtol=1e-5, atol=1e-5)


def test_a_nan_in_the_row_is_a_nan_in_every_column() -> None:
    x, kernel = drawn(48, 64, dtype=jnp.float32)
    found = row_product(x.at[0, 20].set(jnp.nan), kernel, tuning=SMALL, interpret=True)
    assert np.isnan(np.asarray(found[1])).all()
    assert np.isfinite(np.asarray(found[0])).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_shares", [3, 4])
def test_the_norm_adds_the_shares_as_their_sum_rounds(num_shares: int, has_bias: bool) -> None:
    """Small integers: in any order their sums are the same, and so are all roundings."""
    rng = np.random.default_rng(num_shares)
    size, dtype = 48, jnp.bfloat16
    x, bias = (jnp.asarray(rng.integers(-8, 9, shape), dtype) for shape in ((1, size), (size,)))
    shares = jnp.asarray(rng.integers(-99, 99, (num_shares, 1, size)) / 8, jnp.float32)
    splits = Splits(shares=shares, bias=bias if has_bias else None)
    scale, router = jnp.ones(size, dtype), jnp.asarray(rng.standard_normal((size, 20)), dtype)
    rest = (scale, router)
    found = norm_and_score(x, splits, *rest, eps=EPS, interpret=True)
    expected = norm_and_score(x, splits.sum(dtype), *rest, eps=EPS, interpret=True)
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, wanted)
    ops, stream = OPS["xla"], Residual(x=x, delta=splits)
    np.testing.assert_array_equal(stream.sum(), found[0])
    assert norm_of_sum({"scale": scale}, stream, eps=EPS, ops=ops)[1].dtype == dtype


@pytest.mark.parametrize(("size", "width"), [(4096, 2048), (4096, 2880)])
def test_one_row_of_the_real_products_is_served(size: int, width: int) -> None:
    assert choose_row(1, size, width) is not None
    x, kernel = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, size), (size, width)))
    shares = jax.eval_shape(
        lambda x, kernel: OPS["gpu_interpret"].row_product(x, kernel, None), x, kernel
    )
    assert shares is not None
    assert shares.shares.shape == (size // RowTuning().slice_k, 1, width)


@pytest.mark.parametrize(
    "change", [{"num_rows": 2}, {"size": 4000}, {"width": 2000}, {"size": 512}]
)
def test_what_has_no_plan(change: dict[str, int]) -> None:
    fits = {"num_rows": 1, "size": 4096, "width": 1024}
    assert choose_row(**fits) is not None
    assert choose_row(**(fits | change)) is None


def test_tiles_that_do_not_divide_are_refused() -> None:
    x, kernel = drawn(48, 64, dtype=jnp.float32)
    with pytest.raises(ValueError, match="sizes that 32 and 32 divide"):
        row_product(x, kernel, tuning=replace(SMALL, slice_k=32), interpret=True)


@needs_gpu
@pytest.mark.parametrize(("size", "width"), [(4096, 2048), (4096, 2880)])
def test_equals_its_reference_on_the_chip(size: int, width: int) -> None:
    x, kernel = drawn(size, width, dtype=jnp.bfloat16)
    tuning = RowTuning()
    found = jax.jit(lambda x, kernel: row_product(x, kernel, tuning=tuning))(x, kernel)
    expected = reference(x, kernel, slice_k=tuning.slice_k)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
