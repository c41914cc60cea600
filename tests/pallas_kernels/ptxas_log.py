"""Registers and spills of kernels that XLA compiles for a GPU, from ptxas' own report.

Import it before jax: XLA reads the variables once. Run in a process of its own.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
os.environ["TF_CPP_VMODULE"] = "subprocess_compilation=3"

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILLED = re.compile(r"(\d+) bytes spill stores")
USED = re.compile(r"Used (\d+) registers")


def logged(run: Callable[[], Any]) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return run()'s result, and (registers, bytes spilled) of each kernel that it compiled."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            result = run()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
    found: dict[str, tuple[int, int]] = {}
    name, spilled = "", 0
    for line in lines:
        if entry := ENTRY.search(line):
            name = entry.group(1)
        elif stores := SPILLED.search(line):
            spilled = int(stores.group(1))
        elif used := USED.search(line):
            found[name] = (int(used.group(1)), spilled)
    return result, found
