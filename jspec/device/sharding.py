"""The device mesh, and how each array of the engine state is sharded over its `tensor` axis.

How a weight is sharded follows from its parameter table (models.placement). A whole step runs
inside one shard_map: every device executes the same program on its shard, and collectives are
written where they happen (layers/linear.py, sampling/).
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
    """Return the engine's mesh: all devices on the tensor axis; data and expert have size 1."""
    return Mesh(np.array(devices).reshape(1, 1, -1), (DATA_AXIS, EXPERT_AXIS, TENSOR_AXIS))


def _names(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in path]


def state_specs(state: Any) -> Any:
    """Return the PartitionSpec of every array of an EngineState."""

    def rule(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        for name in _names(path):
            if name in _STATE_RULES:
                return _STATE_RULES[name]
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(rule, state)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Return NamedShardings for a tree of PartitionSpecs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
