"""The rates that the estimates assume of each TPU.

`ghz` is the clock of libtpu's evaluator: the published peak divided by the operations a cycle of
the matrix units, 2 x 128 x 128 or 2 x 256 x 256 times their number. Bandwidths and peaks are the
published ones of a device, which on v7x is one of a chip's two cores. `latency_us` is the time of
a copy of 4 KiB from HBM in libtpu's own model, `cost_model_hbm` was seen in products that are bound
by memory (for v7x assumed to be v6e's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    name: str
    ghz: float
    hbm_gb_s: float
    bf16_tflop_s: float
    link_gb_s: float  # of one link between chips, one way
    latency_us: float
    cost_model_hbm: float  # the share of the HBM's bandwidth that XLA's cost model counts with

    @property
    def bytes_per_us(self) -> float:
        return self.hbm_gb_s * 1e3

    @property
    def flops_per_us(self) -> float:
        return self.bf16_tflop_s * 1e6

    def us(self, cycles: float) -> float:
        return cycles / self.ghz / 1e3


CHIPS: Mapping[str, Chip] = {
    "v5e": Chip(
        name="v5e",
        ghz=1.503,
        hbm_gb_s=819,
        bf16_tflop_s=197,
        link_gb_s=45,
        latency_us=0.76,
        cost_model_hbm=0.90,
    ),
    "v5p": Chip(
        name="v5p",
        ghz=1.751,
        hbm_gb_s=2765,
        bf16_tflop_s=459,
        link_gb_s=90,
        latency_us=0.383,
        cost_model_hbm=0.79,
    ),
    "v6e": Chip(
        name="v6e",
        ghz=1.751,
        hbm_gb_s=1640,
        bf16_tflop_s=918,
        link_gb_s=90,
        latency_us=0.315,
        cost_model_hbm=0.83,
    ),
    "tpu7x": Chip(
        name="tpu7x",
        ghz=2.2,
        hbm_gb_s=3690,
        bf16_tflop_s=1153,
        link_gb_s=90,
        latency_us=0.315,
        cost_model_hbm=0.83,
    ),
}
# A ring over one axis of the mesh uses both of a chip's links of that axis; on eight devices, two
# axes. The latencies are those of a short message, by which the first measurement on a chip is to
# replace them.
ALL_REDUCE_US, GATHER_US = 4.0, 2.0


def chip_of(topology: str) -> Chip:
    """Return the chip of "v6e:2x2". Raises KeyError."""
    return CHIPS[topology.partition(":")[0]]


def collective_us(kind: str, *, num_bytes: float, devices: int, chip: Chip) -> float:
    """Return a collective's time over `devices` of one host: a model, not the compiler's figure.

    kind: the HLO operation, num_bytes: of its result on one device. Every byte of an all-reduce
    crosses a link 2 (n - 1) / n times, of an all-gather (n - 1) / n times.
    """
    times = {
        "all-reduce": 2 * (devices - 1) / devices,
        "all-gather": (devices - 1) / devices,
        "reduce-scatter": float(devices - 1),  # the result is a share of what is sent
    }
    links = 2 if devices <= 4 else 4
    latency = ALL_REDUCE_US if kind == "all-reduce" else GATHER_US
    return num_bytes * times.get(kind, 1.0) / (links * chip.link_gb_s * 1e3) + latency
