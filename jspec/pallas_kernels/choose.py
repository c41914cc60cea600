"""Which bundle of kernels an engine runs on: the only place that looks at a platform's name."""

from __future__ import annotations

from dataclasses import replace

from jspec.core.errors import ConfigError
from jspec.pallas_kernels.ops import Ops, ReferenceOps
from jspec.pallas_kernels.ops_gpu import GpuOps
from jspec.pallas_kernels.ops_tpu import TpuOps

# By the names that tests and measurements use; `interpret` runs anywhere, very slowly.
OPS: dict[str, Ops] = {
    "reference": ReferenceOps(),
    "xla": Ops(),
    "tpu": TpuOps(),
    "tpu_interpret": TpuOps(interpret=True),
    "gpu": GpuOps(),
    "gpu_interpret": GpuOps(interpret=True),
}


def choose_ops(platform: str, requested: str = "auto", *, gpu_problem: str | None = None) -> Ops:
    """The bundle for jax devices of `platform`: "cpu", "gpu" or "tpu".

    requested: "auto"; "xla", on anything; "pallas", the platform's own kernels. gpu_problem: why
    the Hopper kernels do not serve (ops_gpu.gpu_problem); XLA does then, unless they were asked
    for by name. Raises ConfigError.
    """
    if requested == "pallas" and platform not in ("gpu", "tpu"):
        raise ConfigError(
            f"attention_backend is 'pallas', on {platform} devices; expected 'auto' or 'xla' there"
        )
    if requested == "xla" or platform not in ("gpu", "tpu"):
        return OPS["xla"]
    if platform == "tpu":
        return OPS["tpu"]
    if gpu_problem is None:
        return OPS["gpu"]
    if requested == "pallas":
        raise ConfigError(f"attention_backend is 'pallas', with {gpu_problem}")
    return OPS["xla"]


def with_columns(ops: Ops, *, columns: bool) -> Ops:
    """`ops` for weights that lie by columns where the kernels can read them so."""
    return replace(ops, columns=columns) if isinstance(ops, GpuOps) else ops
