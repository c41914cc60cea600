"""One mesh, and one rule for every array: how it is split over the `tensor` axis.

A whole step runs inside one shard_map, so every device executes the same program on its shard and
the collectives are written out where they happen (layers/linear.py, sampling/).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TENSOR_AXIS = "tensor"

# Last two names of a parameter's path -> how it is split. Whatever is not listed is replicated.
_PARAM_RULES: dict[tuple[str, str], PartitionSpec] = {
    ("qkv", "kernel"): PartitionSpec(None, TENSOR_AXIS),
    ("qkv", "bias"): PartitionSpec(TENSOR_AXIS),
    ("out", "kernel"): PartitionSpec(TENSOR_AXIS, None),
    ("gate_up", "kernel"): PartitionSpec(None, TENSOR_AXIS),
    ("down", "kernel"): PartitionSpec(TENSOR_AXIS, None),
    ("lm_head", "kernel"): PartitionSpec(None, TENSOR_AXIS),
    ("draft", "draft_ids"): PartitionSpec(TENSOR_AXIS),
}
# Weights that the Hopper kernels read along their inputs. Seen as [in, out] everywhere; there their
# memory holds [out, in], so that the instruction takes a tile of any multiple of 8 columns.
_BY_COLUMNS = {("gate_up", "kernel")}
_STATE_RULES: dict[str, PartitionSpec] = {
    "kv": PartitionSpec(None, None, TENSOR_AXIS, None),
    "draft_kv": PartitionSpec(None, None, TENSOR_AXIS, None),
    "output_counts": PartitionSpec(None, TENSOR_AXIS),
}


def make_mesh(devices: list[jax.Device]) -> Mesh:
    """The engine's mesh: all devices on the tensor axis."""
    return Mesh(np.array(devices), (TENSOR_AXIS,))


def _names(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in path]


def param_specs(params: Any) -> Any:
    """The PartitionSpec of every array of {"target": ..., "draft": ...}."""

    def rule(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        names = _names(path)
        return _PARAM_RULES.get((names[-2], names[-1]), PartitionSpec())

    return jax.tree_util.tree_map_with_path(rule, params)


def param_places(mesh: Mesh, params: Any, *, by_columns: bool) -> Any:
    """Where every array of {"target": ..., "draft": ...} lives: for jax.device_put and jax.jit.

    by_columns: for a backend that reads some weights along their inputs (Backend "gpu"); those
    get a Format, which orders memory and leaves shapes alone.
    """

    def place(path: tuple[Any, ...], spec: PartitionSpec) -> NamedSharding | Format:
        names, split = _names(path), NamedSharding(mesh, spec)
        turned = by_columns and (names[-2], names[-1]) in _BY_COLUMNS
        return Format(Layout(major_to_minor=(1, 0)), split) if turned else split

    specs = param_specs(params)
    return jax.tree_util.tree_map_with_path(
        place, specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


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
