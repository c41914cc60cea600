"""Settings of the whole suite, made before jax is imported for the first time.

Four fake CPU devices for the sharded tests, and as little optimisation of a CPU's code as XLA
allows, because the suite compiles far more than it computes: it halves what the suite costs. What
comes before the machine's code (fusion, donation, copies) is as it is for users, and CI's slow pass
sets its own flags, so that XLA's usual code is run as well. Programs of other processes get the
same flags, with the environment.
"""

from __future__ import annotations

import os
from importlib import metadata

XLA_FLAGS = [
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if metadata.version("jaxlib").startswith("0.10."):  # a flag that jaxlib does not know ends it
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))

import jax
import pytest
from hypothesis import settings

# Products in full float32 everywhere, so that identity holds on a GPU as well.
jax.config.update("jax_default_matmul_precision", "highest")

# Same examples in every run; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs the Hopper kernels where this jax is too old for them."""
    from jspec.pallas_kernels.hopper import has_mosaic_gpu  # not before the shapes are checked

    if item.get_closest_marker("mosaic_gpu") and not has_mosaic_gpu():
        pytest.skip(f"Mosaic GPU kernels need jax 0.11, this is {jax.__version__}")
