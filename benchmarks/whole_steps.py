"""Whole decode steps of a model beside what its target must read: the table's cells, soon there.

    python -m benchmarks.whole_steps --model gpt-oss-20b [--cells plain/1 chain/64]
    python -m benchmarks.whole_steps --model tiny-moe --cells plain/1      (a smoke test on a CPU)

Weights, shapes, context and simulated acceptance are those of benchmarks.h200_table, which starts
an engine with all of its programs; here one decode program a batch is compiled, and one for
prompts. `device_ms` is that program dispatched back to back, `engine_ms` the time between two
results through scheduler and loop. The floor and its share are h200_table's, of `engine_ms`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: find `benchmarks` and `jspec` beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environment import write_result
from benchmarks.h200_table import describe_error, engine_arguments, target_floor_ms
from benchmarks.step_profile import Bench, compiled, engine_step_ms, prepare, whole_step
from benchmarks.workloads import MODES, WORKLOADS, Workload

ROOT = Path(__file__).resolve().parent.parent
Cell = dict[str, Any]


def measure(bench: Bench, mode: str, batch: int) -> Cell:
    """One cell of an engine that has a program for this batch."""
    device, _ = whole_step(bench, batch)
    through = engine_step_ms(bench, batch)
    floor = target_floor_ms(bench.workload, mode, batch)
    accepted = bench.program.spec.simulate_acceptance or 1.0
    return {
        "device_ms": round(device, 4),
        "engine_ms": round(through, 4),
        "target_floor_ms": round(floor, 4),
        "share_of_floor": round(floor / through, 4),
        "tokens_per_second": round(1e3 * batch * accepted / through, 1),
    }


def run_mode(
    workload: Workload,
    mode: str,
    batches: tuple[int, ...],
    options: argparse.Namespace,
    put: Callable[[str, Cell], None],
) -> None:
    """All batches of one mode, ascending, on one engine."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        *smaller, largest = batches
        engine = engine_arguments(options.engine)
        first = prepare(workload, mode, largest, Path(folder), engine, smaller=tuple(smaller))
        bench = compiled(first)
        print(f"{mode}: ready in {time.monotonic() - started:.1f} s", flush=True)
        for batch in batches:
            if time.monotonic() > options.deadline:
                put(f"{mode}/{batch}", {"error": "out of time"})
            else:
                put(f"{mode}/{batch}", measure(bench, mode, batch))


def batches_of(cells: list[str]) -> dict[str, tuple[int, ...]]:
    """Of each mode, ascending. ValueError for a cell that is none.

    In:  plain/8 chain/1 plain/1      Out: plain: 1 8, chain: 1
    """
    found: dict[str, set[int]] = {}
    for cell in cells:
        mode, _, batch = cell.partition("/")
        if mode not in MODES or not batch.isdecimal() or not int(batch):
            modes = ", ".join(MODES)
            raise ValueError(f"cell {cell!r}; expected one of {modes} and a batch, as plain/1")
        found.setdefault(mode, set()).add(int(batch))
    return {mode: tuple(sorted(batches)) for mode, batches in found.items()}


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if every cell that was asked for has its figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--cells", nargs="+", default=["plain/1", "plain/64"], metavar="MODE/B")
    parser.add_argument("--seconds", type=float, default=540.0, help="no cell starts after this")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    options.deadline = time.monotonic() + options.seconds
    name = options.model.replace("-", "_").replace(".", "_")
    output = options.output or ROOT / "benchmarks" / "results" / f"whole_steps_{name}.json"
    try:
        wanted = batches_of(options.cells)
    except ValueError as error:
        parser.error(str(error))
    cells: dict[str, Cell] = {}

    def put(cell: str, figures: Cell) -> None:
        cells[cell] = figures
        print(f"{cell:10} {figures}", flush=True)
        write_result(output, {"model": options.model, "cells": cells})

    for mode, batches in wanted.items():
        try:
            run_mode(WORKLOADS[options.model], mode, batches, options, put)
        except Exception as error:  # the other mode is still wanted
            for batch in batches:
                if f"{mode}/{batch}" not in cells:
                    put(f"{mode}/{batch}", {"error": describe_error(error)})
        gc.collect()  # weights and pools, before the next mode's are made
    return 1 if any("error" in cell for cell in cells.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
