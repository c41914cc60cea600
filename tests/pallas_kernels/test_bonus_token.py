"""The output of a verification: a gather along the path, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jspec.pallas_kernels.bonus_token.reference import gather_bonus, gather_path

B, N, M = 3, 7, 4
_gather_path, _gather_bonus = jax.jit(gather_path), jax.jit(gather_bonus)

row = st.tuples(
    st.lists(st.integers(0, 2**31 - 1), min_size=N, max_size=N),
    st.lists(st.integers(0, N - 1), min_size=M, max_size=M),
    st.integers(0, M - 1),
)


@given(st.lists(row, min_size=B, max_size=B))
def test_emitted_ids_and_bonus(rows: list[tuple[list[int], list[int], int]]) -> None:
    """Node arrays have N columns and path arrays M; rows of unequal length do not mix."""
    values, paths, num_accepted = (np.array(c, np.int32) for c in zip(*rows, strict=True))
    emitted = _gather_path(jnp.asarray(values), jnp.asarray(paths), jnp.asarray(num_accepted))
    bonus = _gather_bonus(emitted, jnp.asarray(num_accepted))
    for b, (ids, path, count) in enumerate(rows):
        expected = [ids[node] for node in path[: count + 1]]
        assert emitted[b].tolist() == expected + [0] * (M - 1 - count)
        assert int(bonus[b]) == expected[-1]


def test_what_lies_after_the_path_is_never_used() -> None:
    values = jnp.asarray([[11, 12, 13, 14]], jnp.int32)
    for garbage in (-1, 99):
        path = jnp.asarray([[0, 1, garbage]], jnp.int32)
        assert _gather_path(values, path, jnp.asarray([1], jnp.int32)).tolist() == [[11, 12, 0]]
