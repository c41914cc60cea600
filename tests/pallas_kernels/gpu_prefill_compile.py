"""Compile the packed Hopper kernel, and the XLA program around it, for an absent H200.

Run by test_prefill_gpu.py in a separate process, see gpu_kernel_compile.py. Prints one line per
shape. With MOSAIC_GPU_DUMP_TO and MOSAIC_GPU_DUMP_PTX set, `ptxas -v` reports spills.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.prefill.gpu import attend_packed
from jspec.pallas_kernels.prefill.tuning import Tuning
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B
from tests.pallas_kernels.gpu_gated_compile import spilled_bytes
from tests.pallas_kernels.gpu_kernel_compile import H200

ROWS = 16
H, G, D = LLAMA_3_1_8B.heads


def llama_shapes(
    batch: int, queries: int, page_size: int, *, context: int = 8192, sharding: Any = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return abstract q, pool and fields of AttentionMetadata, at the sizes of Llama-3.1-8B."""
    pages = -(-context // page_size)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    fields = {
        "page_table": array(jnp.int32, batch, pages),
        "prefix_lens": array(jnp.int32, batch),
        "cu_q_lens": array(jnp.int32, batch + 1),
        "q_positions": array(jnp.int32, queries),
    }
    pool = array(jnp.bfloat16, batch * pages + 1, page_size, 2 * G, D)
    return array(jnp.bfloat16, queries, H, D), pool, fields


def main() -> None:
    """Compile chunks of three sizes over two page sizes, and options that the default leaves
    out."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    for queries, page_size, options in (
        (1024, 16, {}),
        (2048, 64, {}),
        (8192, 16, {}),
        (8192, 64, {"window": 1024}),
        (2048, 64, {"tuning": Tuning(takes_turns=False)}),
        (2048, 64, {"tuning": Tuning(consumers=3, block_tokens=64, stages=4)}),
    ):
        compile_one(queries, page_size, options, jnp.bfloat16, sharding=sharding)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
        compile_one(8192, 64, {}, jnp.float8_e4m3fn, sharding=sharding)
        spilled = spilled_bytes(Path(folder))
    if spilled:
        raise SystemExit(f"the kernel of FP8 pools spills {spilled} bytes")


def compile_one(
    queries: int, page_size: int, options: dict[str, Any], pool_dtype: Any, *, sharding: Any
) -> None:
    q, pool, fields = llama_shapes(ROWS, queries, page_size, sharding=sharding)
    pool = jax.ShapeDtypeStruct(pool.shape, pool_dtype, sharding=sharding)

    def run(q: jax.Array, pool: jax.Array, fields: Any) -> jax.Array:
        return attend_packed(q, pool, AttentionMetadata(**fields), scale=0.09, **options)

    text = jax.jit(run).lower(q, pool, fields).compile().as_text() or ""
    if "mosaic_gpu" not in text:
        raise SystemExit("the compiled program has no Mosaic GPU kernel")
    if re.search(rf"\w+\[{pool.shape[0]},[^=]*\S+ (copy|fusion)\(", text):
        raise SystemExit("the compiled program copies the pool")
    print("compiled", queries, page_size, options, pool_dtype.__name__)


if __name__ == "__main__":
    main()
