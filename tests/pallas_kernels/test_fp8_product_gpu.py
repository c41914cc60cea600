"""Products of quantized tokens and fp8 weights on Hopper: interpreted with race detection, lowered
and compiled for CUDA, and run where there is a GPU. Unwritten memory is NaN.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.device.fp8 import E4M3, FP8Weight
from jspec.pallas_kernels.fp8_product import reference
from jspec.pallas_kernels.fp8_product.api import QuantizedTokens, Scaled, values_of
from jspec.pallas_kernels.fp8_product.gpu import chosen_product, product
from jspec.pallas_kernels.fp8_product.gpu_tokens import quantize
from jspec.pallas_kernels.fp8_product.tuning import (
    MOST_TOKENS,
    ProductTuning,
    choose,
    deepest,
    tiles_for,
)
from jspec.pallas_kernels.gated_mlp.reference import gated
from jspec.pallas_kernels.gated_mlp.tuning import SHARED_BYTES, Shared
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import needs_hopper, needs_mosaic_gpu

FORMS = pytest.mark.parametrize("by_blocks", [False, True], ids=["channels", "blocks"])
STRIP = ProductTuning(num_stages=3, num_blocks=2)
WIDE = ProductTuning(tile_m=128, tile_n=64, num_consumers=2, num_stages=3, num_blocks=2)
PAIRS = replace(WIDE, cluster=2, shared=Shared.WEIGHTS, num_blocks=4)
# name: (M, K, columns, is gated, tuning)
RINGS: dict[str, tuple[int, int, int, bool, ProductTuning]] = {
    "few tokens, several turns": (8, 256, 160, False, STRIP),
    "an odd M, two blocks of columns": (21, 256, 240, False, replace(STRIP, tile_n=48)),
    "two blocks a step": (5, 512, 64, False, replace(STRIP, tile_k=256, num_stages=2)),
    "gate and up": (16, 256, 128, True, STRIP),
    "tokens of two clusters": (16, 256, 128, False, replace(STRIP, cluster=2, num_blocks=4)),
    "two consumers": (136, 256, 256, False, WIDE),
    "pairs share weights": (136, 256, 128, False, PAIRS),
}
BOTH = "an odd M, two blocks of columns"  # in CI; of the others one form, alternating
# CI leaves these out, because the other shapes take the same branches.
BY_HAND = ("few tokens, several turns", "two consumers")
E, INNER = LLAMA_3_1_8B.widths


def operands(m: int, k: int, columns: int, *, by_blocks: bool) -> tuple[jax.Array, FP8Weight]:
    """Return tokens and weights whose products are about one; scales differ by a factor of 4."""
    rng = np.random.default_rng(m + k + columns)
    x = rng.standard_normal((m, k)) * 10.0 ** rng.integers(-2, 3, (m, 1))
    shape = (-(-k // 128), -(-columns // 128)) if by_blocks else (columns,)
    scales = jnp.asarray(rng.uniform(0.5, 2, shape) * k**-0.5 / 64, jnp.float32)
    codes = jnp.asarray(rng.standard_normal((k, columns)) * 64, jnp.float32)
    return jnp.asarray(x, jnp.bfloat16), FP8Weight(codes=codes.astype(E4M3), scales=scales)


def expected(x: jax.Array, weight: FP8Weight, *, is_gated: bool) -> jax.Array:
    found = reference.fp8_product(x, weight, out_dtype=jnp.bfloat16)
    if not is_gated:
        return found
    return gated(*jnp.split(found.astype(jnp.float32), 2, axis=-1)).astype(jnp.bfloat16)


def assert_close(got: jax.Array, wanted: jax.Array, *, share: float = 2**-7) -> None:
    """Compare except for summation order, which may round to the next bf16 of each token's
    largest."""
    wide, right = (np.asarray(x, np.float32) for x in (got, wanted))
    assert wide.shape == right.shape
    error = np.abs(wide - right) / (np.abs(right) + np.abs(right).max(axis=-1, keepdims=True))
    assert error.max() <= share, f"an error is {error.max()} of the largest"  # NaN fails


def poisoned() -> Any:
    return plgpu.InterpretGPUParams(
        detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="nan"
    )


def padded(tokens: QuantizedTokens) -> QuantizedTokens:
    """Pad with NaN, which must not be read."""
    rows = jnp.arange(tokens.codes.shape[0])[:, None] < tokens.num
    columns = jnp.arange(tokens.scales.shape[1])[None] < tokens.num
    nan = jnp.full((), jnp.nan, E4M3)
    return replace(
        tokens,
        codes=jnp.where(rows, tokens.codes, nan),
        scales=jnp.where(columns, tokens.scales, jnp.nan),
    )


@FORMS
@pytest.mark.parametrize("shape", [(3, 384), (130, 200)])
def test_tokens_are_quantized_as_the_reference_has_them(
    shape: tuple[int, int], by_blocks: bool
) -> None:
    x, _ = operands(*shape, 8, by_blocks=False)
    x = x.at[0, :5].set(0)
    found = quantize(x, by_blocks=by_blocks, interpret=True)
    codes, scales = jax.jit(partial(reference.quantize, block=128 if by_blocks else None))(x)
    assert found.codes.shape[0] % 8 == found.scales.shape[1] % 128 == 0
    np.testing.assert_array_equal(found.scales[:, : shape[0]].T, scales)
    np.testing.assert_array_equal(
        np.asarray(found.codes[: shape[0]], np.float32), np.asarray(codes, np.float32)
    )


@FORMS
def test_numbers_that_are_to_be_scaled_are_quantized_as_if_they_were(by_blocks: bool) -> None:
    numbers, _ = operands(3, 384, 8, by_blocks=False)
    scaled = Scaled(of=numbers.astype(jnp.float16), factor=jnp.full((1,), 0.3), dtype=jnp.bfloat16)
    given, wanted = (
        jax.jit(partial(quantize, by_blocks=by_blocks, interpret=True))(x)
        for x in (scaled, values_of(scaled))
    )
    np.testing.assert_array_equal(given.scales[:, :3], wanted.scales[:, :3])
    codes = (x.codes[:3].view(jnp.uint8) for x in (given, wanted))
    np.testing.assert_array_equal(*codes)


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("name", "by_blocks"),
    [
        pytest.param(
            name,
            by_blocks,
            id=f"{name}-{'blocks' if by_blocks else 'channels'}",
            marks=()
            if name == BOTH or (name not in BY_HAND and i % 2 == by_blocks)
            else pytest.mark.exhaustive,
        )
        for i, name in enumerate(RINGS)
        for by_blocks in (False, True)
    ],
)
def test_a_ring_computes_the_reference_without_a_race(name: str, by_blocks: bool) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    m, k, columns, is_gated, tuning = RINGS[name]
    x, weight = operands(m, k, columns, by_blocks=by_blocks)
    tokens = padded(quantize(x, by_blocks=by_blocks, interpret=True))
    run = partial(product, tuning=tuning, is_gated=is_gated, interpret=poisoned())
    assert_close(jax.jit(run)(tokens, weight), expected(x, weight, is_gated=is_gated))
    assert not interpreter.get_races().races_found


def of_shape(m: int, k: int, columns: int, *, by_blocks: bool) -> tuple[Any, Any]:
    like = jax.ShapeDtypeStruct
    shape = (-(-k // 128), -(-columns // 128)) if by_blocks else (columns,)
    weight = FP8Weight(codes=like((k, columns), E4M3), scales=like(shape, jnp.float32))
    tokens = jax.eval_shape(partial(quantize, by_blocks=by_blocks), like((m, k), jnp.bfloat16))
    return tokens, weight


@needs_mosaic_gpu
@FORMS
@pytest.mark.parametrize("m", [21, 256])
def test_lowers_for_cuda(m: int, by_blocks: bool) -> None:
    is_gated = m % 8 == 0  # rows that fill no eight lower in the plain product
    k, columns = (E, 2 * INNER) if is_gated else (INNER, E)
    tokens, weight = of_shape(m, k, columns, by_blocks=by_blocks)
    tuning = tiles_for(m, k, columns, halves=1 + is_gated, by_blocks=by_blocks)
    run = jax.jit(partial(product, tuning=tuning, is_gated=is_gated))
    lowered = run.trace(tokens, weight).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 1


@needs_mosaic_gpu
@pytest.mark.slow
@needs_cuda_compiler
def test_compiles_ahead_of_time_for_an_h200_and_spills_no_register() -> None:
    output = output_of("tests.pallas_kernels.gpu_fp8_compile")
    assert len(re.findall(r"^compiled", output, re.MULTILINE)) == 20


@FORMS
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(
    "size", [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (2048, 16384)]
)
def test_every_count_of_tokens_has_tiles_that_fit(
    size: tuple[int, int], halves: int, by_blocks: bool
) -> None:
    how: Any = {"halves": halves, "by_blocks": by_blocks}
    for m in (1, 2, 8, 16, 17, 40, 64, 65, 128, 256, 500, 512, 1024, 4096):
        tuning, tiles = choose(m, *size, **how), tiles_for(m, *size, **how)
        assert tiles.problem(m, *size, **how) is None, m
        assert tiles.shared_bytes(m, halves) <= SHARED_BYTES
        assert tuning == (tiles if by_blocks or m <= MOST_TOKENS else None)
    assert choose(8, size[0] + 64, size[1], **how) is None
    assert choose(8, size[0], size[1] + 4, **how) is None


def test_tiles_are_those_that_were_fastest() -> None:
    """Measured on an H200 for out, down, qkv, gate and up, and those with SiLU."""
    sizes = ((4096, 4096, 1), (14336, 4096, 1), (4096, 6144, 1), (4096, 28672, 1), (4096, 28672, 2))

    def tiles(m: int, by_blocks: bool) -> list[tuple[int, int, int]]:
        found = (choose(m, k, n, halves=h, by_blocks=by_blocks) for k, n, h in sizes)
        return [(x.tile_n, x.tile_k, x.cluster) for x in found if x is not None]

    few = [(32, 512, 1), (32, 512, 1), (48, 512, 1), (224, 128, 1), (56, 256, 1)]
    of_blocks = [*few[:3], (112, 256, 1), (56, 256, 1)]
    assert [tiles(m, False) for m in (1, 8)] == [few, few]
    assert [tiles(m, True) for m in (1, 8)] == [of_blocks, of_blocks]
    assert tiles(64, False)[:3] == [(32, 256, 1), (32, 256, 1), (48, 256, 1)]
    assert tiles(64, True)[:3] == [(32, 256, 2), (32, 256, 2), (48, 256, 2)]
    assert tiles(256, False)[:4] == [(64, 128, 1), (64, 128, 1), (96, 128, 1), (224, 128, 1)]
    assert tiles(256, True)[:2] == [(64, 128, 2)] * 2


def test_the_deepest_ring_fits_the_shared_memory() -> None:
    assert deepest(ProductTuning(tile_k=256), 8, halves=1).num_stages == 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_k": 64}, "tile_k 64 is no multiple of 128"),
        ({"tile_k": 384}, "does not divide K"),
        ({"tile_n": 4}, "tile_n 4 is no multiple of 8"),
        ({"tile_n": 48}, "columns do not divide"),
        ({"tile_m": 128}, "128 rows are not 1 x 64"),
        ({"tile_n": 256}, "in two blocks"),
        ({"num_stages": 99}, "bytes of shared memory"),
    ],
)
def test_a_tuning_that_does_not_fit_says_why(change: dict[str, Any], reason: str) -> None:
    how: Any = {"halves": 1, "by_blocks": True}
    assert STRIP.problem(8, 4096, 4096, **how) is None
    assert reason in str(replace(STRIP, **change).problem(8, 4096, 4096, **how))


@needs_hopper
@needs_mosaic_gpu
@FORMS
@pytest.mark.parametrize("m", [1, 3, 8, 21, 64, 130, 256, 1024])
def test_runs_on_chip(m: int, by_blocks: bool) -> None:
    for is_gated, (k, columns) in ((False, (INNER, E)), (True, (E, 2 * INNER))):
        x, weight = operands(m, k, columns, by_blocks=by_blocks)
        tokens = padded(quantize(x, by_blocks=by_blocks))
        how: Any = {"halves": 1 + is_gated, "by_blocks": by_blocks}
        tuning = tiles_for(m, k, columns, **how)
        run = jax.jit(partial(product, tuning=tuning, is_gated=is_gated))
        got = run(tokens, weight)
        wanted = jax.jit(partial(expected, is_gated=is_gated))(x, weight)
        assert_close(got, wanted, share=2**-6)
        for _ in range(3):
            assert jnp.array_equal(got, run(tokens, weight))
        if by_blocks or m <= MOST_TOKENS:  # a row is the same with any number of others
            chosen = jax.jit(partial(chosen_product, is_gated=is_gated))
            assert jnp.array_equal(chosen(x, weight)[:1], chosen(x[:1], weight))
