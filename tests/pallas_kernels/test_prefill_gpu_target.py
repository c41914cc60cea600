"""The packed Hopper kernel at serving sizes: lowered and compiled for it, run where it is.

Lowering runs Mosaic GPU's own layout inference, for compute capability 9.0 without a GPU. Compiling
ahead of time needs the CUDA plugin and ptxas, but no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.attention import reference
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.prefill.gpu import attend_packed
from jspec.pallas_kernels.prefill.tuning import Tuning
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import needs_hopper, needs_mosaic_gpu
from tests.pallas_kernels.gpu_prefill_compile import llama_shapes
from tests.pallas_kernels.test_prefill_gpu_plan import rows_of


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("queries", "page_size", "options"),
    [
        (2048, 64, {}),
        pytest.param(1024, 16, {"window": 1024}, marks=pytest.mark.slow),
        pytest.param(8192, 128, {"tuning": Tuning(consumers=1)}, marks=pytest.mark.slow),
    ],
)
def test_lowers_for_hopper(queries: int, page_size: int, options: dict[str, Any]) -> None:
    q, pool, fields = llama_shapes(16, queries, page_size)

    def run(q: jax.Array, pool: jax.Array, fields: dict[str, jax.Array]) -> jax.Array:
        return attend_packed(q, pool, AttentionMetadata(**fields), scale=0.09, **options)

    lowered = jax.jit(run).trace(q, pool, fields).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 1


@needs_mosaic_gpu
@pytest.mark.parametrize("width", [64, 128])
def test_fp8_pools_lower_for_hopper(width: int) -> None:
    q, pool, fields = llama_shapes(16, 2048, 64)
    q = jax.ShapeDtypeStruct((*q.shape[:-1], width), q.dtype)
    pool = jax.ShapeDtypeStruct((*pool.shape[:-1], width), jnp.float8_e4m3fn)

    def run(q: jax.Array, pool: jax.Array, fields: dict[str, jax.Array]) -> jax.Array:
        return attend_packed(q, pool, AttentionMetadata(**fields), scale=0.09)

    lowered = jax.jit(run).trace(q, pool, fields).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 1


@needs_mosaic_gpu
@pytest.mark.slow
@needs_cuda_compiler
def test_compiles_ahead_of_time_for_an_h200_and_copies_no_pool() -> None:
    """XLA's compiler and ptxas for sm_90a, in a separate process, on a machine without a GPU."""
    output = output_of("tests.pallas_kernels.gpu_prefill_compile")
    assert output.count("compiled") == 7


@needs_hopper
@pytest.mark.parametrize("page_size", [16, 64])
def test_equals_the_reference_at_serving_shapes(page_size: int) -> None:
    """Rows of 700, 1 and 323 queries on prefixes of 0, 2,000 and 1,111 tokens."""
    lengths, prefixes, queries = [700, 1, 323], [0, 2000, 1111], 1024
    q_shape, pool_shape, _ = llama_shapes(3, queries, page_size, context=2048)
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], q_shape.shape, q_shape.dtype)
    pool = jax.random.normal(keys[1], pool_shape.shape, pool_shape.dtype)
    rows = rows_of(lengths, prefixes, queries=queries)
    order = np.random.default_rng(0).permutation(pool.shape[0] - 1) + 1
    rows = dataclasses.replace(rows, page_table=jnp.asarray(order.reshape(3, -1), jnp.int32))
    run = jax.jit(functools.partial(attend_packed, scale=0.09))
    out = run(q, pool, rows)
    for _ in range(30):  # results do not depend on timing
        np.testing.assert_array_equal(out, run(q, pool, rows))
    out = out.astype(jnp.float32)
    starts = np.append(0, np.cumsum(lengths))
    for b, length in enumerate(lengths):
        at = slice(int(starts[b]), int(starts[b]) + length)
        one = AttentionMetadata(
            page_table=rows.page_table[b : b + 1],
            prefix_lens=rows.prefix_lens[b : b + 1],
            cu_q_lens=jnp.asarray([0, min(length, 64)], jnp.int32),
            q_positions=rows.q_positions[at][:64],
        )
        expected = reference.attend(
            q[at][:64],
            pool,
            one,
            scale=0.09,
            queries_per_row=None,
            window=None,
            sinks=None,
        )
        np.testing.assert_allclose(out[at][:64], expected.astype(jnp.float32), rtol=0.02, atol=0.01)
