"""Products on Hopper: in the GPU interpreter with its race detector, lowered for CUDA, and run
where there is a GPU. Poison: what lies outside M, and partial sums that nobody wrote, is NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas_kernels import matmul_gpu
from jspec.pallas_kernels.matmul_gpu import (
    choose_matmul,
    pack_weights,
    reference,
    stream_matmul,
    tuned_matmul,
)
from jspec.pallas_kernels.tuning import (
    Layout,
    MatmulTuning,
    Rows,
    stream_candidates,
    tile_candidates,
)
from tests.pallas_kernels.chips import needs_hopper, needs_mosaic_gpu, needs_older_jax

WEIGHTS = MatmulTuning(Rows.WEIGHTS, 8, 128, num_stages=3, num_splits=0, num_blocks=3)
TOKENS = MatmulTuning(Rows.TOKENS, 128, 128, num_stages=3, num_consumers=2, num_blocks=2)
SMALL_PROGRAMS = {
    "even shares, M = 1": (1, 256, 256, WEIGHTS),
    "even shares, M = 13": (13, 192, 256, replace(WEIGHTS, tile_m=16, tile_n=64)),
    "splits": (16, 256, 128, replace(WEIGHTS, tile_m=16, num_splits=2)),
    "two consumers": (3, 128, 256, replace(WEIGHTS, num_consumers=2, num_stages=2)),
    "deep ring": (8, 128, 128, replace(WEIGHTS, num_stages=5, num_blocks=1)),
    "transposed": (5, 128, 256, replace(WEIGHTS, layout=Layout.OUT_IN)),
    "tiled": (5, 128, 256, replace(WEIGHTS, layout=Layout.TILED)),
    "41 tokens as columns": (41, 128, 256, replace(WEIGHTS, tile_m=48)),
    "64 tokens as columns": (64, 128, 256, replace(WEIGHTS, tile_m=64)),
    "tokens as rows": (256, 128, 128, TOKENS),
    "tokens as rows, shared tiles": (64, 192, 128, replace(TOKENS, tile_m=64, num_consumers=1,
                                                           num_splits=0)),
    "tokens as rows, transposed": (128, 128, 128, replace(TOKENS, layout=Layout.OUT_IN)),
    "tokens as rows, tiled": (128, 128, 128, replace(TOKENS, layout=Layout.TILED)),
    "a cluster of two": (256, 256, 256, replace(TOKENS, cluster=2, num_blocks=4)),
    "one block a tile": (8, 256, 256, replace(WEIGHTS, num_splits=1)),
}  # fmt: skip
FAST = ("even shares, M = 1", "two consumers", "tiled", "tokens as rows, shared tiles")


def operands(m: int, k: int, n: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(m + k + n))
    x = jax.random.normal(keys[0], (m, k), jnp.float32).astype(jnp.bfloat16)
    w = jax.random.normal(keys[1], (k, n), jnp.float32).astype(jnp.bfloat16)
    return x, w


def program(tuning: MatmulTuning, **static: Any) -> Any:
    """The public function for `tuning`, packing included."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return tuned_matmul(x, pack_weights(w, tuning), tuning=tuning, **static)

    return jax.jit(run)


def assert_close(got: jax.Array, x: jax.Array, w: jax.Array) -> None:
    wanted = np.asarray(reference(x, w, out_dtype=jnp.float32))
    scale = np.sqrt(x.shape[1])  # of a sum of products of unit normals
    error = 1e-5 if got.dtype == jnp.float32 else 2**-8 * 5
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=2**-8, atol=error * scale)


@needs_mosaic_gpu
@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in SMALL_PROGRAMS
    ],
)
def test_interpreted_product_equals_the_reference_without_a_race(name: str) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    m, k, n, tuning = SMALL_PROGRAMS[name]
    params = plgpu.InterpretGPUParams(
        detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="nan"
    )
    x, w = operands(m, k, n)
    got = program(tuning, out_dtype=jnp.float32, interpret=params)(x, w)
    assert_close(got, x, w)
    assert not interpreter.get_races().races_found


@needs_mosaic_gpu
@pytest.mark.slow
def test_interpreted_product_in_bf16_is_rounded_once() -> None:
    params = plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")
    for m, k, n, tuning in ((3, 128, 128, WEIGHTS), (128, 128, 128, TOKENS)):
        x, w = operands(m, k, n)
        one_slot = replace(tuning, num_splits=1)
        exact = program(one_slot, out_dtype=jnp.float32, interpret=params)(x, w)
        rounded = program(one_slot, interpret=params)(x, w)
        assert rounded.dtype == jnp.bfloat16
        np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


