"""The environment of a benchmark's result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jspec.cli.measurement import environment
from jspec.cli.measurement.environment import commit, cpu_name, without_paths

__all__ = ["commit", "cpu_name", "describe", "without_paths", "write_result"]


def describe() -> dict[str, Any]:
    """Return command, chip, versions and commit."""
    words = ["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *without_paths(sys.argv[1:])]
    return environment.describe(" ".join(words))


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write the environment and the result to one JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": describe(), **result}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
