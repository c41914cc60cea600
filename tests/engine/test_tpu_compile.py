"""Every step program compiles for TPUs, ahead of time, without a copy of the pool, and fits.

Needs the TPU compiler (`pip install -e '.[tpu]'`), not a TPU: nothing is run.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

GIB = 1 << 30
# HBM of one chip, from Google's TPU documentation.
CASES = [
    ("v5e:2x2", "small", (0, 1, 1), 16 * GIB),
    ("v5e:2x2", "small", (3, 4, 16), 16 * GIB),
    ("v6e:2x2", "small", (3, 1, 4), 32 * GIB),
    ("v5e:2x2", "llama-3.1-8b", (3, 1, 4), 16 * GIB),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed"
)
@pytest.mark.parametrize(("topology", "model", "shape", "memory"), CASES, ids=str)
def test_steps_compile_for_a_tpu(
    topology: str, model: str, shape: tuple[int, int, int], memory: int
) -> None:
    command = [sys.executable, "-m", "tests.engine.tpu_compile", topology, model]
    done = subprocess.run(
        [*command, *map(str, shape)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(programs) == 2
    for program in programs:
        assert program["pool_copies"] == [], program["program"]
        assert program["device_bytes"] < memory, program
