"""Which program runs attention where, and that each keeps the contract's door."""

from __future__ import annotations

import pytest

from jspec.core.engine_args import ATTENTION_BACKENDS
from jspec.core.errors import ConfigError
from jspec.pallas_kernels.paged_attention import choose_backend, pool_width


@pytest.mark.parametrize(
    ("platform", "requested", "backend"),
    [
        ("cpu", "auto", "xla"),
        ("cpu", "xla", "xla"),
        ("gpu", "auto", "xla"),
        ("gpu", "pallas", "gpu"),
        ("tpu", "auto", "tpu"),
        ("tpu", "pallas", "tpu"),
        ("tpu", "xla", "xla"),
    ],
)
def test_the_platform_chooses_unless_told(platform: str, requested: str, backend: str) -> None:
    assert requested in ATTENTION_BACKENDS
    assert choose_backend(platform, requested) == backend


def test_a_cpu_has_no_kernels_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend is 'pallas', on cpu devices"):
        choose_backend("cpu", "pallas")


def test_only_the_tpu_kernels_widen_the_pool() -> None:
    assert [pool_width(64, backend) for backend in ("xla", "gpu", "tpu")] == [64, 64, 128]
    assert [pool_width(width, "tpu") for width in (128, 129, 256)] == [128, 256, 256]