@needs_mosaic_gpu
@pytest.mark.slow
def test_the_checks_see_a_missing_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that does not wait overwrites tiles that are in use."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    monkeypatch.setattr(matmul_gpu, "_await_release", lambda *_, **__: None)
    x, w = operands(8, 512, 128)
    tuning = replace(WEIGHTS, num_stages=2, num_blocks=1)
    params = plgpu.InterpretGPUParams(detect_races=True)
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(program(tuning, interpret=params)(x, w))
    interpreter.reset_gpu_interpret_mode_state()


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("m", "k", "n", "layout"),
    [
        (1, 4096, 6144, Layout.IN_OUT),
        (13, 4096, 4096, Layout.IN_OUT),
        (16, 14336, 4096, Layout.OUT_IN),
        (8, 4096, 128256, Layout.TILED),
        (64, 4096, 4096, Layout.IN_OUT),
        (1024, 4096, 28672, Layout.TILED),
    ],
)
def test_lowers_for_cuda(m: int, k: int, n: int, layout: Layout) -> None:
    """Layouts are inferred and shared memory is counted; no GPU takes part."""
    candidates = stream_candidates(m, k, n) if m <= 16 else tile_candidates(m, k, n)
    tuning = replace(candidates[0], layout=layout, early_start=True)
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    text = program(tuning).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@needs_mosaic_gpu
@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 4, 8, 16, 64, 128, 256, 512, 1024])
def test_every_candidate_lowers_for_cuda(m: int) -> None:
    k, n = 4096, 6144
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
    for tuning in stream_candidates(m, k, n) if m <= 16 else tile_candidates(m, k, n):
        program(tuning).trace(x, w).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("layout", Layout)
def test_packed_weights_hold_the_same_tiles(layout: Layout) -> None:
    _, w = operands(1, 256, 384)
    tuning = replace(WEIGHTS, layout=layout)
    packed = np.asarray(pack_weights(w, tuning).astype(jnp.float32))
    tile = {
        Layout.IN_OUT: lambda: packed[64:128, 256:384],
        Layout.OUT_IN: lambda: packed[256:384, 64:128].T,
        Layout.TILED: lambda: packed[2, 1],
    }[layout]()
    np.testing.assert_array_equal(tile, np.asarray(w.astype(jnp.float32))[64:128, 256:384])


def test_nothing_is_chosen_that_nobody_measured() -> None:
    for m in (1, 16, 64, 1024):
        assert choose_matmul(m, 4096, 4096, dtype=jnp.bfloat16, platform="gpu") is None
        assert choose_matmul(m, 4096, 4096, dtype=jnp.float32, platform="gpu") is None
        assert choose_matmul(m, 4096, 4096, dtype=jnp.bfloat16, platform="cpu") is None


def test_a_measured_program_is_chosen_for_bf16_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matmul_gpu, "measured", lambda *_: WEIGHTS)
    assert choose_matmul(1, 256, 256, dtype=jnp.bfloat16, platform="cuda") is WEIGHTS
    assert choose_matmul(1, 256, 256, dtype=jnp.float32, platform="cuda") is None
    assert choose_matmul(1, 256, 256, dtype=jnp.bfloat16, platform="tpu") is None


@needs_mosaic_gpu
def test_shapes_that_do_not_fit_are_refused() -> None:
    x, w = operands(8, 256, 256)
    with pytest.raises(ValueError, match="does not divide N"):
        tuned_matmul(x, w[:, :200], tuning=WEIGHTS)
    with pytest.raises(ValueError, match="M <= 16"):
        stream_matmul(jnp.zeros((17, 256), jnp.bfloat16), w, tuning=WEIGHTS)
    with pytest.raises(ValueError, match=r"Rows\.WEIGHTS"):
        stream_matmul(x, w, tuning=TOKENS)
    for layout in Layout:
        with pytest.raises(ValueError, match=r"weights \(192, 384\): expected"):
            stream_matmul(x, jnp.zeros((192, 384), jnp.bfloat16),
                          tuning=replace(WEIGHTS, layout=layout))  # fmt: skip


@needs_older_jax
def test_an_older_jax_says_what_is_missing() -> None:
    x, w = operands(8, 256, 256)
    with pytest.raises(NotImplementedError, match=r"needs jax 0\.11 or later"):
        stream_matmul(x, w, tuning=WEIGHTS)


@needs_hopper
@needs_mosaic_gpu
@pytest.mark.parametrize("name", SMALL_PROGRAMS)
def test_runs_on_hopper(name: str) -> None:
    m, k, n, tuning = SMALL_PROGRAMS[name]
    x, w = operands(m, k, n)
    got = program(tuning, out_dtype=jnp.float32)(x, w)
    assert_close(got, x, w)
    np.testing.assert_array_equal(got, program(tuning, out_dtype=jnp.float32)(x, w))


@needs_hopper
@needs_mosaic_gpu
@pytest.mark.parametrize("m", [1, 7, 16, 64, 512])
def test_runs_on_hopper_at_model_shapes(m: int) -> None:
    for k, n in ((4096, 6144), (14336, 4096)):
        x, w = operands(m, k, n)
        for tuning in stream_candidates(m, k, n) if m <= 16 else tile_candidates(m, k, n):
            assert_close(program(tuning)(x, w), x, w)
