"""However many parts a pass makes, the threshold keeps what halving the range keeps.

`by_halving` is the search in its plainest form, over a stored array of weights; record 0003
describes it. Only the order of the float32 sums may differ, so cases in which rounding decides
are left out wherever that order does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jspec.device.state import SamplingBatch, empty_sampling
from jspec.layers.linear import Shard
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.choose import choose
from jspec.sampling.filters import ON_CPU, ON_GPU, ON_TPU, Passes, _in_pieces, _pivots, threshold

V, B, N = 12, 2, 2
EVERY = [ON_CPU, ON_GPU, ON_TPU, Passes(parts=4, columns=6), Passes(parts=16, columns=3)]
TINY = float(np.finfo(np.float32).tiny)


def by_halving(logits: jax.Array, rows: SamplingBatch) -> jax.Array:
    """32 halvings between the lowest float and the maximum; ordered keys as in filters.py."""
    divisor = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]

    def key(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)

    def value(k: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(
            jnp.where(k < 0, k ^ jnp.int32(0x7FFFFFFF), k), jnp.float32
        )

    top = jnp.max(logits, axis=-1)
    weight = jnp.exp((logits - top[..., None]) * (1.0 / divisor[..., None]))
    total = jnp.sum(weight, axis=-1)
    top_k, top_p, min_p = rows.top_k[:, None], rows.top_p[:, None], rows.min_p[:, None]

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        above = logits > value(middle)[..., None]
        count = jnp.sum(above, axis=-1, dtype=jnp.int32)
        mass = jnp.sum(jnp.where(above, weight, 0.0), axis=-1)
        kept = (count < top_k) & ((mass < top_p * total) | (top_p >= 1.0))
        return jnp.where(kept, low, middle + 1), jnp.where(kept, middle, high)

    lowest = jnp.full(top.shape, key(jnp.float32(-3.4e38)), jnp.int32)
    _, found = jax.lax.fori_loop(0, 32, halve, (lowest, key(top)))
    lowest_p = top + divisor * jnp.log(jnp.maximum(min_p, 1e-38))
    by_min_p = jnp.where(min_p > 0, lowest_p, -jnp.inf)
    keeps_all = (top_k >= logits.shape[-1]) & (top_p >= 1.0) & (min_p <= 0)
    return jnp.where(keeps_all, -jnp.inf, jnp.maximum(value(found), by_min_p))


def rows_of(top_k: list[int], top_p: list[float], min_p: list[float]) -> SamplingBatch:
    rows = len(top_k)
    seed = np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2)
    return SamplingBatch(
        **{
            **vars(empty_sampling(rows, vocab_size=V)),
            "seed": jnp.asarray(seed),
            "top_k": jnp.asarray(top_k, jnp.int32),
            "top_p": jnp.asarray(top_p, jnp.float32),
            "min_p": jnp.asarray(min_p, jnp.float32),
        }
    )


def rounding_decides(logits: np.ndarray, rows: SamplingBatch) -> bool:
    """Return whether the mass above a logit is so close to top_p that summation order matters."""
    p = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    above = (logits[..., None, :] > logits[..., None]) * p[..., None, :]
    top_p = np.asarray(rows.top_p, np.float64)[:, None, None]
    return bool(((np.abs(above.sum(axis=-1) - top_p) < 1e-5) & (top_p < 1.0)).any())


def _of_one_device(passes: Passes) -> Callable[[jax.Array, SamplingBatch], jax.Array]:
    return jax.jit(partial(threshold, shard=Shard(), passes=passes))


def _over_two_devices(passes: Passes) -> Callable[[jax.Array, SamplingBatch], jax.Array]:
    """Find the threshold on two vocabulary shards: [2, B, N]."""

    def found(logits: jax.Array, rows: SamplingBatch) -> jax.Array:
        return threshold(logits, rows, shard=Shard(2, "tensor"), passes=passes)[None]

    return jax.jit(
        jax.shard_map(
            found,
            mesh=Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",)),
            in_specs=(PartitionSpec(None, None, "tensor"), PartitionSpec()),
            out_specs=PartitionSpec("tensor"),
            check_vma=False,
        )
    )


_halved = jax.jit(by_halving)
_searches = {passes: _of_one_device(passes) for passes in EVERY}
_sharded = {passes: _over_two_devices(passes) for passes in (ON_CPU, ON_GPU)}

logit_values = st.one_of(  # few values, so that many tie
    st.sampled_from([-np.inf, -3e38, -2.0, -0.0, 0.0, 0.5, 0.5, 0.5000001, 3.0, 30.0]),
    st.floats(-40, 40, width=32, allow_subnormal=False),
)
logits_of_nodes = st.lists(logit_values, min_size=B * N * V, max_size=B * N * V)
two_rows = partial(st.lists, min_size=B, max_size=B)
top_ks = two_rows(st.one_of(st.just(1), st.just(V), st.integers(1, V + 3)))
top_ps = two_rows(
    st.one_of(st.sampled_from([1.0, TINY, 1e-6, 0.5]), st.floats(0.0078125, 1.0, width=32))
)
min_ps = two_rows(st.one_of(st.sampled_from([0.0, 0.0, 1.0]), st.floats(0, 1, width=32)))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(logits_of_nodes, top_ks, top_ps, min_ps)
def test_every_way_keeps_what_halving_keeps(
    logits: list[float], top_k: list[int], top_p: list[float], min_p: list[float]
) -> None:
    x = np.array(logits, np.float32).reshape(B, N, V)
    assume(np.isfinite(x).any(axis=-1).all())
    rows = rows_of(top_k, top_p, min_p)
    expected = np.asarray(_halved(jnp.asarray(x), rows))
    # Halving adds the same numbers in the same order.
    np.testing.assert_array_equal(_searches[ON_CPU](jnp.asarray(x), rows), expected)
    assume(not rounding_decides(x, rows))
    kept = x >= expected[..., None]
    for passes, search in _searches.items():
        found = np.asarray(search(jnp.asarray(x), rows))
        np.testing.assert_array_equal(x >= found[..., None], kept, err_msg=str(passes))
    for passes, search in _sharded.items():
        first, second = np.asarray(search(jnp.asarray(x), rows))
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(x >= first[..., None], kept, err_msg=f"sharded, {passes}")


@pytest.mark.parametrize(
    ("num_ids", "temperature"), [(4096, 0.7), pytest.param(5000, 0.0, marks=pytest.mark.slow)]
)
def test_a_long_vocabulary_chooses_the_same_tokens(num_ids: int, temperature: float) -> None:
    """They are equal bit for bit."""
    rng = np.random.default_rng(num_ids)
    logits = jnp.asarray(rng.normal(0, 3, (8, 2, num_ids)), jnp.float32)
    rows = rows_of([1, 50, num_ids, 5] * 2, [1.0, 0.9, 0.95, TINY] * 2, [0.0] * 7 + [0.05])
    rows = SamplingBatch(**{**vars(rows), "temperature": jnp.full(8, temperature)})
    positions = jnp.asarray(rng.integers(0, 1000, (8, 2)), jnp.int32)
    token_ids = jnp.arange(num_ids, dtype=jnp.int32)
    call = partial(choose, positions=positions, token_ids=token_ids, shard=Shard(), ops=Ops())
    chosen = jax.jit(partial(call, filtered=True))(logits, rows)
    expected = _halved(logits, rows)
    for passes in EVERY:
        found = _searches[passes](logits, rows)
        np.testing.assert_array_equal(found, expected, err_msg=str(passes))
    masked = jnp.where(logits >= expected[..., None], logits, -jnp.inf)
    np.testing.assert_array_equal(chosen, jax.jit(partial(call, filtered=False))(masked, rows))


def test_a_row_of_minus_infinity_and_a_maximum_below_the_range_are_kept() -> None:
    x = jnp.asarray([[[-np.inf] * V, [-np.inf] * (V - 1) + [-3.402e38]]], jnp.float32)
    for passes in EVERY:
        found = np.asarray(_searches[passes](x, rows_of([3], [0.9], [0.0])))
        assert (np.asarray(x)[..., -1] >= found).all()


keys = st.integers(-(2**31), 2**31 - 1)


@given(keys, keys, st.integers(1, 5))
def test_parts_are_even_and_leave_nothing_out(one: int, other: int, bits: int) -> None:
    low, high = min(one, other), max(one, other)
    pivots = _pivots(jnp.int32(low), jnp.int32(high), bits=bits)
    ends = [low - 1, *(int(pivot) for pivot in pivots), high]
    assert ends[1:] == sorted(ends[1:])
    for before, end in pairwise(ends):
        assert end - (before + 1) <= (high - low) // 2**bits


@pytest.mark.parametrize(
    ("num_ids", "columns", "cut"),
    [
        (128_256, 8192, (16, 8016)),
        (151_936, 8192, (32, 4748)),
        (12, 2**31, (12,)),
        (4096, 4096, (4096,)),
        (10_007, 8192, (10_007,)),
    ],
)
def test_rows_are_cut_where_they_divide(num_ids: int, columns: int, cut: tuple[int, ...]) -> None:
    shape = jax.eval_shape(lambda: _in_pieces(jnp.zeros((1, 2, num_ids)), columns)).shape
    assert shape == (1, 2, *cut)
