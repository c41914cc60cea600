"""Every step program at full depth through the TPU's compiler, ahead of time; no TPU is needed.

    python -m benchmarks.tpu_compile [--only 'gpt-oss-20b v5p*'] [--seconds 3600] [--resume]

Four slices of three models, and 70B on eight v5p; plain, chain and tree; prefill, decode, decode
with filters and penalties; pools that fill the chips. Of MiMo-V2-Flash two layers with its three
draft layers, one per level. Each program has its own process (benchmarks.tpu_programs); the result
file is complete after each. A program is shown to compile and to fit, not to run. Needs `pip
install -e '.[tpu]'`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.environment import commit, without_paths
from benchmarks.tpu_programs import ROOT, CompileError, Job, full_depth, multi_layer, run_job

TIMEOUT = 900.0  # seconds per program
KEPT = (
    *("layers", "devices", "seconds", "hbm_bytes", "device_bytes", "temp_bytes", "pool_bytes"),
    *("num_pages", "kernels", "ended"),
)
MOST_SAID = 500  # characters of an error


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of one program, with the number and kind of copies."""
    copies = {name: found[name] for name in ("pool_copies", "weight_copies")}
    return {
        **{name: found[name] for name in KEPT},
        **{name: len(lines) for name, lines in copies.items()},
        "copied": [what(line) for lines in copies.values() for line in lines],
        "fits": found["device_bytes"] < found["hbm_bytes"],
    }


def what(line: str) -> str:
    """`%copy.7 = bf16[8,4]{...} copy(%param.1), ...` → `bf16[8,4] copy`."""
    result, _, rest = line.partition(" = ")[2].partition("{")
    return f"{result} {rest.partition('} ')[2].partition('(')[0]}"


def measure(job: Job, *, timeout: float) -> dict[str, Any]:
    """Return the program's summary or, as `error`, the end of the compiler's output."""
    where = {"command": f"python -m {' '.join(job.words)}", "commit": commit()}
    where |= {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    try:
        return summary(run_job(job, timeout=timeout)) | where
    except CompileError as error:
        return {"error": str(error).strip()[-MOST_SAID:], **where}


def write(path: Path, command: str, cells: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")  # replace the file atomically
    whole.write_text(json.dumps({"command": command, "cells": cells}, indent=1) + "\n", "utf-8")
    whole.replace(path)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cells")
    parser.add_argument("--seconds", type=float, default=3600.0, help="none starts after this")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds of one program")
    parser.add_argument("--resume", action="store_true", help="keep what is there and has no error")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "tpu_compile.json"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every requested program was compiled."""
    words = sys.argv[1:] if argv is None else argv
    options = parse(words)
    command = " ".join(["python -m benchmarks.tpu_compile", *without_paths(words)])
    every = full_depth() + multi_layer()
    jobs = [job for job in every if any(fnmatch(str(job), p) for p in options.only)]
    if not jobs:
        print(f"no program matches {options.only}, as in '{every[0]}'", file=sys.stderr)
        return 2
    cells: dict[str, Any] = {}
    if options.resume and options.output.exists():
        found = json.loads(options.output.read_text("utf-8"))["cells"]
        cells = {name: cell for name, cell in found.items() if "error" not in cell}
    deadline = time.monotonic() + options.seconds
    for job in jobs:
        if str(job) in cells or time.monotonic() > deadline:
            continue
        cells[str(job)] = measure(job, timeout=options.timeout)
        print(f"{job}: {json.dumps(cells[str(job)])}", flush=True)
        write(options.output, command, cells)
    wanted = [cells.get(str(job), {"error": "not compiled"}) for job in jobs]
    return 1 if any("error" in cell for cell in wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
