"""Fused sampling on Hopper: bit-equal to the reference and to sampling/choose.py, in the GPU
interpreter, lowered for CUDA, and run where there is a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.core import noise
from jspec.core.state import SamplingRows
from jspec.layers.linear import Shard
from jspec.pallas_kernels.sample_gpu import SampleTuning, reference, sample
from jspec.sampling.choose import choose
from jspec.sampling.filters import threshold

HAS_MOSAIC_GPU = hasattr(plgpu, "InterpretGPUParams")
needs_mosaic_gpu = pytest.mark.skipif(
    not HAS_MOSAIC_GPU, reason=f"Mosaic GPU kernels need jax 0.11.2, this is {jax.__version__}"
)
needs_hopper = pytest.mark.skipif(
    jax.default_backend() != "gpu"
    or not getattr(jax.devices()[0], "compute_capability", "").startswith("9."),
    reason="needs a Hopper GPU",
)

SMALL = SampleTuning(window=256, num_blocks=12)


def inputs(num_rows: int, width: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """logits, temperature (every other row greedy), seed, positions."""
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
    params = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    return sample(*arrays, first_id=first_id, tuning=SMALL, interpret=params)


@needs_mosaic_gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_interpreted_sampling_is_bit_equal_to_the_reference(dtype: Any) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    arrays = inputs(4, 1000, dtype)  # the last window overlaps the one before it
    wanted = jax.jit(partial(reference, first_id=500))(*arrays)
    assert_equal(interpreted(*arrays, first_id=500), wanted)
    assert not interpreter.get_races().races_found


@needs_mosaic_gpu
def test_a_threshold_per_row_filters() -> None:
    logits, temperature, seed, positions = inputs(4, 520)
    least = jnp.asarray([-jnp.inf, 6.0, 2.0, -1.0], jnp.float32)
    arrays = (logits, temperature, seed, positions, least)
    got = interpreted(*arrays)
    assert_equal(got, jax.jit(reference)(*arrays))
    kept = np.asarray(logits)[1, int(got[1][1])] / np.float32(0.8)
    assert kept >= 6.0


@needs_mosaic_gpu
def test_ties_go_to_the_lowest_id_within_and_across_chunks() -> None:
    logits, temperature, seed, positions = inputs(3, 1000)
    flat = jnp.full_like(logits, 2.0)  # everything ties
    late = flat.at[:, 255].set(5.0).at[:, 256].set(5.0).at[:, 990].set(5.0)
    nothing = jnp.full_like(logits, -jnp.inf)
    greedy = jnp.zeros_like(temperature)
    for rows, wanted in ((flat, 0), (late, 255), (nothing, 0)):  # 4 windows, 4 chunks
        value, ids = interpreted(rows, greedy, seed, positions)
        np.testing.assert_array_equal(ids, wanted)
        np.testing.assert_array_equal(value, rows[:, wanted])


@needs_mosaic_gpu
@pytest.mark.parametrize("filtered", [False, True])
def test_equals_the_path_that_serves(filtered: bool) -> None:
    """choose.py's tokens. 2 batch rows of 2 nodes are 4 rows here; row 1's filters keep all."""
    logits, _, _, positions = inputs(4, 512)
    rows = SamplingRows(
        seed=jnp.asarray([[1, 2], [3, 4]], jnp.uint32),
        temperature=jnp.asarray([0.7, 1.3], jnp.float32),
        top_k=jnp.asarray([5, 512], jnp.int32),
        top_p=jnp.asarray([0.9, 1.0], jnp.float32),
        min_p=jnp.zeros(2, jnp.float32),
        frequency_penalty=jnp.zeros(2, jnp.float32),
        presence_penalty=jnp.zeros(2, jnp.float32),
        min_new_tokens=jnp.zeros(2, jnp.int32),
        stop_ids=jnp.full((2, 16), 512, jnp.int32),
    )
    nodes = logits.reshape(2, 2, 512)
    chosen = choose(
        nodes,
        rows,
        positions=positions.reshape(2, 2),
        token_ids=jnp.arange(512, dtype=jnp.int32),
        filtered=filtered,
        shard=Shard(),
    )
    scaled = nodes / rows.temperature[:, None, None]
    least = [threshold(scaled, rows, shard=Shard()).ravel()] if filtered else []
    temperature, seed = (jnp.repeat(a, 2, axis=0) for a in (rows.temperature, rows.seed))
    _, ids = interpreted(logits, temperature, seed, positions, *least)
    np.testing.assert_array_equal(ids, np.asarray(chosen).ravel())


def test_the_reference_uses_the_noise_of_core() -> None:
    logits, temperature, seed, positions = inputs(2, 256)
    _, ids = reference(jnp.zeros_like(logits), jnp.ones_like(temperature), seed, positions)
    g = noise.gumbel(seed, positions, jnp.arange(256, dtype=jnp.int32))
    np.testing.assert_array_equal(ids, jnp.argmax(g, axis=1))


@needs_mosaic_gpu
@pytest.mark.parametrize("num_rows", [1, 256])
@pytest.mark.parametrize("filtered", [False, True])
def test_lowers_for_cuda(num_rows: int, filtered: bool) -> None:
    arrays = jax.eval_shape(lambda: inputs(num_rows, 128_256))
    least = [jax.ShapeDtypeStruct((num_rows,), jnp.float32)] if filtered else []
    traced = jax.jit(lambda *a: sample(*a)).trace(*arrays, *least)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic_gpu
@pytest.mark.parametrize(("width", "window"), [(200, 256), (1004, 256), (1000, 200)])
def test_rows_that_do_not_fit_are_refused(width: int, window: int) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        sample(*inputs(1, width), tuning=SampleTuning(window=window))


@pytest.mark.skipif(HAS_MOSAIC_GPU, reason="this jax has the kernels")
def test_an_older_jax_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match=r"jax 0\.11\.2 or newer"):
        sample(*inputs(1, 1024))


@needs_hopper
@needs_mosaic_gpu
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_bit_equal_on_hopper(num_rows: int, dtype: Any) -> None:
    arrays = inputs(num_rows, 128_256, dtype)
    least = jnp.full((num_rows,), 3.0, jnp.float32)
    for extra in ((), (least,)):
        assert_equal(jax.jit(sample)(*arrays, *extra), jax.jit(reference)(*arrays, *extra))
