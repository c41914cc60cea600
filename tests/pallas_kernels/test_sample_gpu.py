"""Fused sampling on GPUs: bit-equal to the reference and to sampling/choose.py, interpreted, and
run where there is a GPU.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import Mesh, PartitionSpec

from jspec.device import noise
from jspec.device.state import SamplingBatch, empty_sampling
from jspec.layers.linear import Shard
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.sample import gpu as sample_gpu
from jspec.pallas_kernels.sample.gpu import sample
from jspec.pallas_kernels.sample.reference import sample as sample_reference
from jspec.pallas_kernels.sample.tuning import SampleTuning, choose_tuning
from jspec.sampling.choose import choose
from jspec.sampling.filters import threshold
from tests.pallas_kernels.chips import needs_gpu

SMALL = SampleTuning(chunk=256)


def inputs(num_rows: int, width: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """Return logits, temperature (every other row greedy), seed, positions."""
    keys = jax.random.split(jax.random.key(width), 3)
    logits = (3 * jax.random.normal(keys[0], (num_rows, width), jnp.float32)).astype(dtype)
    temperature = jnp.where(jnp.arange(num_rows) % 2 == 0, 0.0, 0.8).astype(jnp.float32)
    seed = jax.random.bits(keys[1], (num_rows, 2), jnp.uint32)
    positions = jax.random.randint(keys[2], (num_rows,), 0, 10_000, jnp.int32)
    return logits, temperature, seed, positions


def assert_equal(got: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]) -> None:
    for left, right in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@partial(jax.jit, static_argnames="first_id")
def interpreted(*arrays: Any, first_id: int = 0) -> tuple[jax.Array, jax.Array]:
    return sample(*arrays, first_id=first_id, tuning=SMALL, interpret=True)


@pytest.mark.parametrize(
    ("width", "dtype"),  # less than a chunk; several, and a part at the end
    [(100, jnp.float32), (1000, jnp.bfloat16)],
)
def test_interpreted_sampling_is_bit_equal_to_the_reference(width: int, dtype: Any) -> None:
    arrays = inputs(4, width, dtype)
    wanted = jax.jit(partial(sample_reference, first_id=500))(*arrays)
    assert_equal(interpreted(*arrays, first_id=500), wanted)


@pytest.mark.slow
def test_a_vocabulary_of_128256_is_bit_equal() -> None:
    arrays = inputs(6, 128_256)
    got = jax.jit(partial(sample, interpret=True))(*arrays)
    assert_equal(got, jax.jit(sample_reference)(*arrays))


_SCALES = st.sampled_from([0.0, 1e-6, 0.01, 1.0, 10.0, 1e4, 1e30])
_TEMPERATURES = st.sampled_from([0.0, 1e-37, 1e-20, 1e-3, 0.3, 1.0, 1.7, 50.0, 1e37])
# No subnormals: what XLA compiles for a CPU flushes some of them.
_ODD = st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38])


@settings(max_examples=20, deadline=None)
@given(
    key=st.integers(0, 2**32 - 1),
    scale=_SCALES,
    offset=st.sampled_from([0.0, -7.0, 1e5]),
    temperature=_TEMPERATURES,
    odd=st.lists(st.tuples(st.integers(0, 599), _ODD), max_size=3),
    least=st.sampled_from([-np.inf, -1.0, 0.5, 1e9, np.nan, "a logit"]),
)
def test_any_row_is_bit_equal(
    key: int,
    scale: float,
    offset: float,
    temperature: float,
    odd: list[tuple[int, float]],
    least: float | str,
) -> None:
    """Flat, peaked and tied rows, infinities and NaN, at any temperature, with any threshold."""
    rng = np.random.default_rng(key)
    logits = (rng.integers(-40, 40, (4, 600)) * 0.1 * scale + offset).astype(np.float32)
    for column, value in odd:
        logits[0, column] = value
    arrays = (
        jnp.asarray(logits),
        jnp.full((4,), temperature, jnp.float32),
        jnp.asarray(rng.integers(0, 2**32, (4, 2), np.uint32)),
        jnp.asarray(rng.integers(0, 10_000, 4), jnp.int32),
    )
    assert_equal(interpreted(*arrays), _reference(*arrays))
    threshold = arrays[0][:, 7] if isinstance(least, str) else jnp.full((4,), least)
    filtered = (*arrays, threshold)
    assert_equal(interpreted(*filtered), _reference(*filtered))


_reference = jax.jit(sample_reference)


def test_the_rough_noise_bounds_the_exact_one() -> None:
    """Never more than 2e-5 below it, and at most 1e-4 above it where tokens win by noise (g >
    2)."""
    edges = np.array([0, 1, 2, 2**32 - 1, 2**32 - 300, 2**31, 2**24, 2**24 + 1], np.uint32)
    drawn = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    bits = jnp.asarray(np.concatenate((edges, drawn >> np.uint32(7), drawn)))
    rough = np.asarray(sample_gpu._rough_gumbel(bits, interpret=True), np.float64)
    over = rough - np.asarray(noise.gumbel_from_bits(bits), np.float64)
    assert over.min() > -2e-5
    assert over[rough > 2].max() < 1e-4


def test_tokens_that_rough_noise_would_confuse_are_compared_exactly() -> None:
    """Two possible tokens per row: both may draw noise near the lower end, where the bound is
    loose."""
    keys = jax.random.split(jax.random.key(5), 2)
    logits = jnp.full((200, 256), -1e4).at[:, 70].set(0.3).at[:, 200].set(0.0)
    seed = jax.random.bits(keys[0], (200, 2), jnp.uint32)
    arrays = (logits, jnp.ones(200, jnp.float32), seed, jnp.arange(200, dtype=jnp.int32))
    got = interpreted(*arrays)
    assert_equal(got, _reference(*arrays))
    key = noise.position_key(seed, arrays[3])
    bits = noise.noise_bits((key[0][:, None], key[1][:, None]), jnp.arange(256))
    rough = logits + sample_gpu._rough_gumbel(bits, interpret=True)
    assert (jnp.argmax(rough, axis=1) != got[1]).any()


def test_nan_is_not_chosen_where_anything_else_is() -> None:
    """Whatever the noise is. A row of NaN alone gets the first id, like a row of -infinity."""
    logits, _, seed, positions = inputs(32, 256)
    logits = logits.at[:, 40].set(jnp.nan).at[:8, 90].set(jnp.nan).at[:, 255].set(1e4)
    logits = logits.at[31].set(jnp.nan)
    value, ids = interpreted(logits, jnp.ones(32, jnp.float32), seed, positions)
    np.testing.assert_array_equal(ids, [255] * 31 + [0])
    assert jnp.isfinite(value[:31]).all()
    assert jnp.isneginf(value[31])


def test_ties_go_to_the_lowest_id_within_and_across_chunks() -> None:
    logits, temperature, seed, positions = inputs(4, 600)
    flat = jnp.full_like(logits, 2.0)  # everything ties
    late = flat.at[:, 255].set(5.0).at[:, 256].set(5.0).at[:, 590].set(5.0)
    nothing = jnp.full_like(logits, -jnp.inf)
    greedy = jnp.zeros_like(temperature)
    for rows, wanted in ((flat, 0), (late, 255), (nothing, 0)):
        value, ids = interpreted(rows, greedy, seed, positions)
        np.testing.assert_array_equal(ids, wanted)
        np.testing.assert_array_equal(value, rows[:, wanted])


def test_the_nodes_of_a_batch_row_share_its_temperature_and_seed() -> None:
    logits, temperature, seed, positions = inputs(6, 300)
    got = interpreted(logits, temperature[1:3], seed[1:3], positions)
    each = (jnp.repeat(temperature[1:3], 3), jnp.repeat(seed[1:3], 3, axis=0))
    assert_equal(got, jax.jit(sample_reference)(logits, *each, positions))


def rows_of(top_k: list[int]) -> SamplingBatch:
    """Return one greedy row and one at temperature 1.3."""
    return dataclasses.replace(
        empty_sampling(2, vocab_size=512),
        seed=jnp.asarray([[1, 2], [3, 4]], jnp.uint32),
        temperature=jnp.asarray([0.0, 1.3], jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray([0.9, 1.0], jnp.float32),
        min_p=jnp.zeros(2, jnp.float32),
    )


@pytest.mark.parametrize("filtered", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_path_that_serves_chooses_the_same_with_either_bundle(filtered: bool) -> None:
    logits, _, _, positions = inputs(16, 512)
    arguments: dict[str, Any] = {
        "positions": positions.reshape(2, 8),
        "token_ids": jnp.arange(512, dtype=jnp.int32),
        "filtered": filtered,
        "shard": Shard(),
    }
    rows, nodes = rows_of([5, 4]), logits.reshape(2, 8, 512)
    chosen = {
        name: jax.jit(partial(choose, ops=OPS[name], **arguments))(nodes, rows)
        for name in ("xla", "gpu_interpret")
    }
    np.testing.assert_array_equal(chosen["gpu_interpret"], chosen["xla"])
    least = []
    if filtered:
        least = [threshold(nodes, rows, shard=Shard()).ravel()]
    _, ids = interpreted(logits, rows.temperature, rows.seed, positions, *least)
    np.testing.assert_array_equal(ids, np.asarray(chosen["xla"]).ravel())


def test_two_vocabulary_shards_choose_what_one_does() -> None:
    logits, _, _, positions = inputs(8, 512)
    nodes = jnp.round(logits.reshape(2, 4, 512))  # ties, over the shards too
    ids = jnp.arange(512, dtype=jnp.int32)

    def on_shard(logits: jax.Array, ids: jax.Array, shard: Shard) -> jax.Array:
        return choose(
            logits,
            rows_of([512, 512]),
            positions=positions.reshape(2, 4),
            token_ids=ids,
            filtered=False,
            shard=shard,
            ops=OPS["gpu_interpret"],
        )[None]

    both = jax.jit(
        jax.shard_map(
            partial(on_shard, shard=Shard(2, "tensor")),
            mesh=Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",)),
            in_specs=(PartitionSpec(None, None, "tensor"), PartitionSpec("tensor")),
            out_specs=PartitionSpec("tensor"),
            check_vma=False,
        )
    )(nodes, ids)
    one = jax.jit(partial(on_shard, shard=Shard()))(nodes, ids)[0]
    np.testing.assert_array_equal(both, jnp.stack((one, one)))


def test_few_rows_are_cut_so_that_every_multiprocessor_has_work() -> None:
    for num_rows in (1, 4, 5, 64):
        chunk = choose_tuning(num_rows).chunk
        assert num_rows * -(-128_256 // chunk) >= 120
        assert chunk & (chunk - 1) == 0


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_bit_equal_on_the_chip(num_rows: int, dtype: Any) -> None:
    logits, temperature, seed, positions = inputs(num_rows, 128_256, dtype)
    least = jnp.full((num_rows,), 3.0, jnp.float32)
    flat = jnp.full_like(logits, 2.0)  # many rivals: every chunk takes the exact path
    for rows, t in ((logits, temperature), (logits, temperature + 1.0), (flat, temperature + 0.1)):
        for extra in ((), (least,)):
            arrays = (rows, t, seed, positions, *extra)
            assert_equal(jax.jit(sample)(*arrays), jax.jit(sample_reference)(*arrays))
