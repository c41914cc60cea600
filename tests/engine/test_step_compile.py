"""Steps at real shapes compile for TPUs, ahead of time, and fit: plain, chain and tree.

Every kind of program, in one bucket (another differs by a static size), with a pool that fills the
chips: no copy of the pool, and every weight is read as it lies. Needs the TPU compiler
(`pip install -e '.[tpu]'`), not a TPU: nothing is run.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BACKEND = ("--backend", "tpu")
SHAPES = ("0/1/1", "3/1/4", "3/4/16")
PROGRAMS = {"prefill T=2048 all", "decode B=64", "decode B=64 all"}
# Model, slice, page size: 8B on four chips of each generation, 70B on eight.
CASES = [
    ("llama-3.1-8b", "v5e:2x2", 16),
    ("llama-3.1-8b", "v5p:2x2x1", 64),
    ("llama-3.1-8b", "v6e:2x2", 16),
    ("llama-3.1-70b", "v5p:2x2x2", 64),
]

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed"
)


def compiled_programs(*arguments: str) -> list[dict[str, Any]]:
    """What step_compile prints of each program, from a process of its own.

    A second one, if a signal ended the first: libtpu's own code generator (for v5p's sparse cores)
    crashed once in many runs of the same programs.
    """
    command = [sys.executable, "-m", "tests.engine.step_compile", *arguments, *BACKEND]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    if done.returncode < 0:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_compiler
@pytest.mark.parametrize(("model", "topology", "page_size"), CASES)
def test_every_step_compiles_for_a_tpu(model: str, topology: str, page_size: int) -> None:
    programs = compiled_programs(model, topology, *SHAPES, "--page-size", str(page_size))
    assert len(programs) == len(SHAPES) * len(PROGRAMS)
    seen = {(program["shape"], program["program"]) for program in programs}
    assert seen == set(itertools.product(SHAPES, PROGRAMS))
    for program in programs:
        print({name: value for name, value in program.items() if "copies" not in name})
        assert program["kernels"] >= 32, "a layer without a Mosaic kernel"
        name = f"{program['shape']} {program['program']}"
        assert program["pool_copies"] == [], name
        assert program["weight_copies"] == [], name
        assert program["device_bytes"] < program["hbm_bytes"], program
        assert program["pool_bytes"] > program["hbm_bytes"] / 3, program


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_compiler
def test_several_rounds_compile_for_a_tpu_and_copy_nothing() -> None:
    rounds = ("--num-continuous-decode-steps", "3")
    programs = compiled_programs("small", "v5e:2x2", "3/1/4", "--only", "decode", *rounds)
    assert {program["program"] for program in programs} == {"decode B=64", "decode B=64 all"}
    for program in programs:
        assert program["pool_copies"] == []
        assert program["weight_copies"] == []
        assert program["kernels"] >= 3 * 7, "a layer of a round without a Mosaic kernel"
