"""What a pass of the threshold's search reads on an H200: the logits, once, and nothing else.

Compiling ahead of time needs the CUDA plugin and ptxas, but no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None
    or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="needs the jax-cuda13 plugin and ptxas, not a GPU",
)
def test_a_pass_reads_the_logits_alone_on_an_h200() -> None:
    """One operation of the loop touches anything of size [B, N, V], and it writes nothing so."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sampling.threshold_gpu_compile"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    expected = [f"{v} [(['f32[64,4,{v}]'], [])]" for v in (128_256, 64_128, 151_936)]
    assert done.stdout.splitlines() == expected
