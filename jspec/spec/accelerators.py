"""Accelerators as data: memory, rates and links of one device, by the name that users give. The
H200's rates were measured (docs/benchmarks.md); the others are the vendors', TPU links a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jspec.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One jax device of a chip or card. Rates are per second, links in one direction."""

    name: str
    platform: str  # "gpu" or "tpu"
    memory: int  # bytes
    jax_share: float = 1.0  # share of the memory that a server may use
    read_bytes: float  # of the device's memory
    flops: float  # of products in bfloat16
    link_bytes: float  # between devices of a host, or of a slice
    between_hosts: float  # between devices of two hosts
    sum_seconds: float  # delay of an all-reduce, without its bytes
    few_sum_seconds: float = 0.0  # the same through peers' memory, over at most `few` devices
    few: int = 0
    devices_per_chip: int = 1
    host_chips: int  # most chips of one host
    slice_chips: int  # chips of each of several hosts
    lanes: int = 1  # a cache's records are padded to a multiple of this width


def _gpu(
    name: str, *, gib: float, read: float, flops: float, link: float, few: int = 0
) -> Accelerator:
    """Return a card of a host of eight, of whose memory a server may use 0.95."""
    # Two H200s take 30 us for each sum of a step with XLA's all-reduce (h200_table_tp2.json).
    # Through each other's memory four take 4 us for a row and its norm, and smaller products lose 6
    # us a sum (tensor_parallel_h200.json).
    return Accelerator(
        name=name,
        platform="gpu",
        memory=int(gib * GIB),
        jax_share=0.95,
        read_bytes=read,
        flops=flops,
        link_bytes=link,
        between_hosts=50e9,
        sum_seconds=30e-6,
        few_sum_seconds=10e-6,
        few=few,
        host_chips=8,
        slice_chips=8,
    )


def _tpu(
    name: str, *, memory: int, read: float, flops: float, link: float, host: int, cores: int = 1
) -> Accelerator:
    """Return a TPU device; memory is what its compiler lets a program use."""
    return Accelerator(
        name=name,
        platform="tpu",
        memory=memory,
        read_bytes=read,
        flops=flops,
        link_bytes=link,
        between_hosts=link,  # the hosts of a slice share its links
        sum_seconds=4e-6,
        devices_per_chip=cores,
        host_chips=host,
        slice_chips=4,
        lanes=128,
    )


ACCELERATORS: Mapping[str, Accelerator] = {
    each.name.lower(): each
    for each in (
        _gpu("A100", gib=79.2, read=2.0e12, flops=312e12, link=300e9),
        _gpu("H100", gib=79.6, read=3.35e12, flops=989e12, link=450e9, few=4),
        _gpu("H200", gib=139.8, read=4.49e12, flops=790e12, link=450e9, few=4),
        _gpu("B200", gib=178.0, read=7.7e12, flops=2250e12, link=900e9),
        _tpu("v5e", memory=16911433728, read=819e9, flops=197e12, link=90e9, host=8),
        _tpu("v5p", memory=102005473280, read=2765e9, flops=459e12, link=180e9, host=4),
        _tpu("v6e", memory=33554432000, read=1640e9, flops=918e12, link=180e9, host=8),
        # A chip is two devices.
        _tpu("v7x", memory=101737037824, read=3690e9, flops=1153e12, link=180e9, host=4, cores=2),
    )
}


# Parts of jax's device_kind, the longer ones first.
KINDS: Mapping[str, str] = {
    "v5 lite": "v5e",
    "v5e": "v5e",
    "v5": "v5p",
    "v6": "v6e",
    "7x": "v7x",
    "a100": "A100",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
}


def accelerator_of(device_kind: str) -> Accelerator | None:
    """Return the accelerator that jax calls by this name; None for an unknown one."""
    said = device_kind.lower()
    names = (name for part, name in KINDS.items() if part in said)
    name = next(names, None)
    return None if name is None else ACCELERATORS[name.lower()]


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Chips of one kind, all for one user."""

    accelerator: Accelerator
    num_chips: int

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.accelerator.devices_per_chip

    @property
    def host_devices(self) -> int:
        """The devices of one of its hosts."""
        own = self.accelerator
        is_one = self.num_chips <= own.host_chips
        return (own.host_chips if is_one else own.slice_chips) * own.devices_per_chip

    @property
    def usable_bytes(self) -> float:
        """The memory of each device that a server may use."""
        return self.accelerator.memory * self.accelerator.jax_share

    def __str__(self) -> str:
        return f"{self.num_chips}x{self.accelerator.name}"


def read_devices(name: str, text: str) -> DeviceGroup:
    """Read a group such as "8xH200" or "v6e". Raises ConfigError."""
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?([a-z]\w*)", text.strip().lower())
    if found is None or found[2] not in ACCELERATORS or int(found[1] or 1) < 1:
        known = ", ".join(each.name for each in ACCELERATORS.values())
        raise ConfigError(
            f"{name} is {text!r}; expected a number of chips and their name, such as 8xH200 or "
            f"4xv6e, of {known}"
        )
    return DeviceGroup(ACCELERATORS[found[2]], int(found[1] or 1))
