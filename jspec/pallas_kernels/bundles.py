"""The choice of an engine's kernel bundle. No other module checks the platform's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from jspec.errors import ConfigError
from jspec.pallas_kernels.ops import Ops, ReferenceOps


def _gpu(**how: bool) -> Ops:
    from jspec.pallas_kernels.ops_gpu import GpuOps

    return GpuOps(**how)


def _tpu(*, interpret: bool = False) -> Ops:
    from jspec.pallas_kernels.ops_tpu import TpuOps

    return TpuOps(interpret=interpret)


class Bundles(Mapping[str, Ops]):
    """Bundles by name, imported on first use: Mosaic GPU takes 1/4 of the engine's import time."""

    def __init__(self, makers: Mapping[str, Callable[[], Ops]]) -> None:
        self._makers = {name: cache(maker) for name, maker in makers.items()}

    def __getitem__(self, name: str) -> Ops:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers


# The names that tests and benchmarks use; `interpret` runs anywhere, very slowly.
OPS = Bundles(
    {
        "reference": ReferenceOps,
        "xla": Ops,
        "tpu": _tpu,
        "tpu_interpret": lambda: _tpu(interpret=True),
        "gpu": _gpu,
        "gpu_interpret": lambda: _gpu(interpret=True),
    }
)


def choose_ops(platform: str, requested: str = "auto", *, gpu_problem: str | None = None) -> Ops:
    """Return the bundle for jax devices of `platform`: "cpu", "gpu" or "tpu".

    requested: "auto"; "xla" on any platform; "pallas" for the platform's own kernels
    gpu_problem: why a GPU's kernels cannot be used: "auto" is then XLA, "pallas" a ConfigError
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
