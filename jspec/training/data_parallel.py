"""Placement of a run's arrays: batches are sharded over the data axis, all else is replicated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.device.parallel import Parallel, partition_spec
from jspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    mesh: Mesh

    @classmethod
    def over(cls, devices: list[jax.Device], *, batch_size: int) -> Placement:
        """Return the placement over `devices`. Raises ConfigError if they do not divide a batch."""
        if batch_size % len(devices):
            raise ConfigError(
                f"batch_size is {batch_size}; expected a multiple of {len(devices)}, the devices "
                "that share a batch"
            )
        return cls(Parallel(data=len(devices)).mesh(devices))

    @classmethod
    def single(cls) -> Placement:
        return cls.over(jax.devices()[:1], batch_size=1)

    def batch(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, partition_spec(("rank",))))

    def whole(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))
