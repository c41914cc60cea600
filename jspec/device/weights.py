"""A stored weight on a device or host: an array, or a pytree of its format's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.device import fp8, int8
from jspec.device.fp8 import FP8Weight
from jspec.device.int8 import INT8Weight
from jspec.device.mxfp4 import MXFP4Weight
from jspec.spec.weight_format import FP8, MXFP4, W8A8, ArraySpec, Shape, WeightFormat

# jax.Array or one of PACKED, or the same structure of numpy arrays, shapes, shardings, references
Weight = Any
W8A8Weight = FP8Weight | INT8Weight
PACKED = (MXFP4Weight, FP8Weight, INT8Weight)


def weight_of(format: WeightFormat, shape: Shape, make: Callable[[ArraySpec], Any]) -> Weight:
    """Return a weight of logical `shape` from arrays that `make` creates one after the other."""
    arrays = {name: make(spec) for name, spec in format.arrays(shape).items()}
    if isinstance(format, MXFP4):
        return MXFP4Weight(**arrays, length=shape[-2])
    return w8a8_weight(format, **arrays) if isinstance(format, W8A8) else arrays["values"]


def w8a8_weight(format: W8A8, *, codes: Any, scales: Any) -> W8A8Weight:
    """Return a weight, or its placement, of the parts' arrays or placements."""
    kind = FP8Weight if isinstance(format, FP8) else INT8Weight
    return kind(codes=codes, scales=scales)


def quantized_weight(weight: jax.Array, format: W8A8) -> W8A8Weight:
    """Quantize a weight [K, N] by the largest magnitude of each channel or block."""
    if isinstance(format, FP8):
        return fp8.quantized_weight(weight, has_blocks=format.has_blocks)
    return int8.quantized_weight(weight)


def abstract_weight(format: WeightFormat, shape: Shape) -> Weight:
    return weight_of(format, shape, lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)))


def dense(weight: Weight, dtype: Any) -> jax.Array:
    """Return the weight as one array, unpacked to `dtype` if it is packed."""
    found: jax.Array = weight.dense(dtype) if isinstance(weight, PACKED) else weight
    return found
