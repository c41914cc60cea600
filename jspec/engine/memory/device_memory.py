"""Device memory. Imports no jax, since a GPU's memory share must be set before jax starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jspec.errors import ConfigError

# jaxlib reads these when its GPU client starts. The second is the older name; setting both is an
# error.
SHARE_VARIABLE, OLD_SHARE_VARIABLE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
OTHER_VARIABLES = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")
JAX_SHARE = 0.75  # of a GPU's memory, unless a variable sets it
# The rest is for the driver and libraries: contexts, CUDA graphs, workspaces, NCCL buffers.
SERVER_SHARE = 0.95
GIB = 1 << 30


class MemoryDevice(Protocol):
    @property
    def platform(self) -> str: ...

    def memory_stats(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device; `limit` is what jax may use."""

    limit: int
    in_use: int

    @property
    def free(self) -> int:
        return self.limit - self.in_use

    def beside_weights(self, fraction: float) -> int:
        """Return the bytes left of `fraction` of the limit; negative if more is in use."""
        return int(self.limit * fraction) - self.in_use


def share_for_server(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a server its share of a GPU; set them before jax starts."""
    names = (SHARE_VARIABLE, OLD_SHARE_VARIABLE, *OTHER_VARIABLES)
    return {} if any(environ.get(name) for name in names) else {SHARE_VARIABLE: str(SERVER_SHARE)}


def least_memory(devices: Sequence[MemoryDevice]) -> DeviceMemory | None:
    """Return the device with the least free memory; None if one has no limit, like a CPU."""
    found = []
    for device in devices:
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        found.append(DeviceMemory(int(stats["bytes_limit"]), int(stats.get("bytes_in_use", 0))))
    return min(found, key=lambda memory: memory.free)


def pool_bytes(devices: Sequence[MemoryDevice], fraction: float) -> int | None:
    """Return the bytes for the KV pool on all devices together, after the weights are loaded."""
    # The parts are equal, so the device with the least memory left determines them.
    rooms = []
    for device in devices:
        memory = least_memory([device])
        if memory is None:
            return None
        rooms.append(memory.beside_weights(fraction))
    return max(0, min(rooms)) * len(devices)


def unused_notice(devices: Sequence[MemoryDevice], environ: Mapping[str, str]) -> str | None:
    """Return a hint if jax took its default share of GPUs; None if a share was chosen."""
    memory = least_memory(devices)
    chosen = any(environ.get(name) for name in (SHARE_VARIABLE, OLD_SHARE_VARIABLE))
    if memory is None or chosen or devices[0].platform != "gpu":
        return None
    card = memory.limit / JAX_SHARE
    return (
        f"jax may use {gib(memory.limit)} of each GPU, its default share of {JAX_SHARE:.0%}; about "
        f"{gib(card * SERVER_SHARE - memory.limit)} more are available for KV with "
        f"{SHARE_VARIABLE}={SERVER_SHARE} in the environment before jax starts"
    )


def check_weights_fit(devices: Sequence[MemoryDevice], num_bytes: int, what: str) -> None:
    """Raise ConfigError if num_bytes over all devices, split equally, exceed the free memory."""
    memory = least_memory(devices)
    each = math.ceil(num_bytes / len(devices))
    if memory is None or each <= memory.free:
        return
    needed = math.ceil(num_bytes / max(1, memory.free))
    raise ConfigError(
        f"{what} takes at least {gib(each)} on each of {len(devices)} devices (tp_size), and "
        f"{gib(memory.free)} of the {gib(memory.limit)} that jax may use are free; expected a "
        f"smaller model, tp_size of at least {needed}, or a larger {SHARE_VARIABLE}"
    )


def check_pool_fits(
    devices: Sequence[MemoryDevice], *, tokens: int, num_bytes: int, fitting: int
) -> None:
    """Raise ConfigError for a pool of `tokens` where `fitting` fit mem_fraction_static."""
    memory = least_memory(devices)
    each = math.ceil(num_bytes / len(devices))
    if memory is None or each <= memory.free:
        return
    raise ConfigError(
        f"max_total_tokens {tokens} takes {gib(each)} on each device, and {gib(memory.free)} of "
        f"the {gib(memory.limit)} that jax may use are free after the weights; expected at most "
        f"{fitting} (which mem_fraction_static has room for), or a larger tp_size"
    )


def no_pool_error(
    devices: Sequence[MemoryDevice],
    fraction: float,
    *,
    num_bytes: int,
    target_bytes: int = 0,
    draft_bytes: int = 0,
) -> ConfigError:
    """Return the error for a smallest pool (num_bytes on all devices) that does not fit."""
    found = [least_memory([device]) for device in devices]
    known = [memory for memory in found if memory is not None]
    if not known:
        return ConfigError(
            f"the smallest KV pool takes {gib(num_bytes)}, more than the default without a known "
            f"memory limit; expected a smaller page_size, or max_total_tokens"
        )
    memory = min(known, key=lambda memory: memory.beside_weights(fraction))
    each = math.ceil(num_bytes / len(devices))
    share = math.ceil(100 * (memory.in_use + each) / memory.limit) / 100
    larger = f"mem_fraction_static of at least {share:.2f}, " if share <= 1 else ""
    more = math.ceil(len(devices) * (memory.in_use + each) / (memory.limit * fraction))
    rest = max(0, memory.in_use - target_bytes - draft_bytes)
    of_draft = f", the draft's {gib(draft_bytes)}" if draft_bytes else ""
    taken = f"the weights and other data take {gib(memory.in_use)}"
    if target_bytes:
        taken = f"the target's weights take {gib(target_bytes)}{of_draft}, the rest {gib(rest)}"
    if draft_bytes and memory.beside_weights(fraction) + draft_bytes >= each:
        larger += "speculative_algorithm NONE (no draft), "
    return ConfigError(
        f"mem_fraction_static {fraction} leaves no memory for the KV pool: that is "
        f"{gib(memory.limit * fraction)} of the {gib(memory.limit)} that jax may use on a device, "
        f"{taken}, and the smallest pool {gib(each)}; expected {larger}tp_size of about "
        f"{max(more, len(devices) + 1)}, a smaller page_size or model, or a larger "
        f"{SHARE_VARIABLE}"
    )


def gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:.1f} GiB" if size >= 1 else f"{size:.2g} GiB"
