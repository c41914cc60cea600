"""The Hopper kernel at serving sizes: lowered and compiled for the real target, run where it is.

Lowering runs Mosaic GPU's own layout inference, for compute capability 9.0 without a GPU. Compiling
ahead of time needs the CUDA plugin and ptxas, but no GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas_kernels.attention import reference
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu import attend_rows
from jspec.pallas_kernels.attention.tuning import Tuning
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import needs_hopper, needs_mosaic_gpu

H, G, D = LLAMA_3_1_8B.heads
PRODUCER = Tuning(loader="producer", consumers=2)


def llama_shapes(
    batch: int,
    queries: int,
    page_size: int,
    *,
    tail: int | None,
    context: int = 8192,
    pool_dtype: Any = jnp.bfloat16,
    width: int = D,
) -> tuple[Any, Any, dict[str, Any]]:
    """Return abstract q, pool and fields of AttentionMetadata, at the sizes of Llama-3.1-8B."""
    array = jax.ShapeDtypeStruct
    pages, total = -(-(context + queries) // page_size), batch * queries
    fields = {
        "page_table": array((batch, pages), jnp.int32),
        "prefix_lens": array((batch,), jnp.int32),
        "cu_q_lens": array((batch + 1,), jnp.int32),
        "q_positions": array((total,), jnp.int32),
    }
    if tail is not None:
        fields["tail_mask"] = array((total, -(-tail // 32)), jnp.uint32)
        fields["tail_positions"] = array((batch, tail), jnp.int32)
    pool = array((batch * pages + 1, page_size, 2 * G, width), pool_dtype)
    return array((total, H, width), jnp.bfloat16), pool, fields


def lower(args: tuple[Any, ...], *, queries: int, tuning: Tuning, **options: Any) -> str:
    def run(q: jax.Array, pool: jax.Array, fields: dict[str, jax.Array]) -> jax.Array:
        rows = AttentionMetadata(**fields)
        return attend_rows(
            q, pool, rows, scale=0.09, queries_per_row=queries, tuning=tuning, **options
        )

    device: Any = getattr(jax.sharding, "AbstractDevice")  # noqa: B009  # absent in jax 0.10
    chip = device(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=chip)
    with jax.sharding.use_abstract_mesh(mesh):  # Triton's kernel asks which chip it is for
        return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("batch", "queries", "page_size", "tail", "tuning"),
    [
        (1, 1, 16, None, Tuning()),
        (8, 4, 64, 4, Tuning()),
        (64, 16, 64, 16, Tuning()),
        (64, 4, 16, 12, Tuning(block_tokens=128, stages=2)),
        (8, 64, 128, 64, Tuning(weights="shared", stages=2)),
        (64, 1, 16, None, Tuning(loader="producer", consumers=2)),
    ],
)
def test_lowers_for_hopper(
    batch: int, queries: int, page_size: int, tail: int | None, tuning: Tuning
) -> None:
    args = llama_shapes(batch, queries, page_size, tail=tail)
    options: dict[str, Any] = {"window": 4096} if batch == 8 else {}
    text = lower(args, queries=queries, tuning=tuning, **options)
    assert text.count("@mosaic_gpu_v2") == 1


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("queries", "width", "tuning"),
    [(1, D, Tuning()), (16, D, Tuning(stages=3)), (4, D, PRODUCER), (4, 64, Tuning())],
    ids=str,
)
def test_fp8_pools_lower_for_hopper(queries: int, width: int, tuning: Tuning) -> None:
    options: dict[str, Any] = {"pool_dtype": jnp.float8_e4m3fn, "width": width}
    args = llama_shapes(8, queries, 64, tail=queries, **options)
    assert lower(args, queries=queries, tuning=tuning).count("@mosaic_gpu_v2") == 1


@needs_mosaic_gpu
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_lowers_for_hopper_at_all_serving_shapes(batch: int, queries: int, page_size: int) -> None:
    for tail in (None, queries):
        for tuning in (Tuning(), Tuning(block_tokens=128, stages=2), PRODUCER):
            args = llama_shapes(batch, queries, page_size, tail=tail)
            options: dict[str, Any] = {"window": 4096} if batch == 8 else {}
            text = lower(args, queries=queries, tuning=tuning, **options)
            assert text.count("@mosaic_gpu_v2") == 1


@needs_mosaic_gpu
@pytest.mark.slow
@needs_cuda_compiler
def test_compiles_ahead_of_time_for_an_h200_and_copies_no_pool() -> None:
    """XLA's compiler and ptxas for sm_90a, in a separate process, on a machine without a GPU."""
    output = output_of("tests.pallas_kernels.gpu_kernel_compile")
    assert output.count("compiled") == 6


