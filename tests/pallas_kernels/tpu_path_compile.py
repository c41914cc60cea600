"""Compiles compaction and gathering with the real TPU compiler; run in a process of its own.

    python -m tests.pallas_kernels.tpu_path_compile TOPOLOGY

Prints one JSON line a shape: its name, seconds, launches, and lines that copy what is large. There
is no TPU here: this shows that the kernels compile, not that they run.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# The compiler needs no chip: it may run beside another load, whoever owns the lock file in /tmp.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

from jspec.device.parallel import Parallel, shardings
from jspec.pallas_kernels.bonus_token.tpu import gather_emitted
from jspec.pallas_kernels.compaction.tpu import compact_paths
from tests.engine.pool_copies import pool_copies

i32, bf16 = jnp.int32, jnp.bfloat16
abstract = jax.ShapeDtypeStruct


def report(
    mesh: Mesh,
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    large: tuple[int, ...],
    *,
    donate: tuple[int, ...] = (),
) -> None:
    """Compiles `function` for one device's shapes; `large` must not be copied."""
    started = time.monotonic()
    whole = PartitionSpec()
    step = jax.shard_map(
        function, mesh=mesh, in_specs=(whole,) * len(args), out_specs=whole, check_vma=False
    )
    placed = shardings(mesh, whole)
    text = (
        jax.jit(step, donate_argnums=donate, in_shardings=placed, out_shardings=placed)
        .lower(*args)
        .compile()
        .as_text()
    )
    result = {
        "name": name,
        "seconds": round(time.monotonic() - started, 1),
        "launches": text.count('custom_call_target="tpu_custom_call"'),
        "copies": pool_copies(text, large),
    }
    print(json.dumps(result), flush=True)


def compaction(
    mesh: Mesh, name: str, *, layers: int, heads: int, width: int = 128, page_size: int = 16,
    batch: int = 64, num_path: int = 4,
) -> None:  # fmt: skip
    pool = (4099, page_size, heads, width)
    kv = tuple(abstract(pool, bf16) for _ in range(layers))
    table, path = abstract((batch, 520), i32), abstract((batch, num_path), i32)
    lens = abstract((batch,), i32)
    report(mesh, name, compact_paths, (kv, table, lens, path, lens), pool, donate=(0,))


def gathering(
    mesh: Mesh, name: str, *, nodes: int, width: int, batch: int = 64, num_path: int = 4,
    dtype: Any = bf16,
) -> None:  # fmt: skip
    def step(flat: jax.Array, ids: jax.Array, path: jax.Array, accepted: jax.Array) -> Any:
        # As a step has them: the flat rows of a forward.
        return gather_emitted(ids, flat.reshape(batch, nodes, width), path, accepted)

    ids, path = abstract((batch, nodes), i32), abstract((batch, num_path), i32)
    flat = abstract((batch * nodes, width), dtype)
    args = (flat, ids, path, abstract((batch,), i32))
    report(mesh, name, step, args, (batch, nodes, width))


def main(topology: str) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Parallel(tensor=len(devices)).mesh(list(devices))
    compact, gather = partial(compaction, mesh), partial(gathering, mesh)
    compact("8b tp4", layers=32, heads=4)
    compact("8b tp4, pages of 64, 8 levels", layers=32, heads=4, page_size=64, num_path=9)
    compact("8b tp4, one row", layers=32, heads=4, batch=1)
    compact("8b tp1, 256 rows", layers=32, heads=16, batch=256)
    compact("70b tp8", layers=80, heads=2)
    compact("copied: 64 lanes", layers=2, heads=4, width=64)
    gather("8b, tree of 16", nodes=16, width=3 * 4096)
    gather("8b, tree of 64", nodes=64, width=3 * 4096, num_path=9)
    gather("copied: an odd tree", nodes=15, width=3 * 4096, batch=1)
    gather("70b, tree of 16", nodes=16, width=3 * 8192)
    gather("8b, float32", nodes=16, width=3 * 4096, dtype=jnp.float32, batch=8)


if __name__ == "__main__":
    main(sys.argv[1])
