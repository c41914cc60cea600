"""Buffers in the memory of each GPU of a host that the other GPUs write, to exchange rows."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from dataclasses import replace
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.device.pytree import pytree, static

TURNS = 3  # copies of a row's place, used in rotation
NOTHING = -1  # a word where nothing has arrived: two bfloat16 NaNs
LEAST_WIDTH = 256  # of a row: eight values for each thread of a warp
MOST_DEVICES = 4  # sums over more devices are untested
HEADER = 3  # words of a table before the addresses: this device's index, its address


class Area(IntEnum):
    """Parts of a buffer. Exchanges in one area must follow one another in a step."""

    TARGET = 0  # sums along the target's residual stream
    DRAFT = 1
    CHOICE = 2  # the best of each shard of a vocabulary
    MASS = 3  # the shards' largest scores and sums, which not every step needs

    @property
    def num_rows(self) -> int:
        return {Area.TARGET: 1024, Area.DRAFT: 512}.get(self, 64)


@pytree
class Peers:
    """The addresses of the buffers of a tensor axis.

    An area of a buffer:
        [a word for each row: its last turn | turn 0: rows from device 0, from device 1, ... |
         turn 1: the same | turn 2: the same]
    """

    table: Any  # i32[HEADER + 2 * devices]: index, own address, addresses, low words first
    width: int = static()  # capacity of a row, in values of 2 bytes; a power of two
    area: Area = static(default=Area.TARGET)

    @property
    def num_devices(self) -> int:
        return int(self.table.size - HEADER) // 2

    @property
    def first_byte(self) -> int:
        return buffer_bytes(
            [area for area in Area if area < self.area], self.num_devices, self.width
        )

    @property
    def most_words(self) -> int:
        return self.area.num_rows * self.width // 2

    def of(self, area: Area) -> Peers:
        return replace(self, area=area)

    def serve(self, x: jax.Array) -> bool:
        """Return whether the kernel can add arrays of this shape and dtype."""
        if x.ndim != 2 or x.dtype != jnp.bfloat16:
            return False
        return x.shape[0] <= self.area.num_rows and LEAST_WIDTH <= x.shape[1] <= self.width


def buffer_bytes(areas: Iterable[Area], num_devices: int, width: int) -> int:
    return sum(area.num_rows for area in areas) * (4 + TURNS * num_devices * 2 * width)


class Exchange:
    """Owns one buffer per device while programs that have its address may run."""

    def __init__(self, mesh: Mesh, *, width: int) -> None:
        self._mesh = mesh
        self._width = 1 << (width - 1).bit_length()  # a kernel's threads write up to a power of two
        self._buffers: jax.Array | None = None

    @classmethod
    def of(cls, mesh: Mesh, *, width: int) -> Exchange | None:
        """Return an exchange, or None for meshes and devices that no kernel serves."""
        devices = list(mesh.devices.flat)
        if not 1 < len(devices) <= MOST_DEVICES or len(devices) != mesh.devices.shape[-1]:
            return None
        if not have_access(devices):
            return None
        return cls(mesh, width=width)

    @property
    def abstract(self) -> Peers:
        shape = self._mesh.devices.shape
        table = jax.ShapeDtypeStruct((*shape, HEADER + 2 * shape[-1]), jnp.int32)
        return Peers(table=table, width=self._width)

    def renew(self) -> Peers:
        """Make empty buffers and drop the old ones: after a failed step their counters differ."""
        shape = self._mesh.devices.shape
        placed = NamedSharding(self._mesh, PartitionSpec(*self._mesh.axis_names))
        words = (*shape, buffer_bytes(Area, shape[-1], self._width) // 4)
        self._buffers = None  # free them before the next ones are allocated
        empty = jax.jit(lambda: jnp.full(words, NOTHING, jnp.int32), out_shardings=placed)
        self._buffers = jax.block_until_ready(empty())
        at = {x.device: x.data.unsafe_buffer_pointer() for x in self._buffers.addressable_shards}
        tables = np.zeros(self.abstract.table.shape, np.int32)
        for index in np.ndindex(*shape):
            group = [at[device] for device in self._mesh.devices[index[:-1]]]
            addresses = np.array([group[index[-1]], *group], np.uint64)
            tables[index] = [index[-1], *addresses.view(np.int32)]  # little-endian
        return Peers(table=jnp.asarray(tables), width=self._width)


def have_access(devices: list[jax.Device]) -> bool:
    """Return whether these are GPUs of this process that can write to each other's memory."""
    if any(x.platform != "gpu" or x.process_index != jax.process_index() for x in devices):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    ordinals = [int(device.local_hardware_id) for device in devices]
    may = ctypes.c_int(0)
    for one, other in itertools.permutations(ordinals, 2):
        failed = driver.cuDeviceCanAccessPeer(ctypes.byref(may), one, other)
        if failed or not may.value:
            return False
    return True
