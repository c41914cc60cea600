"""What a result must say about where it came from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

import jspec


def describe() -> dict[str, Any]:
    """Command, chip, versions, commit."""
    device = jax.devices()[0]
    return {
        "command": " ".join(
            ["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *without_paths(sys.argv[1:])]
        ),
        "chip": device.device_kind if device.platform != "cpu" else cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jspec": jspec.__version__,
        "commit": commit(),
    }


def without_paths(words: Sequence[str]) -> list[str]:
    """Of an absolute path only the name is kept: in which folder it was does not matter.

    In:  --out /home/x/a.json cache=/home/x/c
    Out: --out a.json cache=c
    """
    return ["=".join(Path(p).name if p[:1] == "/" else p for p in w.split("=")) for w in words]


def commit() -> str:
    """The short hash of the checkout, "-dirty" behind it if a tracked file differs from it, or
    "unknown" where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def cpu_name() -> str:
    """The processor's name, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "cpu"


def write_result(path: Path, result: dict[str, Any]) -> None:
    """One JSON file: the environment and the numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": describe(), **result}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
