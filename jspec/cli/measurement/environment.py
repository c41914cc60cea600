"""Provenance of a result: command, chip, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jspec import __version__

ROOT = Path(__file__).resolve().parents[3]


def describe(command: str, *, chip: str | None = None) -> dict[str, Any]:
    """Describe the environment. chip: None asks jax, which starts its backend here."""
    return {
        "command": command,
        "chip": own_chip() if chip is None else chip,
        "num_cores": num_cores(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "jspec": __version__,
        "commit": commit(),
    }


def now_utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def own_chip() -> str:
    import jax

    device = jax.devices()[0]
    return str(device.device_kind) if device.platform != "cpu" else cpu_name()


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def without_paths(words: Sequence[str]) -> list[str]:
    """Reduce absolute paths to their file names: cache=/home/x/c → cache=c."""
    return ["=".join(Path(p).name if p[:1] == "/" else p for p in w.split("=")) for w in words]


def commit() -> str:
    """Return the short hash, with "-dirty" if files changed; "unknown" outside a git checkout."""
    if not (ROOT / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "cpu"
