"""Compile the Hopper kernel, and the XLA program around it, for an absent H200.

Run by test_attention_gpu_target.py in a separate process. Needs the jax-cuda13 plugin, which
accepts a description of the chip, and ptxas. Prints one line per shape.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.pallas_kernels.attention import gpu, gpu_fused
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.tuning import Tuning
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B

H, G, D = LLAMA_3_1_8B.heads
# As the chip reports itself: what XLA asks of a device description.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  device_address_bits: 64
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def compile_one(
    sharding: Any, batch: int, queries: int, page_size: int, tuning: Tuning | None
) -> str:
    """Return the optimised program of one call with a tree mask, at the sizes of Llama-3.1-8B.

    tuning: of a bfloat16 pool; None: an FP8 pool.
    """
    pages, total = 8192 // page_size + 1, batch * queries

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(q: jax.Array, pool: jax.Array, fields: dict[str, jax.Array]) -> jax.Array:
        rows = AttentionMetadata(**fields)
        how: Any = {"scale": 0.09, "queries_per_row": queries}
        if tuning is None:
            return gpu_fused.attend_rows(q, pool, rows, **how)
        return gpu.attend_rows(q, pool, rows, tuning=tuning, **how)

    fields = {
        "page_table": array(jnp.int32, batch, pages),
        "prefix_lens": array(jnp.int32, batch),
        "cu_q_lens": array(jnp.int32, batch + 1),
        "q_positions": array(jnp.int32, total),
        "tail_mask": array(jnp.uint32, total, 1),
        "tail_positions": array(jnp.int32, batch, queries),
    }
    dtype = jnp.float8_e4m3fn if tuning is None else jnp.bfloat16
    pool = array(dtype, batch * pages + 1, page_size, 2 * G, D)
    # Inside a shard_map, as steps run: there Triton learns which chip it compiles for.
    mapped = jax.shard_map(
        run, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
    )
    compiled = jax.jit(mapped).lower(array(jnp.bfloat16, total, H, D), pool, fields).compile()
    return compiled.as_text() or ""


def after_the_kernel(text: str) -> list[str]:
    """Return the instructions that read the Mosaic kernel's output, except views."""
    entry = text[text.index("\nENTRY") :]
    (kernel,) = re.findall(r'%(\S+) = [^\n]*custom_call_target="mosaic_gpu_v2"', entry)
    readers = [line for line in entry.splitlines() if re.search(rf"\(.*%{kernel}\b", line)]
    return [line for line in readers if not re.search(r" bitcast\(", line)]


def main() -> None:
    """Compile three shapes: decode in shares, verification, and a producer with two consumers."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("chip",)), PartitionSpec())
    for batch, queries, page_size, tuning in (
        (1, 1, 16, Tuning()),
        (64, 16, 64, Tuning()),
        (32, 4, 16, Tuning(loader="producer", consumers=2)),
    ):
        text = compile_one(sharding, batch, queries, page_size, tuning)
        if "mosaic_gpu" not in text:
            raise SystemExit("the compiled program has no Mosaic GPU kernel")
        if batch == 64 and after_the_kernel(text):
            raise SystemExit(f"something runs after the kernel: {after_the_kernel(text)}")
        pages = batch * (8192 // page_size + 1) + 1
        if re.search(rf"bf16\[{pages},[^=]*\S+ (copy|fusion)\(", text):
            raise SystemExit("the compiled program copies the pool")
        print("compiled", batch, queries, page_size, tuning)
    for batch, queries, page_size in ((1, 1, 16), (64, 1, 64), (8, 4, 64)):
        text = compile_one(sharding, batch, queries, page_size, None)
        pages = batch * (8192 // page_size + 1) + 1
        if "attend_fp8_rows" not in text or re.search(rf"f8\w+\[{pages},[^=]*\S+ copy\(", text):
            raise SystemExit("the compiled program lacks the kernel of FP8 pools, or copies one")
        print("compiled", batch, queries, page_size, "FP8")


if __name__ == "__main__":
    main()
