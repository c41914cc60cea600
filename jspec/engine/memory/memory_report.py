"""Device memory by use, and a check that the programs' scratch fits into the rest."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jspec.engine.memory.device_memory import SHARE_VARIABLE, MemoryDevice, gib, least_memory
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.steps.table import STEPS
from jspec.errors import ConfigError


def bytes_each(arrays: Any) -> int:
    """Return the bytes of a tree of arrays on the device that has most of them."""
    by_device: dict[Any, int] = {}
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            by_device[shard.device] = by_device.get(shard.device, 0) + shard.data.nbytes
    return max(by_device.values(), default=0)


def held_bytes(
    params: Mapping[str, Any], state: Any = None, *, shares: Collection[str]
) -> dict[str, int]:
    """Return bytes per device of each model's weights and, with a state, of its parts."""
    own = {name: part for name, part in params["draft"].items() if name not in shares}
    held = {"the target's weights": bytes_each(params.get("target"))}
    held["the draft's weights"] = bytes_each(own)
    if state is not None:
        held["KV pools"] = bytes_each((state.kv, state.draft_kv))
        held["snapshots of recurrent states"] = bytes_each(state.snapshots)
        held["other state"] = bytes_each((state.draft, state.rows))
    return held


def scratch_bytes(executables: Mapping[ProgramKey, Any]) -> dict[ProgramKey, int]:
    """Return each program's scratch bytes per device, where the backend reports them."""
    found = {}
    for key, executable in executables.items():
        try:
            analysis = executable.memory_analysis()
        except jax.errors.JaxRuntimeError:  # only needed for a message: the program may still run
            continue
        if analysis is not None:
            found[key] = int(analysis.temp_size_in_bytes)
    return found


def check_scratch_fits(
    devices: Sequence[MemoryDevice],
    scratch: Mapping[ProgramKey, int],
    *,
    held: Mapping[str, int],
    fraction: float,
) -> None:
    """Raise ConfigError if a program's scratch exceeds the memory left by weights and pools."""
    key = max(scratch, key=lambda key: scratch[key], default=None)
    memory = least_memory(devices)
    if key is None or memory is None or scratch[key] <= memory.free:
        return
    gc.collect()  # garbage must not count
    memory = least_memory(devices)
    if memory is None or scratch[key] <= memory.free:
        return
    missing = scratch[key] - memory.free
    share = int(100 * (memory.limit * fraction - missing) / memory.limit) / 100
    smaller = STEPS[key.kind].smaller
    fits = [f"{smaller} below {key.bucket}", f"tp_size above {len(devices)}"]
    if missing < held.get("KV pools", 0):
        fits.insert(0, f"mem_fraction_static of at most {share:.2f} (or fewer max_total_tokens)")
    raise ConfigError(
        f"the step {key} takes {gib(scratch[key])} of scratch on each device, and "
        f"{gib(max(0, memory.free))} of the {gib(memory.limit)} that jax may use are free after "
        f"{listed(held)}; expected {', '.join(fits)}, or a larger {SHARE_VARIABLE}"
    )


def listed(held: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({gib(size)})" for name, size in held.items() if size)
