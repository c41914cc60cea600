"""Random params with the shapes of a table, and their comparison."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jspec.models.layer import Params
from jspec.models.params import ParamTable
from jspec.models.placement import abstract_params, nested


def random_params(table: ParamTable, *, dtype: Any = np.float32, seed: int = 0) -> Params:
    """Draw host arrays: norms away from 1, biases from 0; a tied weight is the other,
    transposed."""
    rng = np.random.default_rng(seed)
    params: Params = jax.tree.map(
        lambda leaf: (rng.standard_normal(leaf.shape) / 4).astype(leaf.dtype),
        abstract_params(table, dtype=dtype),
    )
    values = {spec.path: value_at(params, spec.path) for spec in table}
    for spec in table:
        if spec.tied_to is not None:
            values[spec.path] = values[spec.tied_to].T
    return nested(values.items())


def value_at(params: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        params = params[key]
    return params


def assert_same(found: Params, expected: Params) -> None:
    """Assert equal trees of equal arrays, dtypes included."""
    same = jax.tree.structure(found) == jax.tree.structure(expected)  # type: ignore[operator]
    assert same
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), found, expected)
