"""The degrees of parallelism, and the mesh and partition specs that follow from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.errors import ConfigError
from jspec.spec.axes import MESH, Axes, Axis, mesh_axis


@dataclass(frozen=True, slots=True)
class Parallel:
    """The degree of each mesh axis, and the number of hosts that the devices belong to."""

    data: int = 1
    expert: int = 1
    tensor: int = 1
    hosts: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; expected at least 1")
        if math.prod(self._degrees) % self.hosts:
            raise ConfigError(
                f"hosts is {self.hosts}; expected a divisor of {math.prod(self._degrees)}, the "
                "number of devices"
            )

    @classmethod
    def of(cls, mesh: Mesh) -> Parallel:
        return cls(**mesh.shape)

    @property
    def _degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in MESH)

    @property
    def model(self) -> int:
        """The number of devices of one copy of the model."""
        return self.expert * self.tensor

    def shards(self, axis: Axis) -> int:
        found = mesh_axis(axis)
        names = (found,) if isinstance(found, str) else found or ()
        return math.prod(int(getattr(self, name)) for name in names)

    def mesh(self, devices: list[jax.Device]) -> Mesh:
        """Return the mesh. Raises ConfigError if the number of devices does not fit the degrees."""
        if len(devices) != math.prod(self._degrees):
            degrees = " * ".join(f"{name} {getattr(self, name)}" for name in MESH)
            raise ConfigError(f"devices is {len(devices)}; expected {degrees}")
        return Mesh(np.array(devices).reshape(self._degrees), MESH)

    def check_served(self) -> None:
        """Raise ConfigError for a degree that no engine supports."""
        if self.hosts > 1:
            raise ConfigError(f"hosts is {self.hosts}; expected 1: an engine runs on one host")


def devices_of_rank(mesh: Mesh) -> list[jax.Device]:
    """Return the devices of the first data rank, to which the other ranks' are alike."""
    return list(mesh.devices[0].flat)


def partition_spec(axes: Axes) -> PartitionSpec:
    return PartitionSpec(*map(mesh_axis, axes))


def shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
