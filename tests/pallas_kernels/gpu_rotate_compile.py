"""Compile the kernel that rotates and writes, after its projection, for an absent H200.

Run by test_kv_write_gpu.py in a separate process; gpu_kernel_compile.py lists its needs. Prints one
line per number of tokens, at the sizes of Llama-3.1-8B.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.layers.rope import angles_of
from jspec.pallas_kernels.kv_write.gpu import rotate_and_write
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B
from jspec.spec.rope import RopeConfig
from tests.pallas_kernels.gpu_kernel_compile import H200

H, G, D = LLAMA_3_1_8B.heads
E = LLAMA_3_1_8B.hidden_size
LAYERS = 2  # to check that they share equal computations


def compile_one(mesh: Mesh, tokens: int, pages: int) -> str:
    """Return the optimised program of some layers' projection, rotation and write."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(x: jax.Array, kernels: Any, pools: Any, slots: Any, positions: jax.Array) -> Any:
        queries, pools = [], list(pools)
        for i, kernel in enumerate(kernels):
            heads = (x @ kernel).reshape(tokens, H + 2 * G, D)
            cos, sin = angles_of(positions, head_dim=D, rope=RopeConfig())
            q, pools[i] = rotate_and_write(heads, cos, sin, pools[i], *slots, num_heads=H)
            queries.append(q)
        return queries, pools

    program = jax.shard_map(
        run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    args = (
        array(jnp.bfloat16, tokens, E),
        [array(jnp.bfloat16, E, (H + 2 * G) * D)] * LAYERS,
        [array(jnp.bfloat16, pages, 64, 2 * G, D)] * LAYERS,
        (array(jnp.int32, tokens), array(jnp.int32, tokens)),
        array(jnp.int32, tokens),
    )
    return jax.jit(program, donate_argnums=2).lower(*args).compile().as_text() or ""


def main() -> None:
    """Compile one token, a verification, a prefill; the last with a pool beyond 32-bit offsets."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    mesh = Mesh(np.array([device]), ("tensor",))
    for tokens, pages in ((1, 129), (64, 8193), (2048, 20001)):
        text = compile_one(mesh, tokens, pages)
        calls = text.count('custom_call_target="__gpu$xla.gpu.triton"')
        aliased = text.count("output_to_operand_aliasing={{1}:")
        if (calls, aliased) != (LAYERS, LAYERS):
            raise SystemExit(f"{calls} Triton calls, {aliased} in place; expected {LAYERS} each")
        if re.search(rf"bf16\[{pages},[^=]*\S+ (copy|fusion)\(", text):
            raise SystemExit("the compiled program copies the pool")
        if len(re.findall(r" cosine\(", text)) != 1:
            raise SystemExit("the layers do not share their angles")
        print("compiled", tokens, pages)


if __name__ == "__main__":
    main()
