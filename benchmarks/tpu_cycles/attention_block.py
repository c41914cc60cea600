"""Cycles of one whole block of the TPU's decode attention, by libtpu's evaluator of bundles.

    python -m benchmarks.tpu_cycles.attention_block [--topology v6e:2x2]

The simulator (scalar_core.py) counts a bundle as a cycle. It does not know how long the result of a
product or of a reduction over lanes takes, for which the core waits. The evaluator does, but it
aborts on a kernel with scalar operands. So this compiles the arithmetic of one block alone, the
kernel's own `absorb_block`, on keys that are in VMEM, and takes the difference between 128 and 64
blocks. On v7x the evaluator aborts.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.tpu_cycles.chips import chip_of
from benchmarks.tpu_programs import ROOT, V6E

# (queries, query heads, KV heads) of a shard: Llama-3.1-8B over four chips, eight, and one.
SHAPES = ((1, 8, 2), (4, 8, 2), (16, 8, 2), (1, 4, 1), (16, 4, 1), (1, 32, 8), (16, 32, 8))
FEW, MANY = 64, 128


def compile_blocks(topology: str, shape: tuple[int, int, int], blocks: int) -> None:
    """Compile a kernel that absorbs `blocks` blocks."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from jspec.pallas_kernels.attention.tpu_kernel import LANES, LOW, absorb_block

    plan = plan_of(shape)
    heads = plan.two_g // 2

    def kernel(q: Any, buffers: Any, out: Any, top: Any, total: Any, mixed: Any) -> None:
        refs: Any = SimpleNamespace(q=q, buffers=buffers, top=top, total=total, mixed=mixed)
        step = pl.program_id(0)

        @pl.when(step == 0)
        def _() -> None:
            top[...] = jnp.full_like(top, LOW)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        absorb_block(plan, refs, jnp.int32(0), jnp.int32(0), None)

        @pl.when(step == blocks - 1)
        def _() -> None:
            out[...] = mixed[...] + total[...]

    partial = (heads, plan.packed, LANES)
    sizes = ((1, heads, plan.packed, plan.width), (1, plan.block_keys, plan.two_g, plan.width))

    def call(q: Any, buffers: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(blocks,),
            in_specs=[pl.BlockSpec(size, lambda _: (0, 0, 0, 0)) for size in sizes],
            out_specs=pl.BlockSpec(partial, lambda _: (0, 0, 0)),
            out_shape=jax.ShapeDtypeStruct(partial, jnp.float32),
            scratch_shapes=[pltpu.VMEM(partial, jnp.float32)] * 3,
            compiler_params=pltpu.CompilerParams(
                disable_bounds_checks=True, vmem_limit_bytes=plan.vmem_bytes
            ),
            name="attention_block",
        )(q, buffers)

    compile_for(topology, call, sizes)


def compile_for(topology: str, call: Any, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Compile `call` of bfloat16 arrays of these shapes for one device."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    device, whole = (
        topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0],
        PartitionSpec(),
    )
    mesh = Mesh([device], ("x",))
    placed = NamedSharding(mesh, whole)
    step = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    args = [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=placed) for size in sizes]
    jax.jit(step).lower(*args).compile()


def plan_of(shape: tuple[int, int, int]) -> Any:
    import jax.numpy as jnp

    from jspec.pallas_kernels.attention.tpu_kernel import RowsPlan

    queries, heads, kv_heads = shape
    return RowsPlan(
        batch=64,
        queries=queries,
        group=heads // kv_heads,
        page_size=64,
        two_g=2 * kv_heads,
        width=128,
        pages_per_row=128,
        tail=0,
        dtype=jnp.dtype(jnp.bfloat16),
        writes=True,
        scale=0.088,
        window=None,
        interpret=False,
    )


@functools.cache
def cycles(topology: str, shape: tuple[int, int, int], blocks: int) -> int:
    """Return the evaluator's cycles of `blocks` blocks."""
    words = [topology, *map(str, shape), str(blocks)]
    return evaluate("benchmarks.tpu_cycles.attention_block", words, "attention_block")


def evaluate(module: str, words: list[str], kernel: str) -> int:
    """Return the evaluator's cycles of a kernel that `module --compile WORDS` compiles.

    It runs in a process of its own. Raises RuntimeError.
    """
    with tempfile.TemporaryDirectory() as directory:
        flags = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={directory}",
        }
        done = subprocess.run(
            [sys.executable, "-m", module, "--compile", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=os.environ | flags,
        )
        found = list(Path(directory).glob(f"{kernel}*.textproto"))
        if done.returncode or not found:
            raise RuntimeError(f"{kernel} {words}: {done.stderr[-2000:]}")
        number = re.search(r"estimated_cycles: (\d+)", found[0].read_text("utf-8"))
        assert number is not None, found[0]
        return int(number[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topology", default=V6E)
    parser.add_argument("--compile", nargs="*", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        topology, *numbers, blocks = options.compile
        queries, heads, kv_heads = map(int, numbers)
        compile_blocks(topology, (queries, heads, kv_heads), int(blocks))
        return
    chip = chip_of(options.topology)
    for shape in SHAPES:
        plan = plan_of(shape)
        many, few = (cycles(options.topology, shape, n) for n in (MANY, FEW))
        block = (many - few) / (MANY - FEW)
        num_bytes = plan.block_keys * plan.two_g * plan.width * 2
        floor = num_bytes / chip.hbm_gb_s * chip.ghz
        print(
            f"{options.topology}: {shape[0]} queries, {shape[1]}/{shape[2]} heads, "
            f"{plan.block_keys} keys: {block:.0f} cycles; {floor:.0f} of HBM",
            flush=True,
        )


if __name__ == "__main__":
    main()
