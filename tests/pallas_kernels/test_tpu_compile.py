"""Every kernel for TPUs compiles for absent chips without a large copy."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed"
)
@pytest.mark.parametrize(
    ("topology", "words", "number"),
    [
        ("v6e:2x2", ["few"], 9),
        pytest.param("tpu7x:2x2x1", ["few"], 9, marks=pytest.mark.exhaustive),
        pytest.param("v5e:2x2", [], 69, marks=pytest.mark.exhaustive),
        pytest.param("v5p:2x2x1", ["few"], 9, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_every_kernel_compiles_for_a_tpu_and_copies_nothing(
    topology: str, words: list[str], number: int
) -> None:
    """The largest shapes; by hand, every shape for one chip."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.tpu_compile", topology, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == number
    kernels = {program["name"].partition(",")[0] for program in found}
    assert kernels >= {"rows", "prefill", "compaction", "gathering", "delta"}
    for program in found:
        assert program["kernels"] == program["expected_kernels"], program
        assert (program["copies"] == []) is not ("copied" in program["name"]), program
        assert program["fits"], program
