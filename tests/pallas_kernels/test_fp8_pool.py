"""FP8 pools: writes equal the reference's rounding, and attention reads exactly the stored
values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.fp8_product.api import values_of
from jspec.pallas_kernels.kv_write.api import KVScales, Rotation
from jspec.pallas_kernels.kv_write.reference import pool_rows, stored
from tests.pallas_kernels.chips import needs_mosaic_gpu
from tests.pallas_kernels.test_attention import (
    ATTEND,
    CASES,
    Row,
    attend_densely,
    call,
    draw_rows,
    pool_of,
    query_places,
)

E4M3 = ml_dtypes.float8_e4m3fn
SCALES = KVScales(k=jnp.full(1, 0.013, jnp.float32), v=jnp.full(1, 0.0071, jnp.float32))


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the float64 values of the nearest e4m3 numbers, by distance; ties to even codes."""
    codes = np.arange(127)  # 0 to 448; 127 is NaN
    numbers = codes.astype(np.uint8).view(E4M3).astype(np.float64)
    size = np.minimum(np.abs(x.astype(np.float64)), 448)
    above = np.minimum(np.searchsorted(numbers, size), 126)
    below = np.maximum(above - 1, 0)
    distances = numbers[above] - size, size - numbers[below]
    up = (distances[0] < distances[1]) | ((distances[0] == distances[1]) & (above % 2 == 0))
    return np.copysign(np.where(up, numbers[above], numbers[below]), x)


def test_values_are_rounded_to_the_nearest_and_saturate() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    steps = np.linspace(-2, 2, 20_001, dtype=np.float32)  # with ties, and next to them
    ties = np.arange(4096, dtype=np.float32) / 1024
    x = np.concatenate((every, steps, ties, np.nextafter(ties, 9), np.nextafter(ties, -9)))
    found = np.asarray(stored(jnp.asarray(x), E4M3)).astype(np.float64)
    expected = rounded(np.where(np.isnan(x), 0, x))
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(found).all()


