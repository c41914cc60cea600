"""Compilation for an absent H200 from a test: in a separate process, or skipped."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jspec.pallas_kernels.hopper import has_mosaic_gpu

needs_cuda_compiler = pytest.mark.skipif(
    not has_mosaic_gpu()
    or importlib.util.find_spec("jax_plugins") is None
    or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="needs jax 0.11, the jax-cuda13 plugin and ptxas, not a GPU",
)


def output_of(module: str) -> str:
    """Return the output of `python -m module`, with XLA's compiler and ptxas for sm_90a but no
    GPU."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
