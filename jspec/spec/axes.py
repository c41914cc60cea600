"""Logical axes of weights, caches and batches; only this table maps them to the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Axis = Literal[
    "rank",
    "units",
    "embed",
    "heads",
    "kv_heads",
    "mlp",
    "experts",
    "experts_of_ranks",
    "expert_mlp",
    "vocab",
    "latent",
]
Axes = tuple[Axis | None, ...]  # one per dimension; None: replicated
MeshAxis = str | tuple[str, ...]  # several: their devices in row-major order

DATA, EXPERT, TENSOR = MESH = "data", "expert", "tensor"
MODEL = (EXPERT, TENSOR)  # the devices of one copy of the model; all of them are tensor parallel

MESH_AXES: Mapping[Axis, MeshAxis | None] = {
    "rank": DATA,  # of the packed batch and of a step's output, with one entry per data rank
    "units": DATA,  # slots and pages: those of rank 0, then of rank 1, ...; each with its dummy
    "experts": EXPERT,
    "experts_of_ranks": (DATA, EXPERT),  # of an MoE whose experts the data ranks share
    "expert_mlp": TENSOR,  # the inner width of an expert
    "heads": MODEL,
    "kv_heads": MODEL,
    "mlp": MODEL,
    "vocab": MODEL,
    "embed": None,
    "latent": None,
}


def mesh_axis(axis: Axis | None) -> MeshAxis | None:
    return None if axis is None else MESH_AXES[axis]
