"""Compile the fp8 products, and the XLA programs around them, for an absent H200.

Run by test_fp8_product_gpu.py in a separate process, see gpu_gated_compile.py. Prints one line per
program, each of which must be one kernel that spills no register.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.device.fp8 import E4M3, FP8Weight
from jspec.pallas_kernels.fp8_product.api import QuantizedTokens
from jspec.pallas_kernels.fp8_product.gpu import product
from jspec.pallas_kernels.fp8_product.gpu_tokens import quantize
from jspec.pallas_kernels.fp8_product.tuning import tiles_for
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B
from tests.pallas_kernels.gpu_gated_compile import spilled_bytes
from tests.pallas_kernels.gpu_kernel_compile import H200

E, INNER = LLAMA_3_1_8B.widths
SIZES = {"down": (INNER, E, False), "gate and up": (E, 2 * INNER, True)}
TOKENS = (1, 8, 64, 256, 4096)


def compiled(run: Callable[..., jax.Array], x: Any, k: int, n: int, *, by_blocks: bool) -> str:
    """Compile the program of run(x, weight), and check that it copies no weight."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    mesh, everywhere = Mesh(np.array([device]), ("tensor",)), PartitionSpec()
    sharding = NamedSharding(mesh, everywhere)
    shape = (k // 128, n // 128) if by_blocks else (n,)

    def array(like: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

    weight = FP8Weight(
        codes=array(jax.ShapeDtypeStruct((k, n), E4M3)),
        scales=array(jax.ShapeDtypeStruct(shape, jnp.float32)),
    )
    turned = Format(Layout(major_to_minor=(1, 0)), sharding)
    placed = (sharding, FP8Weight(codes=turned, scales=sharding))
    program = jax.shard_map(  # which tells Triton the device
        run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    arguments = (jax.tree.map(array, x), weight)
    text = jax.jit(program, in_shardings=placed).lower(*arguments).compile().as_text() or ""
    if re.search(r"= \S+ (copy|fusion|transpose|pad)\(", text):
        raise SystemExit("the compiled program has more than the kernel")
    return text


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
        for name, (k, n, is_gated) in SIZES.items():
            for by_blocks in (False, True):
                for m in TOKENS:
                    compile_one(name, m, k, n, Path(folder), is_gated, by_blocks)


def compile_one(
    name: str, m: int, k: int, n: int, folder: Path, is_gated: bool, by_blocks: bool
) -> None:
    how: Any = {"halves": 1 + is_gated, "by_blocks": by_blocks}
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    tokens: QuantizedTokens = jax.eval_shape(partial(quantize, by_blocks=by_blocks), x)
    tuning = tiles_for(m, k, n, **how)
    run = partial(product, tuning=tuning, is_gated=is_gated)
    if "mosaic_gpu" not in compiled(run, tokens, k, n, by_blocks=by_blocks):
        raise SystemExit("the compiled program has no Mosaic GPU kernel")
    spilled = spilled_bytes(folder)
    if spilled:
        raise SystemExit(f"{name}, {m} tokens: {tuning} spills {spilled} bytes")
    print("compiled", name, m, tuning)


if __name__ == "__main__":
    main()
