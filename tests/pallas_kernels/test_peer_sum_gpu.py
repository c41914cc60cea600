"""Sums over GPUs through each other's memory: the order of turns, the target's code, real GPUs."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspec.device.parallel import Parallel
from jspec.device.peers import TURNS, Area, Exchange
from jspec.pallas_kernels.add_norm.gpu import add_and_norm
from jspec.pallas_kernels.peer_sum.gpu import gather_over_peers, sum_add_and_norm, sum_over_peers
from jspec.spec.axes import MESH
from tests.pallas_kernels.ahead_of_time import needs_cuda_compiler, output_of
from tests.pallas_kernels.chips import has_hopper

EACH = PartitionSpec(MESH)


class Device:
    """One device of a model of the kernel's turns, which does one access at a time."""

    def __init__(self, number: int, num_devices: int) -> None:
        self.number = number
        self.places: dict[tuple[int, int], int] = {}  # (turn, sender): the number that arrived
        self.sums: list[int] = []
        self.todo = self._kernels(num_devices)

    def _kernels(self, num_devices: int) -> Any:
        while True:
            count = len(self.sums)
            turn = count % TURNS
            for peer in random.sample(range(num_devices), num_devices):
                yield "send", peer, turn, 100 * count + self.number
            for peer in range(num_devices):
                yield "empty", peer, (turn - 1) % TURNS, None
            while len([key for key in self.places if key[0] == turn]) < num_devices:
                yield "wait", None, None, None
            self.sums.append(sum(self.places[turn, peer] for peer in range(num_devices)))


@pytest.mark.parametrize("num_devices", [2, 4])
def test_turns_mix_no_sums(num_devices: int) -> None:
    """In any order of accesses a place is empty when a number comes, and each sum is of one turn.

    A device is given up to 30 times the accesses of another, and runs as far ahead as it can.
    """
    for seed in range(40):
        random.seed(seed)
        devices = [Device(i, num_devices) for i in range(num_devices)]
        favour = [random.choice([1, 3, 30]) for _ in devices]
        for _ in range(9000):
            (device,) = random.choices(devices, favour)
            kind, peer, turn, number = next(device.todo)
            if kind == "send":
                target = devices[peer].places
                assert (turn, device.number) not in target
                target[turn, device.number] = number
            elif kind == "empty":
                device.places.pop((turn, peer), None)
        for device in devices:
            wanted = [
                sum(100 * count + i for i in range(num_devices))
                for count in range(len(device.sums))
            ]
            assert device.sums == wanted
        assert min(len(device.sums) for device in devices) > 5


@needs_cuda_compiler
@pytest.mark.slow
def test_it_compiles_for_hopper() -> None:
    lines = output_of("tests.pallas_kernels.gpu_peer_compile").splitlines()
    assert lines == ["2 1 4096 3", "2 256 2880 3", "4 4 8192 3", "4 1024 8192 3"]


@pytest.mark.skipif(
    not has_hopper() or len(jax.devices()) < 2, reason="needs two Hopper GPUs of one host"
)
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (64, 4096), (256, 2880)])
def test_all_devices_have_the_exact_sum(rows: int, width: int) -> None:
    num = len(jax.devices())
    mesh = Parallel(tensor=num).mesh(jax.devices())
    exchange = Exchange(mesh, width=width)  # keeps the buffers
    peers = exchange.renew()
    x = jax.random.normal(jax.random.key(0), (num, rows, width), jnp.bfloat16)
    scale = jax.random.normal(jax.random.key(1), (width,), jnp.bfloat16)

    def step(x: jax.Array, scale: jax.Array, peers: Any) -> Any:
        x = x[0]
        total = sum_over_peers(x, peers)
        both = sum_add_and_norm(x, x, scale, peers, eps=1e-5)
        words = jax.lax.bitcast_convert_type(x[:, :2], jnp.int32)
        found = gather_over_peers(words, peers.of(Area.CHOICE))
        apart = add_and_norm(x, total, scale, eps=1e-5)
        return jnp.stack([total, *both, *apart])[None], found[None]

    places = (EACH, PartitionSpec(), PartitionSpec(*MESH))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=places, out_specs=EACH, check_vma=False)
    given = [
        jax.device_put(array, NamedSharding(mesh, place))
        for array, place in zip((x, scale, peers), places, strict=True)
    ]
    wide = np.asarray(x, np.float32)
    wanted = np.asarray(jnp.asarray(np.add.reduce(wide, 0), jnp.bfloat16), np.float32)
    for _ in range(7):
        sums, found = (np.asarray(each) for each in jax.jit(mapped)(*given))
        total, added, normed, added_apart, normed_apart = sums.astype(np.float32).swapaxes(0, 1)
        np.testing.assert_array_equal(total, np.broadcast_to(wanted, total.shape))
        np.testing.assert_array_equal(added, added_apart)
        np.testing.assert_allclose(normed, normed_apart, rtol=2**-7)
        words = np.asarray(jax.lax.bitcast_convert_type(x[:, :, :2], jnp.int32))
        np.testing.assert_array_equal(found, np.broadcast_to(words, found.shape))
