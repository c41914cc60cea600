"""Estimate the times of steps and kernels on TPUs from what the TPU compiler says.

    python -m benchmarks.tpu_cycles kernels [--topology v6e:2x2] [--only 'rows*']
    python -m benchmarks.tpu_cycles steps [--only '*v6e* 3/1/4 *'] [--dumps DIR] [--evaluate]
    python -m benchmarks.tpu_cycles nodes [--topology v6e:2x2]

No TPU is needed; needs `pip install -e '.[tpu]'`. `kernels` reads the final bundles of each kernel
and simulates their scalar half for given row lengths. `steps` compiles two layers of each step and
adds up its operations, with the kernels' times of the first command. `nodes` finds how many nodes
a row may have before a step takes 1.1 and 1.25 times a plain one. Results grow in
benchmarks/results/tpu_kernels.json, tpu_steps.json and tpu_nodes.json. How each figure is found:
docs/tpu_estimates.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.environment import commit, without_paths
from benchmarks.tpu_cycles import kernels, nodes, steps
from benchmarks.tpu_programs import ROOT, V6E

RESULTS = ROOT / "benchmarks" / "results"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("kernels", "steps", "nodes"))
    parser.add_argument("--topology", default=V6E, help="of kernels and nodes")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases or steps so called")
    parser.add_argument("--dumps", type=Path, help="keeps compiled programs, and uses those there")
    parser.add_argument("--evaluate", action="store_true", help="cycles of bundles; takes minutes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))["cells"] if path.exists() else {}


def add(path: Path, command: str, name: str, cell: dict[str, Any]) -> None:
    """Add one cell to a file of results, which is complete after each."""
    cells = load(path) | {name: cell | {"command": command, "commit": commit()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")  # replace the file atomically
    whole.write_text(json.dumps({"cells": cells}, indent=1) + "\n", "utf-8")
    whole.replace(path)
    print(f"{name}: {json.dumps(cell)}", flush=True)


def run_kernels(options: argparse.Namespace, save: Callable[[str, dict[str, Any]], None]) -> None:
    for case in kernels.CASES:
        if fnmatch(case.name, options.only):
            save(f"{options.topology} {case.name}", kernels.report(case, options.topology))


def reports_of(results: Path, topology: str) -> dict[str, Any]:
    cells = load(results / "tpu_kernels.json")
    return {name: cell for name, cell in cells.items() if name.startswith(topology)}


def run_steps(options: argparse.Namespace, save: Callable[[str, dict[str, Any]], None]) -> None:
    with tempfile.TemporaryDirectory() as made:
        for job in steps.jobs():
            if not fnmatch(str(job), options.only):
                continue
            directory = (options.dumps or Path(made)) / steps.slug(job)
            steps.dump(job, directory, evaluate=options.evaluate)
            reports = reports_of(options.results, job.topology)
            save(str(job), steps.estimate(job, directory, reports))


def run_nodes(options: argparse.Namespace, save: Callable[[str, dict[str, Any]], None]) -> None:
    with tempfile.TemporaryDirectory() as made:
        directory = options.dumps or Path(made)
        found = nodes.find(options.topology, directory, evaluate=options.evaluate)
        for rows, cell in found.items():
            save(f"{options.topology} {rows} rows", cell)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    words = sys.argv[1:] if argv is None else argv
    command = " ".join(["python -m benchmarks.tpu_cycles", *without_paths(words)])
    path = options.results / f"tpu_{options.command}.json"
    run = {"kernels": run_kernels, "steps": run_steps, "nodes": run_nodes}[options.command]
    run(options, lambda name, cell: add(path, command, name, cell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
