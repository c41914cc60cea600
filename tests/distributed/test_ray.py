"""A Ray cluster of two nodes whose replicas are killed under open streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1500  # seconds; it took 373 on slow cores beside two suites


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
def test_no_stream_notices_that_its_replica_was_killed(
    tmp_path: Path, programs_of_all: Path
) -> None:
    """Eight streams are one of each kind; benchmarks/results/ray_kill_cpu.json has 32."""
    output = tmp_path / "result.json"
    engine = {"compilation_cache_dir": str(programs_of_all), "context_length": 512}
    words = ["--seconds", "7", "--kill-every", "2", "--streams", "8", "--max-tokens", "40"]
    words += ["--engine", json.dumps(engine)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ray_kill", *words, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert output.exists(), f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    result = json.loads(output.read_text())
    assert (result["num_errors"], result["errors"]) == (0, [])
    assert result["num_differing"] == 0
    assert result["num_kills"] >= 2
    assert result["num_answers"] >= 8
