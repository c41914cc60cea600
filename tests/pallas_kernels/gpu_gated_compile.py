"""Compile the gated Hopper kernels, and the XLA programs around them, for an absent H200.

Run by test_gated_mlp_gpu.py in a separate process, see gpu_kernel_compile.py. ptxas is run a second
time, on the PTX that Mosaic writes to a folder, to report spills. Prints one line per tuning.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.pallas_kernels.gated_mlp.gpu import DEFAULT, FEW, NARROW, gated_product
from jspec.pallas_kernels.gated_mlp.gpu_few import MORE, ONE, SEVERAL, few_gated_product
from jspec.pallas_kernels.gated_mlp.tuning import Layout as WeightLayout
from jspec.pallas_kernels.gated_mlp.tuning import Shared
from jspec.pallas_kernels.shapes import LLAMA_3_1_8B
from tests.pallas_kernels.gpu_kernel_compile import H200

K, N = LLAMA_3_1_8B.widths
PROGRAMS = (
    (8192, DEFAULT),
    (1024, replace(DEFAULT, cluster=1)),
    (256, NARROW),
    (256, replace(NARROW, tile_n=64, piece=32)),
    (64, FEW),
    (16, FEW),
    (2048, replace(DEFAULT, cluster=2, shared=Shared.TOKENS)),
)
FEW_PROGRAMS = ((1, ONE), (1, SEVERAL), (4, SEVERAL), (16, SEVERAL), (32, MORE))


def assembler() -> str:
    """Return the path of ptxas: of the system, or of the CUDA wheels."""
    found = shutil.which("ptxas")
    if found is not None:
        return found
    wheels = importlib.util.find_spec("nvidia")
    folders = (wheels.submodule_search_locations if wheels else None) or []
    inside = (path for folder in folders for path in Path(folder).rglob("bin/ptxas"))
    return str(next(inside))


def spilled_bytes(folder: Path) -> int:
    """Return the bytes that the one kernel with PTX in `folder` spills."""
    (source,) = folder.rglob("*.ptx")
    done = subprocess.run(
        [assembler(), "-v", "-arch=sm_90a", "-o", str(folder / "kernel.cubin"), str(source)],
        capture_output=True,
        text=True,
        check=True,
    )
    counts = re.findall(r"(\d+) bytes spill", done.stdout + done.stderr)
    if not counts:
        raise SystemExit("ptxas says nothing of spills")
    source.unlink()
    return sum(map(int, counts))


def compiled(m: int, product: Callable[..., jax.Array], *, column_major: bool) -> str:
    """Compile the program for M tokens, which must be the kernel alone: it copies no weight."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    mesh, everywhere = Mesh(np.array([device]), ("tensor",)), PartitionSpec()
    sharding = NamedSharding(mesh, everywhere)
    w = jax.ShapeDtypeStruct((K, 2 * N), jnp.bfloat16, sharding=sharding)
    x = jax.ShapeDtypeStruct((m, K), jnp.bfloat16, sharding=sharding)
    order = (1, 0) if column_major else (0, 1)
    placed = (sharding, Format(Layout(major_to_minor=order), sharding))
    program = jax.shard_map(  # which tells Triton the device
        product, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    text = jax.jit(program, in_shardings=placed).lower(x, w).compile().as_text() or ""
    if re.search(r"= \S+ (copy|fusion|transpose)\(", text):
        raise SystemExit("the compiled program has more than the kernel")
    return text


def main() -> None:
    """Compile each tuning at another M."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
        for m, tuning in PROGRAMS:
            column_major = tuning.layout is WeightLayout.OUT_IN
            text = compiled(m, partial(gated_product, tuning=tuning), column_major=column_major)
            if "mosaic_gpu" not in text:
                raise SystemExit("the compiled program has no Mosaic GPU kernel")
            spilled = spilled_bytes(Path(folder))
            if spilled:
                raise SystemExit(f"{tuning} spills {spilled} bytes")
            print("compiled", m, tuning)
    for m, few in FEW_PROGRAMS:
        text = compiled(m, partial(few_gated_product, tuning=few), column_major=True)
        if "few_gated_product" not in text:
            raise SystemExit("the compiled program has no Triton kernel")
        print("compiled", m, few)


if __name__ == "__main__":
    main()
