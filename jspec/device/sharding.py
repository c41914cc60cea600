"""One mesh, and one rule for every array of the state: how it is split over the `tensor` axis.

A weight's rule follows from its parameter table (models.placement).

A whole step runs inside one shard_map, so every device executes the same program on its shard and
the collectives are written out where they happen (layers/linear.py, sampling/).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA_AXIS, EXPERT_AXIS, TENSOR_AXIS = "data", "expert", "tensor"

_STATE_RULES: dict[str, PartitionSpec] = {
    "kv": PartitionSpec(None, None, TENSOR_AXIS, None),
    "draft_kv": PartitionSpec(None, None, TENSOR_AXIS, None),
    "output_counts": PartitionSpec(None, TENSOR_AXIS),
    "prompt_marks": PartitionSpec(None, TENSOR_AXIS),
}


def make_mesh(devices: list[jax.Device]) -> Mesh:
    """The engine's mesh: all devices on the tensor axis; data and expert are 1 so far."""
    return Mesh(np.array(devices).reshape(1, 1, -1), (DATA_AXIS, EXPERT_AXIS, TENSOR_AXIS))


def _names(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in path]


def state_specs(state: Any) -> Any:
    """The PartitionSpec of every array of an EngineState."""

    def rule(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        for name in _names(path):
            if name in _STATE_RULES:
                return _STATE_RULES[name]
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(rule, state)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """NamedShardings for a tree of PartitionSpecs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
