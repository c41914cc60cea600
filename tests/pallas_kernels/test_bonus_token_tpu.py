"""The TPU's gather of a verification's output, in interpret mode, against the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jspec.pallas_kernels.bonus_token import reference as bonus_token
from jspec.pallas_kernels.bonus_token import tpu as bonus_token_tpu

Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
gather_reference = jax.jit(bonus_token.gather_emitted)
gather_tpu = jax.jit(bonus_token_tpu.gather_emitted)


def random_rows(seed: int, batch: int, nodes: int, most: int, width: int, dtype: Any) -> Rows:
    """Return (target_ids, hidden, node_path, num_accepted): NaN off the path, invalid nodes
    after it."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 2**31 - 1, (batch, nodes))
    num_accepted = rng.integers(0, most, batch)
    num_accepted[0], num_accepted[-1] = most - 1, 0
    path = np.where(rng.random((batch, most)) < 0.5, -1, 10**6)
    hidden = np.full((batch, nodes, width), np.nan, np.float32)
    for b in range(batch):
        count = num_accepted[b]
        path[b, 0] = 0
        path[b, 1 : count + 1] = np.sort(1 + rng.permutation(nodes - 1)[:count])
        hidden[b, path[b, : count + 1]] = rng.normal(size=(count + 1, width))
    i32 = jnp.int32
    rows = jnp.asarray(ids, i32), jnp.asarray(hidden, dtype)
    return *rows, jnp.asarray(path, i32), jnp.asarray(num_accepted, i32)


def assert_equal(rows: Rows) -> None:
    with pltpu.force_tpu_interpret_mode():
        found = gather_tpu(*rows)
    for one, other in zip(found, gather_reference(*rows), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(bits(one), bits(other))


def bits(x: jax.Array) -> np.ndarray:
    if x.dtype == jnp.int32:
        return np.asarray(x)
    assert bool(jnp.isfinite(x).all())
    whole = jnp.uint16 if x.dtype == jnp.bfloat16 else jnp.uint32
    return np.asarray(jax.lax.bitcast_convert_type(x, whole))


@pytest.mark.slow_cases("3-7", "4-1-1", "6-16", "5-64")
@pytest.mark.parametrize(
    ("batch", "nodes", "most", "width", "dtype"),
    [
        (1, 2, 2, 128, jnp.float32),
        (3, 7, 4, 384, jnp.bfloat16),  # tiles hold nodes of two rows, and padding at the end
        (6, 16, 4, 1024, jnp.bfloat16),
        (2, 33, 9, 128, jnp.float32),  # an output tile is less than one row's path
        (5, 64, 6, 640, jnp.bfloat16),
        (4, 1, 1, 128, jnp.bfloat16),  # plain decoding
    ],
)
def test_the_kernel_is_the_reference(
    batch: int, nodes: int, most: int, width: int, dtype: Any
) -> None:
    for seed in range(2):
        assert_equal(random_rows(seed, batch, nodes, most, width, dtype))


def test_paths_that_do_not_ascend_and_rows_of_any_sign() -> None:
    """Nodes come in any order, tiles are fetched again after others, and minus zero stays."""
    ids = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
    hidden = -jnp.zeros((2, 32, 128), jnp.float32).at[:, 9].set(3.0)
    path = jnp.asarray([[0, 31, 9, 30, 1], [17, 2, 9, 9, 16]], jnp.int32)
    assert_equal((ids, hidden, path, jnp.asarray([4, 3], jnp.int32)))


def test_every_tile_is_fetched_once() -> None:
    path = jnp.asarray([[0, 1, 9, -1], [0, -1, -1, -1]], jnp.int32)
    plan = bonus_token_tpu._plan_rows(path, jnp.asarray([2, 0], jnp.int32), nodes=16)
    assert plan.source.tolist() == [0, 1, 9, 9, 16, 16, 16, 16]
    assert plan.valid.tolist() == [1, 1, 1, 0, 1, 0, 0, 0]
    assert plan.fetches.tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
    assert plan.place.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
