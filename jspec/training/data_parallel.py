"""Where a run's arrays live: batches are split over the data axis, all else is whole there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.device.sharding import DATA_AXIS, EXPERT_AXIS, TENSOR_AXIS
from jspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """One mesh with its devices on the data axis."""

    mesh: Mesh

    @classmethod
    def over(cls, devices: list[jax.Device], *, batch_size: int) -> Placement:
        """Raises ConfigError for a batch that the devices cannot share evenly."""
        if batch_size % len(devices):
            raise ConfigError(
                f"batch_size is {batch_size}; expected a multiple of {len(devices)}, the devices "
                "that share a batch"
            )
        axes = (DATA_AXIS, EXPERT_AXIS, TENSOR_AXIS)
        return cls(Mesh(np.array(devices).reshape(-1, 1, 1), axes))

    @classmethod
    def single(cls) -> Placement:
        return cls.over(jax.devices()[:1], batch_size=1)

    def batch(self, tree: Any) -> Any:
        """Arrays [B, ...], B split over the data axis."""
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec(DATA_AXIS)))

    def whole(self, tree: Any) -> Any:
        """On every device."""
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))
