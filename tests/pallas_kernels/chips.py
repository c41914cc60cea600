"""Marks that skip a kernel's test without its GPU, Hopper GPU or jax version, and CI's case
choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import pytest

from jspec.pallas_kernels.hopper import has_mosaic_gpu


def has_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
needs_hopper = pytest.mark.skipif(not has_hopper(), reason="needs a Hopper GPU")
# Skipped for an older jax in tests/conftest.py: a mark of its own, so that `-m mosaic_gpu` selects.
needs_mosaic_gpu = pytest.mark.mosaic_gpu
needs_older_jax = pytest.mark.skipif(has_mosaic_gpu(), reason="this jax has the kernels")


def in_turns(names: Iterable[str], tunings: Sequence[Any], *, ci: Sequence[str]) -> list[Any]:
    """Return parameters (name, tuning) of the whole cross product.

    CI runs the names of `ci` alone, the first with the first tuning, and so on, alternating.
    """
    in_ci = {(name, i % len(tunings)) for i, name in enumerate(ci)}
    return [
        pytest.param(name, tuning, id=f"{name}-{tuning}", marks=marks)
        for name in names
        for j, tuning in enumerate(tunings)
        for marks in [() if (name, j) in in_ci else pytest.mark.exhaustive]
    ]
