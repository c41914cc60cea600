"""Devices of several hosts: placing each process's own shards, and agreeing on free memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.layout import Format
from jax.sharding import Mesh

from jspec.errors import ConfigError
from jspec.spec.axes import TENSOR

KIB = 1 << 10  # arrays of 32 bits are gathered


def is_one_process(mesh: Mesh) -> bool:
    return len(mesh.local_devices) == mesh.size


def check_served(mesh: Mesh) -> None:
    """Raise ConfigError for a mesh over several hosts that no engine supports."""
    for name, degree in mesh.shape.items():
        if name != TENSOR and degree > 1 and not is_one_process(mesh):
            raise ConfigError(
                f"{name} is {degree} on {jax.process_count()} hosts; expected 1: several hosts "
                "share a model over tensor alone"
            )


def own_shards(mesh: Mesh) -> range | None:
    """Return the shards of `tensor` on this process's devices; None on a single host."""
    if is_one_process(mesh):
        return None
    axis = mesh.axis_names.index(TENSOR)
    is_own = np.vectorize(lambda x: x.process_index == jax.process_index())(mesh.devices)
    found = np.argwhere(is_own)[:, axis]
    return range(int(found.min()), int(found.max()) + 1)


def put(tree: Any, places: Any) -> Any:
    """Put arrays of this process at `places`: shardings or Formats, a prefix of their tree. Every
    host must pass the same values; unlike by `jax.device_put`, nothing is sent to compare them."""
    if all(_sharding(place).is_fully_addressable for place in jax.tree.leaves(places)):
        return jax.device_put(tree, places)

    def put_own(array: Any, place: Any) -> jax.Array:
        if isinstance(array, jax.Array) and array.sharding == _sharding(place):
            return array
        return jax.make_array_from_callback(array.shape, place, lambda index: array[index])

    return jax.tree.map(
        lambda place, part: jax.tree.map(lambda x: put_own(x, place), part), places, tree
    )


def made(make: Callable[[], Any], places_of: Callable[[Any], Any]) -> Any:
    """Return the arrays of `make`, created sharded, since no single device could hold all."""
    return jax.jit(make, out_shardings=places_of(jax.eval_shape(make)))()


def _sharding(place: Any) -> Any:
    return place.sharding if isinstance(place, Format) else place


@dataclass(frozen=True, slots=True)
class LikeDevice:
    """A stand-in for the device with the least free memory of all hosts."""

    platform: str
    stats: dict[str, int] | None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def memories(devices: Sequence[jax.Device]) -> Sequence[Any]:
    """Return devices whose memory every host sees alike. It is a collective over the hosts."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    if len(own) == len(devices):
        return devices
    found = [stats for device in own if (stats := device.memory_stats())]
    if not found:
        return [LikeDevice(own[0].platform, None)] * len(devices)
    names = ("bytes_limit", "bytes_in_use")
    pairs = np.array([[stats.get(name, 0) // KIB for name in names] for stats in found], np.int32)
    gathered = np.asarray(multihost_utils.process_allgather(pairs)).reshape(-1, len(names))
    limit, in_use = min(gathered.tolist(), key=lambda pair: int(pair[0]) - int(pair[1]))
    stats = {"bytes_limit": limit * KIB, "bytes_in_use": in_use * KIB}
    return [LikeDevice(own[0].platform, stats)] * len(devices)
