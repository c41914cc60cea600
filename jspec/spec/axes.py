"""Logical axes of weights, caches and batches; only this table maps them to the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Axis = Literal["rank", "units", "embed", "heads", "kv_heads", "mlp", "experts", "vocab", "latent"]
Axes = tuple[Axis | None, ...]  # one a dimension; None: replicated

DATA, EXPERT, TENSOR = MESH = "data", "expert", "tensor"

MESH_AXES: Mapping[Axis, str | None] = {
    "rank": DATA,  # of the packed batch and of a step's output: one entry a data rank
    "units": DATA,  # slots and pages: those of rank 0, then of rank 1, ...; each with its dummy
    "experts": EXPERT,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "embed": None,
    "latent": None,
}


def mesh_axis(axis: Axis | None) -> str | None:
    return None if axis is None else MESH_AXES[axis]
