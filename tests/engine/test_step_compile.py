"""Steps at real shapes compile for TPUs, ahead of time, and fit: plain, chain and tree.

The programs of a model with a pool that fills the chips: no copy of the pool, and every weight is
read as it lies. Needs the TPU compiler (`pip install -e '.[tpu]'`), not a TPU: nothing is run.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BACKEND = ("--backend", "tpu")
SHAPES = ("0/1/1", "3/1/4", "3/4/16")
TREE = SHAPES[2:]
# Model, slice, page size, S/K/N whose prefill is compiled: 8B on four chips of each generation, 70B
# on eight. Every prefill once; a tree's holds all that the others' do.
CASES = [
    ("llama-3.1-8b", "v5e:2x2", 16, SHAPES),
    ("llama-3.1-8b", "v5p:2x2x1", 64, TREE),
    ("llama-3.1-8b", "v6e:2x2", 16, TREE),
    ("llama-3.1-70b", "v5p:2x2x2", 64, TREE),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed"
)
@pytest.mark.parametrize(("model", "topology", "page_size", "prefill"), CASES)
def test_steps_compile_for_a_tpu(
    model: str, topology: str, page_size: int, prefill: tuple[str, ...]
) -> None:
    module = [sys.executable, "-m", "tests.engine.step_compile", model, topology]
    done = subprocess.run(
        [*module, *SHAPES, "--page-size", str(page_size), "--prefill", *prefill, *BACKEND],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(programs) == len(SHAPES) + len(prefill)
    for program in programs:
        print({name: value for name, value in program.items() if "copies" not in name})
        assert program["kernels"] >= 32, "a layer without a Mosaic kernel"
        name = f"{program['shape']} {program['program']}"
        assert program["pool_copies"] == [], name
        assert program["weight_copies"] == [], name
        assert program["device_bytes"] < program["hbm_bytes"], program
        assert program["pool_bytes"] > program["hbm_bytes"] / 3, program