def ragged_rows(
    batch: int, queries: int, page_size: int, *, heads: tuple[int, int], width: int, longest: int
) -> tuple[jax.Array, jax.Array, AttentionMetadata]:
    """Return q, pool and rows of a call with 0 to R queries per row; unwritten memory is NaN."""
    pages = -(-(longest + queries) // page_size)
    lens = np.arange(batch) % (queries + 1)
    lens[-1] = queries
    prefix = np.where(lens > 0, np.linspace(longest // 2, longest, batch).astype(int), 0)
    table = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages) + 1
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (batch, queries, heads[0], width), jnp.bfloat16)
    q = jnp.where(jnp.arange(queries)[:, None, None] < lens[:, None, None, None], q, jnp.nan)
    pool = jax.random.normal(
        keys[1], (batch * pages + 1, page_size, 2 * heads[1], width), jnp.bfloat16
    )
    written = np.zeros(pool.shape[:2], bool)
    written[table] = (
        np.arange(pages * page_size).reshape(pages, -1) < (prefix + lens)[:, None, None]
    )
    rows = AttentionMetadata(
        page_table=jnp.asarray(table, jnp.int32),
        prefix_lens=jnp.asarray(prefix, jnp.int32),
        cu_q_lens=jnp.asarray(np.append(0, np.cumsum(lens)), jnp.int32),
        q_positions=jnp.asarray((prefix[:, None] + np.arange(queries)).reshape(-1), jnp.int32),
    )
    pool = jnp.where(written[:, :, None, None], pool, jnp.nan)
    return q.reshape(-1, heads[0], width), pool, rows


def check_direct(
    batch: int,
    queries: int,
    page_size: int,
    *,
    heads: tuple[int, int] = (32, 8),
    width: int = 128,
    window: int | None = None,
    longest: int = 1168,
    interpret: bool = False,
) -> None:
    """Compare with the reference without shares, so that the kernel itself writes its results."""
    q, pool, rows = ragged_rows(
        batch, queries, page_size, heads=heads, width=width, longest=longest
    )
    options: dict[str, Any] = {"scale": 0.09, "queries_per_row": queries, "window": window}
    expected = jax.jit(functools.partial(reference.attend, sinks=None, **options))(q, pool, rows)
    run = functools.partial(attend_rows, tuning=Tuning(splits=1), interpret=interpret, **options)
    out = np.asarray(jax.jit(run)(q, pool, rows).astype(jnp.float32))
    np.testing.assert_allclose(out, expected.astype(jnp.float32), rtol=0.02, atol=0.01)
    lens = np.diff(np.asarray(rows.cu_q_lens))
    is_padding = (np.arange(queries) >= lens[:, None]).reshape(-1)
    assert is_padding.any()
    assert not out[is_padding].any()


@needs_mosaic_gpu
def test_ragged_rows_equal_the_reference_in_interpret_mode(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        check_direct(3, 4, 64, heads=(8, 2), longest=150, interpret=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


@needs_hopper
@pytest.mark.parametrize("queries", [1, 4, 16])
def test_ragged_rows_equal_the_reference_on_the_chip(queries: int) -> None:
    check_direct(64, queries, 64)


@needs_hopper
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (24, 8), (32, 8), (64, 8)])
def test_ragged_rows_of_any_group_equal_the_reference_on_the_chip(
    heads: tuple[int, int], width: int, page_size: int
) -> None:
    """A copy starts anywhere in the pattern of shared memory banks: 128 bytes to 2 KiB."""
    check_direct(8, 16, page_size, heads=heads, width=width, window=300)


@needs_hopper
@pytest.mark.parametrize("tuning", [Tuning(), PRODUCER], ids=str)
@pytest.mark.parametrize(("batch", "queries", "page_size"), [(1, 1, 16), (8, 4, 64), (32, 16, 64)])
def test_equals_the_reference_at_serving_shapes(
    batch: int, queries: int, page_size: int, tuning: Tuning
) -> None:
    q_shape, pool_shape, fields = llama_shapes(
        batch, queries, page_size, tail=queries, context=1168
    )
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], q_shape.shape, q_shape.dtype)
    pool = jax.random.normal(keys[1], pool_shape.shape, pool_shape.dtype)
    pages = fields["page_table"].shape[1]
    order = np.random.default_rng(0).permutation(batch * pages) + 1
    prefix = np.linspace(700, 1168, batch).astype(np.int32)
    words = (1 << (np.arange(queries) + 1)) - 1  # a chain, declared as a tree
    positions = jnp.asarray(prefix[:, None] + np.arange(queries), jnp.int32)
    rows = AttentionMetadata(
        page_table=jnp.asarray(order.reshape(batch, pages), jnp.int32),
        prefix_lens=jnp.asarray(prefix),
        cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * queries,
        q_positions=positions.reshape(-1),
        tail_mask=jnp.asarray(np.tile(words, batch)[:, None], jnp.uint32),
        tail_positions=positions,
    )
    options: dict[str, Any] = {"scale": 0.09, "queries_per_row": queries}
    expected = reference.attend(q, pool, rows, window=None, sinks=None, **options).astype(
        jnp.float32
    )
    out = attend_rows(q, pool, rows, tuning=tuning, **options).astype(jnp.float32)
    np.testing.assert_allclose(out, expected, rtol=0.02, atol=0.01)
