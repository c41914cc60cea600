"""Compile attention over shared prefixes for an absent H200.

Run by test_attention_gpu_shared.py in a separate process, see gpu_kernel_compile.py. Prints one
line per shape: how often the kernel of rows is launched, and other launches.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.device.batch import SharedPrefixes
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_plan import pack_queries
from jspec.pallas_kernels.attention.gpu_shared import attend_shared
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B
from tests.pallas_kernels.gpu_kernel_compile import H200

(HEADS, GROUPS, WIDTH), PAGE_SIZE = LLAMA_3_1_8B.heads, 64


def compile_one(sharding: Any, batch: int, queries: int) -> str:
    """Return the optimised program of one call, at the sizes of Llama-3.1-8B."""
    pages, total = 8192 // PAGE_SIZE + 1, batch * queries

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(
        q: jax.Array, pool: jax.Array, fields: dict[str, jax.Array], shared: SharedPrefixes
    ) -> jax.Array:
        return attend_shared(
            pack_queries(q, batch, GROUPS, queries, width=WIDTH),
            pool,
            AttentionMetadata(**fields, shared=shared),
            num_heads=HEADS,
            queries_per_row=queries,
            scale=0.09,
        )

    fields = {
        "page_table": array(jnp.int32, batch, pages),
        "prefix_lens": array(jnp.int32, batch),
        "cu_q_lens": array(jnp.int32, batch + 1),
        "q_positions": array(jnp.int32, total),
    }
    shared = SharedPrefixes(leaders=array(jnp.int32, batch), num_keys=array(jnp.int32, batch))
    pool = array(jnp.bfloat16, batch * pages + 1, PAGE_SIZE, 2 * GROUPS, WIDTH)
    mapped = jax.shard_map(
        run, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
    )
    q = array(jnp.bfloat16, total, HEADS, WIDTH)
    return jax.jit(mapped).lower(q, pool, fields, shared).compile().as_text() or ""


def main() -> None:
    """Compile a chain's rows, four a pack, and single queries, sixteen a pack."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("chip",)), PartitionSpec())
    for batch, queries in ((64, 4), (16, 1)):
        text = compile_one(sharding, batch, queries)
        pages = batch * (8192 // PAGE_SIZE + 1) + 1
        if re.search(rf"bf16\[{pages},[^=]*\S+ (copy|fusion)\(", text):
            raise SystemExit("the compiled program copies the pool")
        rows = text.count('custom_call_target="mosaic_gpu_v2"')
        merges = len(re.findall(r'custom_call_target="__gpu\$xla.gpu.triton"', text))
        print(f"compiled {batch} {queries}: {rows} of rows, {merges} merges")


if __name__ == "__main__":
    main()
