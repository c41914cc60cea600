"""The bundle of kernels for each platform, and that each bundle fulfils the contract."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.arguments import argument_of
from jspec.config.engine_args import EngineArgs
from jspec.errors import ConfigError
from jspec.layers.rope import angles_of
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.bundles import OPS, choose_ops
from jspec.pallas_kernels.experts.api import KERNEL_GATES
from jspec.pallas_kernels.hopper import has_mosaic_gpu
from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.ops_gpu import gpu_problem
from jspec.spec.cache_entry import CacheLayout
from jspec.spec.layers.feed_forward import Gate
from jspec.spec.rope import RopeConfig, YarnConfig
from tests.pallas_kernels.chips import needs_mosaic_gpu


def pool_width(ops: Ops, width: int) -> int:
    return CacheLayout(page_size=1, dtype="float32", lanes=ops.lanes).width(width)


@pytest.mark.parametrize(
    ("platform", "requested", "name"),
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
def test_the_platform_chooses_unless_told(platform: str, requested: str, name: str) -> None:
    (declared,) = (field for field in fields(EngineArgs) if field.name == "attention_backend")
    assert requested in argument_of(declared).choices
    assert choose_ops(platform, requested) == OPS[name]


def test_a_gpu_that_the_kernels_do_not_serve_gets_xla_unless_they_were_asked_for() -> None:
    assert choose_ops("gpu", "auto", gpu_problem="head_dim 32; expected 64") == OPS["xla"]
    with pytest.raises(ConfigError, match=r"'pallas', with head_dim 32; expected 64"):
        choose_ops("gpu", "pallas", gpu_problem="head_dim 32; expected 64")


def test_a_cpu_has_no_kernels_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend is 'pallas', on cpu devices"):
        choose_ops("cpu", "pallas")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_capability": "8.0"}, r"compute capability 8\.0; expected 9\.0"),
        ({"dtype": jnp.float32}, "dtype float32; expected bfloat16 or float16"),
        ({"page_size": 24}, "page_size 24; expected 8, 16, 32, 64 or a multiple of 128"),
        ({"head_dims": (128, 32)}, "head_dim 32; expected 64, 128 or 256"),
        ({"head_dims": (256, 512)}, "head_dim 512; expected 64, 128 or 256"),  # Gemma 4
        ({"head_dims": (), "page_size": 24}, "page_size 24; expected 8"),  # no layer caches K and V
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
    for head_dims in ((128, 64), (256,), ()):
        assert gpu_problem(**fits, head_dims=head_dims) is None


@pytest.mark.parametrize("name", ["tpu_interpret", "gpu_interpret"])
def test_experts_with_a_gate_that_no_kernel_has_use_xla(name: str) -> None:
    """The widths are those of the kernels."""
    assert Gate.GELU not in KERNEL_GATES
    key = jax.random.key(0)
    params = {"gate_up": jax.random.normal(key, (2, 128, 256)), "down": jnp.ones((2, 128, 128))}
    x, ids = jax.random.normal(key, (8, 128)), jnp.asarray([[0], [1]] * 4, jnp.int32)
    given = x, ids, jnp.ones((8, 1), jnp.float32), params
    found = OPS[name].experts(*given, gate=Gate.GELU)
    np.testing.assert_array_equal(found, OPS["xla"].experts(*given, gate=Gate.GELU))


def test_only_the_tpu_kernels_widen_the_pool() -> None:
    assert [pool_width(OPS[name], 64) for name in ("xla", "gpu", "tpu")] == [64, 64, 128]
    assert [pool_width(OPS["tpu"], width) for width in (128, 129, 256)] == [128, 256, 256]


def test_bundles_are_compared_by_what_they_run() -> None:
    """Equal bundles share compiled programs, and different ones never do."""
    assert len(set(OPS.values())) == len(OPS)
    assert choose_ops("gpu") == OPS["gpu"]
    assert hash(choose_ops("gpu")) == hash(OPS["gpu"])
    assert OPS["gpu"].with_columns(True) != OPS["gpu"]


def test_only_the_gpu_kernels_read_weights_by_columns() -> None:
    turned = {name for name, ops in OPS.items() if ops.with_columns(True).column_major}
    assert turned == {"gpu", "gpu_interpret"}
    assert not any(ops.with_columns(False).column_major for ops in OPS.values())


@functools.cache
def written_and_seen(
    ops: Ops, *, packed: bool, without_queries: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Run four tokens on each of two rows, with K and V written by the call or before it."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    prefix = jnp.asarray([21, 3], jnp.int32)
    rows = AttentionMetadata(
        page_table=jnp.asarray([[1, 2], [3, 0]], jnp.int32),
        prefix_lens=prefix,
        cu_q_lens=jnp.asarray([0, 4, 8], jnp.int32),
        q_positions=(prefix[:, None] + jnp.arange(4)).reshape(-1),
    )
    q, k, v = draw(8, 4, 64), draw(8, 2, 64), draw(8, 2, 64)
    pages, per_row = draw(6, 16, 4, pool_width(ops, 64)), None if packed else 4
    call = AttentionCall(queries_per_row=per_row, scale=0.125)

    @jax.jit
    def run(pages: jax.Array, rows: AttentionMetadata) -> tuple[jax.Array, jax.Array]:
        if without_queries:
            pages = ops.write_kv(k, v, pages, rows, queries_per_row=per_row)
            return ops.attend(q, None, None, pages, rows, call)
        return ops.attend(q, k, v, pages, rows, call)

    out, pages = run(pages, rows)
    return np.asarray(out, np.float32), np.asarray(pages[1:4], np.float32)


@pytest.mark.usefixtures("few_programs")
@needs_mosaic_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_the_gpu_kernels_see_what_the_call_writes(packed: bool) -> None:
    out, pages = written_and_seen(OPS["gpu_interpret"], packed=packed)
    expected, expected_pages = written_and_seen(OPS["reference"], packed=packed)
    np.testing.assert_array_equal(pages, expected_pages)
    np.testing.assert_allclose(out, expected, atol=0.02)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.slow_cases("tpu_interpret-F", "tpu_interpret-T")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "name", ["xla", "tpu_interpret", pytest.param("gpu_interpret", marks=needs_mosaic_gpu)]
)
def test_k_and_v_written_without_queries_are_those_of_a_call(name: str, packed: bool) -> None:
    """A kernel may sum this call's keys separately from those in the pool."""
    out, pages = written_and_seen(OPS[name], packed=packed, without_queries=True)
    expected, expected_pages = written_and_seen(OPS[name], packed=packed)
    np.testing.assert_array_equal(pages, expected_pages)
    np.testing.assert_allclose(out, expected, atol=0.02)


