"""Which program runs attention where, and that each keeps the contract's door."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.engine_args import ATTENTION_BACKENDS
from jspec.core.errors import ConfigError
from jspec.pallas_kernels.dispatch import gpu_problem
from jspec.pallas_kernels.hopper import has_mosaic_gpu
from jspec.pallas_kernels.paged_attention import (
    Backend,
    choose_backend,
    paged_attention,
    pool_width,
)
from tests.pallas_kernels.chips import needs_mosaic_gpu


@pytest.mark.parametrize(
    ("platform", "requested", "backend"),
    [
        ("cpu", "auto", "xla"),
        ("cpu", "xla", "xla"),
        ("gpu", "auto", "gpu"),
        ("gpu", "xla", "xla"),
        ("gpu", "pallas", "gpu"),
        ("tpu", "auto", "tpu"),
        ("tpu", "pallas", "tpu"),
        ("tpu", "xla", "xla"),
    ],
)
def test_the_platform_chooses_unless_told(platform: str, requested: str, backend: str) -> None:
    assert requested in ATTENTION_BACKENDS
    assert choose_backend(platform, requested) == backend


def test_a_gpu_that_the_kernels_do_not_serve_gets_xla_unless_they_were_asked_for() -> None:
    assert choose_backend("gpu", "auto", gpu_problem="head_dim 32; expected 64") == "xla"
    with pytest.raises(ConfigError, match=r"'pallas', with head_dim 32; expected 64"):
        choose_backend("gpu", "pallas", gpu_problem="head_dim 32; expected 64")


def test_a_cpu_has_no_kernels_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend is 'pallas', on cpu devices"):
        choose_backend("cpu", "pallas")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_capability": "8.0"}, r"compute capability 8\.0; expected 9\.0"),
        ({"dtype": jnp.float32}, "dtype float32; expected bfloat16 or float16"),
        ({"page_size": 24}, "page_size 24; expected 8, 16, 32, 64 or a multiple of 128"),
        ({"head_dims": (128, 32)}, "head_dim 32; expected 64 or 128"),
    ],
)
def test_what_the_gpu_kernel_does_not_serve_is_named(change: dict[str, Any], message: str) -> None:
    fits = {
        "compute_capability": "9.0",
        "dtype": jnp.bfloat16,
        "page_size": 64,
        "head_dims": (128, 64),
    }
    if not has_mosaic_gpu() and "compute_capability" not in change:
        message = "expected 0.11 or later"
    found = gpu_problem(**{**fits, **change})
    assert found is not None
    assert re.search(message, found)


@needs_mosaic_gpu
def test_what_the_gpu_kernel_serves_has_no_problem() -> None:
    fits = {"compute_capability": "9.0", "dtype": jnp.bfloat16, "page_size": 64}
    assert gpu_problem(**fits, head_dims=(128, 64)) is None


def test_only_the_tpu_kernels_widen_the_pool() -> None:
    assert [pool_width(64, backend) for backend in ("xla", "gpu", "tpu")] == [64, 64, 128]
    assert [pool_width(width, "tpu") for width in (128, 129, 256)] == [128, 256, 256]


def written_and_seen(backend: Backend, *, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Four tokens on each of two rows, K and V written by the call."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    prefix = jnp.asarray([21, 3], jnp.int32)
    out, pages = paged_attention(
        draw(8, 4, 64),
        draw(8, 2, 64),
        draw(8, 2, 64),
        draw(6, 16, 4, pool_width(64, backend)),
        jnp.asarray([[1, 2], [3, 0]], jnp.int32),
        prefix,
        jnp.asarray([0, 4, 8], jnp.int32),
        None,
        (prefix[:, None] + jnp.arange(4)).reshape(-1),
        None,
        scale=0.125,
        queries_per_row=None if packed else 4,
        backend=backend,
    )
    return np.asarray(out, np.float32), np.asarray(pages[1:4], np.float32)


@needs_mosaic_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_the_gpu_kernels_see_what_the_call_writes(packed: bool) -> None:
    out, pages = written_and_seen("gpu_interpret", packed=packed)
    expected, expected_pages = written_and_seen("reference", packed=packed)
    np.testing.assert_array_equal(pages, expected_pages)
    np.testing.assert_allclose(out, expected, atol=0.02)
