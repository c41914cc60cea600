"""Compile sums and gathers over GPUs' own memory for two and four absent H200s.

Run by test_peer_sum_gpu.py in a separate process. Needs the jax-cuda13 plugin and ptxas. Prints a
line per case: devices, rows, width, launches, and the names of other collectives, of which there
should be none.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jspec.device.parallel import Parallel
from jspec.device.peers import Area, Exchange
from jspec.pallas_kernels.peer_sum.gpu import gather_over_peers, sum_add_and_norm, sum_over_peers
from jspec.spec.axes import MESH
from tests.pallas_kernels.gpu_kernel_compile import H200

abstract = jax.ShapeDtypeStruct


def report(num_devices: int, rows: int, width: int) -> None:
    devices = topologies.get_topology_desc(
        "h200", "cuda", target_config=H200, topology=f"1x1x{num_devices}"
    ).devices
    mesh = Parallel(tensor=num_devices).mesh(list(devices))
    peers = Exchange(mesh, width=width).abstract
    whole, split = PartitionSpec(), PartitionSpec(*MESH)

    def step(x: jax.Array, scale: jax.Array, peers: Any) -> Any:
        total, normed = sum_add_and_norm(x, x, scale, peers, eps=1e-5)
        words = jax.lax.bitcast_convert_type(normed[:, :2], jnp.int32)
        return sum_over_peers(total, peers), gather_over_peers(words, peers.of(Area.CHOICE))

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(whole, whole, split), out_specs=whole, check_vma=False
    )
    places = [NamedSharding(mesh, spec) for spec in (whole, whole, split)]
    compiled = jax.jit(mapped, in_shardings=tuple(places)).lower(
        abstract((rows, width), jnp.bfloat16), abstract((width,), jnp.bfloat16), peers
    )
    text = compiled.compile().as_text() or ""
    launches = len(re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton"', text))
    others = sorted(set(re.findall(r"all-(?:reduce|gather)", text)))
    print(num_devices, rows, width, launches, *others)


if __name__ == "__main__":
    report(2, 1, 4096)
    report(2, 256, 2880)
    report(4, 4, 8192)
    report(4, 1024, 8192)
