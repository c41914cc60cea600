"""Settings of the whole suite, made before jax is imported for the first time.

Four fake CPU devices for the sharded tests, and as little optimisation of a CPU's code as XLA
allows, because the suite compiles far more than it computes: it takes a third off its cost. What
comes before the machine's code (fusion, donation, copies) is as it is for users; XLA_FLAGS of one's
own are taken as they are. Programs of other processes get the same, with the environment.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

# A flag that jaxlib does not know ends the process, and later versions do not know the last one.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
    + (
        " --xla_cpu_use_fusion_emitters=false"
        if metadata.version("jaxlib").startswith("0.10.")
        else ""
    ),
)

import jax
import pytest
from hypothesis import settings

# Products in full float32 everywhere, so that identity holds on a GPU as well.
jax.config.update("jax_default_matmul_precision", "highest")

# Same examples in every run; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


# Files that take longer than ten seconds, the longest first, from `--durations`. They start first,
# so that no process is left alone with one of them at the end.
LONG = (
    "speculative/test_engine_laws.py",
    "speculative/test_identity.py",
    "engine/test_runner.py",
    "test_cli.py",
    "server/test_generate_endpoint.py",
    "speculative/test_mutations.py",
    "sampling/test_accept.py",
    "speculative/test_rounds.py",
    "models/test_families.py",
    "training/test_draft_loss.py",
    "speculative/test_drafter_laws.py",
    "speculative/test_ngram.py",
    "server/test_other_endpoints.py",
    "speculative/test_distribution.py",
    "speculative/test_simulated_acceptance.py",
    "pallas_kernels/test_paged_prefill_tpu.py",
    "pallas_kernels/test_sample_gpu.py",
    "pallas_kernels/test_paged_attention_tpu.py",
    "speculative/test_family_identity.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long goes first; else the order is that of the files."""
    here = Path(__file__).parent
    rank = {here / name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs the Hopper kernels where this jax is too old for them."""
    from jspec.pallas_kernels.hopper import has_mosaic_gpu  # not before the shapes are checked

    if item.get_closest_marker("mosaic_gpu") and not has_mosaic_gpu():
        pytest.skip(f"Mosaic GPU kernels need jax 0.11, this is {jax.__version__}")
