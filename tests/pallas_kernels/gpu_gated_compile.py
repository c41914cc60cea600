"""Compiles the gated Hopper kernel, and the XLA program around it, for an H200 that is not there.

Run by test_gated_matmul_gpu.py in a process of its own, see gpu_kernel_compile.py. ptxas is run a
second time, on what Mosaic leaves in a folder, to say what spills. Prints one line a tuning.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

from jspec.pallas_kernels.gated_mlp.gpu import DEFAULT, FEW, NARROW, gated_product
from jspec.pallas_kernels.gated_mlp.plan import GatedTuning, Shared
from jspec.pallas_kernels.gated_mlp.plan import Layout as WeightLayout
from tests.pallas_kernels.gpu_kernel_compile import H200

K, N = 4096, 14336  # Llama-3.1-8B
PROGRAMS = (
    (8192, DEFAULT),
    (1024, replace(DEFAULT, cluster=1)),
    (256, NARROW),
    (64, FEW),
    (16, FEW),
    (2048, replace(DEFAULT, cluster=2, shared=Shared.TOKENS)),
)


def assembler() -> str:
    """ptxas, from the path or from where the CUDA wheels have it."""
    found = shutil.which("ptxas")
    if found is not None:
        return found
    wheels = importlib.util.find_spec("nvidia")
    folders = (wheels.submodule_search_locations if wheels else None) or []
    inside = (path for folder in folders for path in Path(folder).rglob("bin/ptxas"))
    return str(next(inside))


def spilled_bytes(folder: Path) -> int:
    """Of the one kernel whose PTX lies in `folder`."""
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


def main() -> None:
    """Each tuning at another M."""
    device = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    w = jax.ShapeDtypeStruct((K, 2 * N), jnp.bfloat16, sharding=sharding)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
        for m, tuning in PROGRAMS:
            x = jax.ShapeDtypeStruct((m, K), jnp.bfloat16, sharding=sharding)

            def run(x: jax.Array, w: jax.Array, tuning: GatedTuning = tuning) -> jax.Array:
                return gated_product(x, w, tuning=tuning)

            order = (1, 0) if tuning.layout is WeightLayout.OUT_IN else (0, 1)
            placed = (sharding, Format(Layout(major_to_minor=order), sharding))
            text = jax.jit(run, in_shardings=placed).lower(x, w).compile().as_text() or ""
            if "mosaic_gpu" not in text:
                raise SystemExit("the compiled program has no Mosaic GPU kernel")
            if re.search(r"= \S+ (copy|fusion|transpose)\(", text):
                raise SystemExit("the compiled program has more than the kernel")
            spilled = spilled_bytes(Path(folder))
            if spilled:
                raise SystemExit(f"{tuning} spills {spilled} bytes")
            print("compiled", m, tuning)


if __name__ == "__main__":
    main()
