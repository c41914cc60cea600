"""Compile the fused add and norm for an absent H200, in a separate process.

Run by test_add_norm_gpu.py. Needs the jax-cuda13 plugin, which accepts a description of the chip,
and ptxas. Prints one line per shape.
"""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.pallas_kernels.add_norm.gpu import add_and_norm
from tests.pallas_kernels.gpu_kernel_compile import H200


def main() -> None:
    """Compile one row, verification, prefill; widths of 4096, and one that is no power of two."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    mesh, whole = Mesh(np.array([device]), ("tensor",)), PartitionSpec()
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=NamedSharding(mesh, whole))
    run = jax.jit(  # Pallas asks the mesh for which chip it lowers
        jax.shard_map(
            partial(add_and_norm, eps=1e-5),
            mesh=mesh,
            in_specs=whole,
            out_specs=whole,
            check_vma=False,
        )
    )
    for size in (4096, 5120):
        for num_rows in (1, 64, 2048):
            x, scale = array((num_rows, size)), array((size,))
            text = run.lower(x, x, scale).compile().as_text() or ""
            kernels = text.count('custom_call_target="__gpu$xla.gpu.triton"')
            beside = re.findall(r" (?:fusion|copy|reduce|add)\(", text)
            if kernels != 1 or beside:
                raise SystemExit(f"[{num_rows}, {size}]: {kernels} Triton kernels, and {beside}")
            print("compiled", num_rows, size)


if __name__ == "__main__":
    main()
