"""A stored weight on a device or host: an array, or a pytree of its format's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.device.fp8 import FP8Weight
from jspec.device.mxfp4 import MXFP4Weight
from jspec.spec.weight_format import FP8, MXFP4, ArraySpec, Shape, WeightFormat

# jax.Array or one of PACKED, or the same structure of numpy arrays, shapes, shardings, references
Weight = Any
PACKED = (MXFP4Weight, FP8Weight)


def weight_of(format: WeightFormat, shape: Shape, make: Callable[[ArraySpec], Any]) -> Weight:
    """Return a weight of logical `shape` from arrays that `make` creates one after the other."""
    arrays = {name: make(spec) for name, spec in format.arrays(shape).items()}
    if isinstance(format, MXFP4):
        return MXFP4Weight(**arrays, length=shape[-2])
    if isinstance(format, FP8):
        return FP8Weight(**arrays)
    return arrays["values"]


def abstract_weight(format: WeightFormat, shape: Shape) -> Weight:
    return weight_of(format, shape, lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)))


def dense(weight: Weight, dtype: Any) -> jax.Array:
    """Return the weight as one array, unpacked to `dtype` if it is packed."""
    found: jax.Array = weight.dense(dtype) if isinstance(weight, PACKED) else weight
    return found
