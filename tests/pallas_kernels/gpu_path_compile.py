"""Compile the compaction of all layers for an absent H200, in a separate process.

Run by test_compaction_gpu.py. Needs the jax-cuda13 plugin, which accepts a description of the chip,
and ptxas. Prints one JSON line per shape: seconds, launches, pools and how many of them the
launches write in place, lines that copy a pool, and the bytes of other arrays.
"""

from __future__ import annotations

import json
import re
import time
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from jspec.device.parallel import Parallel, shardings
from jspec.pallas_kernels.compaction.gpu import compact_paths
from tests.engine.pool_copies import pool_copies
from tests.pallas_kernels.gpu_kernel_compile import H200

abstract = jax.ShapeDtypeStruct


def report(
    mesh: Mesh, name: str, *, layers: int, heads: int, batch: int = 64, num_path: int = 4,
    num_pages: int = 1031, width: int = 128,
) -> None:  # fmt: skip
    pool = (num_pages, 64, heads, width)
    kv = tuple(abstract(pool, jnp.bfloat16) for _ in range(layers))
    table, path = abstract((batch, 130), jnp.int32), abstract((batch, num_path), jnp.int32)
    lens = abstract((batch,), jnp.int32)
    whole = PartitionSpec()
    step = jax.shard_map(
        compact_paths, mesh=mesh, in_specs=(whole,) * 5, out_specs=whole, check_vma=False
    )
    placed = shardings(mesh, whole)
    started = time.monotonic()
    compiled = (
        jax.jit(step, donate_argnums=0, in_shardings=placed, out_shardings=placed)
        .lower(kv, table, lens, path, lens)
        .compile()
    )
    text = compiled.as_text() or ""
    launches = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    memory = compiled.memory_analysis()
    if memory is None:
        raise SystemExit("the compiler tells nothing of the memory")
    result = {
        "name": name,
        "seconds": round(time.monotonic() - started, 1),
        "launches": len(launches),
        "pools": layers,
        "aliased": sum(aliases(line) for line in launches),
        "copies": pool_copies(text, pool),
        "temp_bytes": memory.temp_size_in_bytes,
    }
    print(json.dumps(result), flush=True)


def aliases(launch: str) -> int:
    """Return how many results of a custom call are in its `output_to_operand_aliasing`."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?)\}(, [a-z_]+=|$)", launch)
    return found.group(1).count("(") if found else 0


def main() -> None:
    devices = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology="1x1x1"
    ).devices
    compact = partial(report, Parallel(tensor=len(devices)).mesh(list(devices)))
    compact("8b", layers=32, heads=16)
    compact("8b, pools of 5 GB, 9 levels, one row", layers=16, heads=16, batch=1, num_path=10,
            num_pages=20011)  # fmt: skip
    compact("70b", layers=80, heads=16, batch=256)
    compact("an odd width", layers=3, heads=6, width=200)


if __name__ == "__main__":
    main()