def rotated_and_mixed(ops: Ops, *, packed: bool) -> np.ndarray:
    """Run projected heads through a layer like gpt-oss's.

    It has sinks that weigh about as much as the keys, a window, and a rotation that lengthens q and
    k.
    """
    rng = np.random.default_rng(1)
    num_heads, num_kv_heads, width = 4, 2, 64
    prefix = jnp.asarray([21, 3], jnp.int32)
    positions = (prefix[:, None] + jnp.arange(4)).reshape(-1)
    rope = RopeConfig(factor=32.0, yarn=YarnConfig(attention_factor=1.35, truncate=False))
    rows = AttentionMetadata(
        page_table=jnp.asarray([[1, 2], [3, 0]], jnp.int32),
        prefix_lens=prefix,
        cu_q_lens=jnp.asarray([0, 4, 8], jnp.int32),
        q_positions=positions,
    )
    heads = jnp.asarray(rng.standard_normal((8, num_heads + 2 * num_kv_heads, width)), jnp.bfloat16)
    pages = np.zeros((6, 16, 2 * num_kv_heads, pool_width(ops, width)))
    pages[..., :width] = rng.standard_normal((*pages.shape[:-1], width))

    @jax.jit
    def run(heads: jax.Array, pages: jax.Array, rows: AttentionMetadata) -> jax.Array:
        cos, sin = angles_of(rows.q_positions, head_dim=width, rope=rope)
        out, _ = ops.rotate_write_and_attend(
            heads,
            Rotation(cos=cos, sin=sin, num_heads=num_heads),
            pages,
            rows,
            AttentionCall(queries_per_row=None if packed else 4, scale=0.125, window=8),
            jnp.asarray([0.0, 2.0, -1.0, 3.0], jnp.bfloat16),
        )
        return out

    return np.asarray(run(heads, jnp.asarray(pages, jnp.bfloat16), rows), np.float32)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.slow_cases("tpu_interpret-F", "tpu_interpret-T", "xla-F", "xla-T")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "name", ["xla", "tpu_interpret", pytest.param("gpu_interpret", marks=needs_mosaic_gpu)]
)
def test_every_bundle_takes_sinks_a_window_and_yarn_s_rotation(name: str, packed: bool) -> None:
    out = rotated_and_mixed(OPS[name], packed=packed)
    expected = rotated_and_mixed(OPS["reference"], packed=packed)
    np.testing.assert_allclose(out, expected, atol=0.02)


def test_an_engine_imports_no_kernels_of_another_platform() -> None:
    """Importing Mosaic GPU takes a quarter of the import time."""
    code = (
        "import sys, jspec.engine.building as b; from jspec.pallas_kernels.bundles import OPS; "
        "others = {'jax.experimental.pallas.mosaic_gpu', 'jspec.pallas_kernels.ops_tpu'}; "
        "OPS['xla']; print(*others.intersection(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
