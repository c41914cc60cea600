"""Laws of every weight format: its arrays, its bytes, and the numbers read back."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.device.mxfp4 import MXFP4Weight, pack, pack_scales
from jspec.device.weights import abstract_weight, dense, w8a8_weight
from jspec.models.files.mxfp4 import E2M1
from jspec.spec.weight_format import (
    FORMATS,
    FP8,
    INT8,
    MXFP4,
    W8A8,
    Dense,
    WeightFormat,
    itemsize,
    num_bytes,
)

EACH = (Dense("bfloat16"), MXFP4(), FP8(), FP8(has_blocks=True), INT8())
SHAPES = [(1, 32, 32), (3, 128, 96), (2, 160, 64), (1, 288, 32)]


def stored(format: WeightFormat, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return (numbers that the format can store, their weight)."""
    rng = np.random.default_rng(math.prod(shape))
    if isinstance(format, Dense):
        numbers = jnp.asarray(rng.standard_normal(shape), format.dtype)
        return numbers, numbers
    if isinstance(format, W8A8):
        arrays = format.arrays(shape)
        codes = jnp.asarray(rng.standard_normal(shape) * 40, arrays["codes"].dtype)
        scales = np.float32(2.0) ** rng.integers(-3, 4, arrays["scales"].shape).astype(np.float32)
        counts = (1, *scales.shape[-1:]) if not format.has_blocks else scales.shape[-2:]
        rows = np.arange(shape[-2]) // 128 if format.has_blocks else np.zeros(shape[-2], int)
        columns = np.arange(shape[-1]) // (128 if format.has_blocks else 1)
        each = scales.reshape(shape[0], *counts)[:, rows][:, :, columns]
        return np.asarray(codes, np.float32) * each, w8a8_weight(
            format, codes=codes, scales=jnp.asarray(scales)
        )
    stack, length, width = shape
    nibbles = rng.integers(0, 16, (stack, width, length)).astype(np.uint8)
    scales = rng.integers(117, 123, (stack, width, length // 32)).astype(np.uint8)
    signs, power = np.where(nibbles & 8, -1.0, 1.0), np.repeat(scales, 32, axis=-1).astype(int)
    numbers = np.array(E2M1)[nibbles & 7] * signs * 2.0 ** (power - 127)
    return np.swapaxes(numbers, 1, 2), packed(nibbles, scales)


def packed(nibbles: Any, scales: Any) -> MXFP4Weight:
    """Pack nibbles [X, N, K] and scales [X, N, K / 32] into a weight."""
    codes, held = (
        jnp.asarray(np.stack([of(each) for each in stack]))
        for of, stack in ((pack, nibbles), (pack_scales, scales))
    )
    return MXFP4Weight(codes=codes, scales=held, length=nibbles.shape[-1])


def test_every_format_is_under_test() -> None:
    assert tuple(dict.fromkeys(map(type, EACH))) == FORMATS


@pytest.mark.slow_cases("MXFP4()-shape0", "MXFP4()-shape2")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", EACH, ids=str)
def test_a_weight_is_as_its_format_says(format: WeightFormat, shape: tuple[int, ...]) -> None:
    """Abstract shapes match the arrays, bytes are counted right, and the numbers read back."""
    numbers, weight = stored(format, shape)
    abstract = abstract_weight(format, shape)
    assert jax.tree.structure(weight) == jax.tree.structure(abstract)
    arrays = jax.tree.leaves(weight)
    found = [(x.shape, x.dtype) for x in arrays]
    assert found == [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)]
    assert weight.shape == shape
    assert sum(x.nbytes for x in arrays) == num_bytes(format, shape)
    np.testing.assert_array_equal(np.asarray(dense(weight, jnp.bfloat16), np.float64), numbers)


def test_every_nibble_of_every_place_is_its_number() -> None:
    """Inputs 0 to 15 of each of a group's four blocks."""
    nibbles = np.tile(np.arange(16, dtype=np.uint8), 8)[None].repeat(32, axis=0)
    weight = packed(nibbles[None], np.full((1, 32, 4), 127, np.uint8))
    expected = np.tile([*E2M1, *(-x for x in E2M1)], 8)
    np.testing.assert_array_equal(np.asarray(weight.dense(np.float32)[0, :, 0]), expected)


def test_the_bytes_of_a_dtype() -> None:
    assert [itemsize(name) for name in ("bfloat16", "float32", "uint8", "int64")] == [2, 4, 1, 8]
    with pytest.raises(ValueError, match="dtype is 'bool'; expected a name with its bits"):
        itemsize("bool")