def as_stored(kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the stored values, f64 their meaning) of K and V [.., 2, D] in their last axes."""
    scales = np.stack([np.asarray(SCALES.k), np.asarray(SCALES.v)])
    held = np.asarray((kv.astype(np.float32) / scales).clip(-448, 448)).astype(E4M3)
    return held, held.astype(np.float64) * scales.astype(np.float64)


@pytest.mark.parametrize("ops", ATTEND)
@pytest.mark.parametrize(
    "name",
    [
        "packed, page 4, several blocks",
        "packed, window and sinks",
        "rows, window, every head its own",
        "tree, window, sinks",
        "nothing written",
    ],
)
def test_every_query_sees_the_stored_values_and_no_poison(name: str, ops: str) -> None:
    """This holds also for the call's own tokens; unwritten slots and page 0 are NaN."""
    case = CASES[name]
    rng = np.random.default_rng(len(name))
    rows = draw_rows(rng, case)
    sinks = rng.normal(0, 1, case.heads[0]).astype(np.float32) if case.sinks else None

    def pool(*, with_new: bool) -> Any:
        whole = pool_of(case, rows, with_new=with_new)
        pairs = whole.reshape(*whole.shape[:2], -1, 2, whole.shape[3])
        return as_stored(pairs)[0].reshape(whole.shape)

    before = pool(with_new=not case.writes)
    out, after = call(case, rows, ops=ops, sinks=sinks, pool=before, scales=SCALES)
    options = {"window": None, **case.options}
    for row, places in zip(rows, query_places(case, rows), strict=True):
        seen: Row = replace(row, prefix=as_stored(row.prefix)[1], new=as_stored(row.new)[1])
        expected = attend_densely(seen, scale=0.3, sinks=sinks, **options)
        np.testing.assert_allclose(np.asarray(out)[places], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(
        np.asarray(after)[1:].astype(np.float32), pool(with_new=True)[1:].astype(np.float32)
    )


ONE_EACH = AttentionCall(queries_per_row=1, scale=1.0)


def one_row() -> AttentionMetadata:
    return AttentionMetadata(
        page_table=jnp.ones((1, 1), jnp.int32),
        prefix_lens=jnp.zeros(1, jnp.int32),
        cu_q_lens=jnp.asarray([0, 1], jnp.int32),
        q_positions=jnp.zeros(1, jnp.int32),
    )


def test_a_latent_is_stored_by_its_only_scale() -> None:
    record = jnp.asarray(np.random.default_rng(0).normal(0, 1, (1, 6)), jnp.float32)
    pool = jnp.zeros((2, 4, 8), E4M3)
    scales = KVScales(k=SCALES.k, v=SCALES.k)
    q = jnp.ones((1, 2, 6))
    out, after = OPS["xla"].attend_latent(
        q, record, pool, one_row(), ONE_EACH, scales, rank=pool.shape[2]
    )
    held = (np.asarray(record) / np.asarray(SCALES.k)).clip(-448, 448).astype(E4M3)
    np.testing.assert_array_equal(np.asarray(after)[1, 0, :6], held[0])
    expected = held.astype(np.float32) * np.asarray(SCALES.k)
    np.testing.assert_allclose(out, np.stack([expected, expected], axis=1), rtol=1e-6)


PACKED = replace(ONE_EACH, queries_per_row=None)


def test_a_bundle_without_a_kernel_for_it_runs_xlas_path() -> None:
    """The results are equal bit by bit, and the bundle lists these operations."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(0, 1, (1, n, 64)), jnp.bfloat16) for n in (4, 2, 2))
    pool = jnp.zeros((2, 64, 4, 64), E4M3)
    for call_ in (PACKED, ONE_EACH):
        found, wanted = (
            jax.jit(OPS[name].attend, static_argnames="call")(
                q, k, v, pool, one_row(), call_, None, SCALES
            )
            for name in ("tpu_interpret", "xla")
        )
        for mine, right in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (mine, right)))
    assert "attention of prompts" in OPS["tpu_interpret"].xla_for_fp8()
    assert OPS["xla"].xla_for_fp8() == OPS["gpu_interpret"].xla_for_fp8() == ()


@pytest.mark.usefixtures("few_programs")
@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("queries_per_row", "rotary"),
    [
        (3, 64),
        pytest.param(None, 32, marks=pytest.mark.slow),
        pytest.param(None, 64, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(3, 32, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_the_gpus_kernels_are_xlas_path(queries_per_row: int | None, rotary: int) -> None:
    """A chain and a prompt; fused with RoPE, but not where RoPE rotates a part of each head."""
    rng = np.random.default_rng(5)
    heads = jnp.asarray(rng.normal(0, 1, (3, 8, 64)), jnp.bfloat16)
    angle = jnp.asarray(rng.normal(0, 1, (3, rotary // 2)), jnp.float32)
    rotation = Rotation(cos=jnp.cos(angle), sin=jnp.sin(angle), num_heads=4)
    pool = jnp.asarray(rng.normal(0, 60, (3, 64, 4, 64)), jnp.float32).astype(E4M3)
    rows = AttentionMetadata(
        page_table=jnp.asarray([[1, 2]], jnp.int32),
        prefix_lens=jnp.asarray([62], jnp.int32),
        cu_q_lens=jnp.asarray([0, 3], jnp.int32),
        q_positions=62 + jnp.arange(3, dtype=jnp.int32),
    )
    call_ = AttentionCall(queries_per_row=queries_per_row, scale=0.1)
    with jax.default_device(jax.devices("cpu")[0]):
        found, wanted = (
            jax.jit(OPS[name].rotate_write_and_attend, static_argnames="call")(
                heads, rotation, pool, rows, call_, None, SCALES
            )
            for name in ("gpu_interpret", "xla")
        )
    found = (values_of(found[0]), found[1])
    assert found[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(*(np.asarray(x[1]).view(np.uint8)[1:] for x in (found, wanted)))
    np.testing.assert_allclose(
        *(np.asarray(x[0], np.float32) for x in (found, wanted)), rtol=0.02, atol=0.004
    )


def test_scales_of_one_change_no_bit() -> None:
    kv = jnp.asarray(np.random.default_rng(2).normal(0, 1, (2, 3, 1, 8)), jnp.float32)
    ones = KVScales(k=jnp.ones(1), v=jnp.ones(1))
    with_ones = pool_rows(*kv, width=8, dtype=E4M3, scales=ones)
    np.testing.assert_array_equal(with_ones, pool_rows(*kv, width=8, dtype=E4M3))
