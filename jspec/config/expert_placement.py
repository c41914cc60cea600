"""Maps from physical experts on devices to the model's experts, and their balance.

A layer's map has the logical expert of each physical one, in the order of the devices, which all
have the same number. A logical expert with several physical ones is replicated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.errors import ConfigError, reason_of, shown
from jspec.files.json_files import json_fault

LayerMap = tuple[int, ...]
ExpertMap = tuple[LayerMap, ...]  # of each layer; () for a layer without experts
TRIVIAL = "trivial"
PLACED, COUNTED = "physical_to_logical_map", "logical_count"  # SGLang's names


def expert_map(args: Any, experts: Sequence[int]) -> ExpertMap:
    """Return the map that `EngineArgs` give. experts: of each layer, 0 for one without.

    A file has a map, or the counts from which a balanced one is made. Raises ConfigError.
    """
    spares, location = args.ep_num_redundant_experts, args.init_expert_location
    if location == TRIVIAL:
        return tuple(in_order(count, spares) if count else () for count in experts)
    kind, rows = _read(Path(location), num_layers=len(experts))
    found: list[LayerMap] = []
    for layer, (count, row) in enumerate(zip(experts, rows, strict=True)):
        if not count:
            found.append(())
            continue
        where = f"init_expert_location {location}: {kind}[{layer}]"
        if kind == PLACED:
            found.append(_checked_map(row, count, spares, where))
        else:
            _check_counts(row, count, where)
            found.append(balanced(row, num_spares=spares, num_devices=args.ep_size))
    return tuple(found)


def in_order(num_experts: int, num_spares: int) -> LayerMap:
    """Return the model's order, and after it the first experts again."""
    return tuple(i % num_experts for i in range(num_experts + num_spares))


def balanced(counts: Sequence[float], *, num_spares: int, num_devices: int) -> LayerMap:
    """Return a map with the most used experts replicated and even loads of the devices.

    counts: use of each expert. num_devices divides the number of experts plus num_spares. The
    devices' loads differ by at most the load of one copy.

    In:  counts [6 1 1 2], 2 spares, 2 devices (copies: 0 0 0 with 2 each, 3 with 2, 1 and 2 with 1)
    Out: [0 0 1 0 3 2]
    """
    copies = [1] * len(counts)
    for _ in range(num_spares):
        most = max(range(len(counts)), key=lambda x: (counts[x] / copies[x], -copies[x], -x))
        copies[most] += 1
    loads = {x: counts[x] / copies[x] for x in range(len(counts))}
    given = [x for x in sorted(loads, key=lambda x: (-loads[x], x)) for _ in range(copies[x])]
    devices: list[list[int]] = [[] for _ in range(num_devices)]
    sums = [0.0] * num_devices
    for first in range(0, len(given), num_devices):  # one to each device, the largest to the least
        order = sorted(range(num_devices), key=lambda device: (sums[device], device))
        for device, expert in zip(order, given[first : first + num_devices], strict=True):
            devices[device].append(expert)
            sums[device] += loads[expert]
    return tuple(expert for device in devices for expert in device)


def balancedness(counts: Any, experts: ExpertMap, *, num_devices: int) -> Mapping[int, float]:
    """Return the mean load of the devices over the largest, by layer with any tokens.

    counts: [L, X] tokens of each logical expert, shared equally by its copies.
    """
    found = {}
    for layer, (of_layer, placed) in enumerate(zip(counts, experts, strict=True)):
        if placed and max(loads := device_loads(of_layer, placed, num_devices)) > 0:
            found[layer] = sum(loads) / len(loads) / max(loads)
    return found


def device_loads(counts: Any, placed: LayerMap, num_devices: int) -> list[float]:
    """Return each device's share of a layer's tokens. counts: [X], of each logical expert."""
    each = len(placed) // num_devices
    return [
        sum(float(counts[x]) / placed.count(x) for x in placed[first : first + each])
        for first in range(0, len(placed), each)
    ]


def _read(path: Path, *, num_layers: int) -> tuple[str, list[Any]]:
    name = f"init_expert_location {path}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name}: {reason_of(error)}; expected {TRIVIAL} or a file") from error
    except ValueError as error:
        raise ConfigError(f"{name} {json_fault(error)}") from error
    kinds = [kind for kind in (PLACED, COUNTED) if isinstance(found, dict) and kind in found]
    if len(kinds) != 1:
        raise ConfigError(f"{name}: expected an object with either {PLACED} or {COUNTED}")
    rows = found[kinds[0]]
    if not isinstance(rows, list) or len(rows) != num_layers:
        count = f"{len(rows)} rows" if isinstance(rows, list) else shown(rows)
        raise ConfigError(f"{name}: {kinds[0]} has {count}; expected {num_layers}, one a layer")
    return kinds[0], rows


def _checked_map(row: Any, num_experts: int, num_spares: int, where: str) -> LayerMap:
    count = num_experts + num_spares
    is_right = isinstance(row, list) and all(type(x) is int and 0 <= x < num_experts for x in row)
    if not is_right or len(row) != count:
        raise ConfigError(
            f"{where} is {shown(row)}; expected {count} of the experts 0 to {num_experts - 1}, "
            f"with ep_num_redundant_experts {num_spares}"
        )
    missing = sorted({*range(num_experts)} - {*row})
    if missing:
        raise ConfigError(f"{where} lacks expert {missing[0]}; expected each at least once")
    return tuple(row)


def _check_counts(row: Any, num_experts: int, where: str) -> None:
    is_right = isinstance(row, list) and all(
        type(x) in (int, float) and 0 <= x < float("inf") for x in row
    )
    if not is_right or len(row) != num_experts:
        raise ConfigError(
            f"{where} is {shown(row)}; expected {num_experts} counts, one for each expert"
        )
