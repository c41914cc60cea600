"""Which experts each device has: maps from physical experts to the model's, and their balance.

A layer's map has the logical expert of each physical one, in the order of the devices, which have
equally many. A logical expert with several physical ones is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LayerMap = tuple[int, ...]
ExpertMap = tuple[LayerMap, ...]  # of each layer; () for a layer without experts


def balancedness(counts: Any, expert_map: ExpertMap, *, num_devices: int) -> Mapping[int, float]:
    """Return the mean load of the devices over the largest, by layer with any tokens.

    counts: [L, X] tokens of each logical expert, shared equally by its copies.
    """
    found = {}
    for layer, (of_layer, experts) in enumerate(zip(counts, expert_map, strict=True)):
        if experts and (loads := device_loads(of_layer, experts, num_devices)) and max(loads) > 0:
            found[layer] = sum(loads) / len(loads) / max(loads)
    return found


def device_loads(counts: Any, experts: LayerMap, num_devices: int) -> list[float]:
    """Return each device's share of a layer's tokens. counts: [X], of each logical expert."""
    each = len(experts) // num_devices
    return [
        sum(float(counts[x]) / experts.count(x) for x in experts[first : first + each])
        for first in range(0, len(experts), each)
    ]


def expert_map(args: Any, experts: Sequence[int]) -> ExpertMap:
    """Return the map that `EngineArgs` give. experts: number of each layer's."""
    del args
    return tuple(tuple(range(count)) for count in experts)
