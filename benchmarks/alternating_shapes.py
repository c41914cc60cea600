"""What a change of shape costs: plain steps, drafting ones, and both in turns.

    python -m benchmarks.alternating_shapes [--batches 64 1] [--every 16 4]
    XLA_FLAGS=--xla_gpu_command_buffer_update_mode=SKIP_TEMP python -m benchmarks.alternating_shapes

The engine of benchmarks.adaptive_card with plain steps and 3/1/4, at acceptance 0, so that every
step emits one token a row: plain steps alone, 3/1/4 alone, and so many of one, then of the other.
Milliseconds a step, of a long run less a short one. Steps in turns that cost nothing more take the
mean of the two; `over_mean` is what they take beyond it, for each change of shape. A plain step's
share of telling the drafter later is in both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: find `benchmarks` and `jspec` beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.adaptive_card import CountingEngine, seconds_of, start
from benchmarks.environment import write_result
from benchmarks.workloads import WORKLOADS, Workload
from jspec.config.limits import SpeculativeConfig
from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.step_options import StepOptions
from jspec.scheduler.shapes.shape_choice import ShapeTotals

ROOT = Path(__file__).resolve().parent.parent


class InTurns:
    """A ShapeChooser: `every` steps of each shape, one after the other."""

    totals = ShapeTotals(num_steps=0)

    def __init__(self, shapes: tuple[SpeculativeConfig, ...], *, every: int) -> None:
        self._shapes, self._every, self._num_chosen = shapes, every, 0

    def choose(self, *, num_rows: int, features: StepOptions) -> SpeculativeConfig:
        del num_rows, features
        turn = self._num_chosen // self._every
        self._num_chosen += 1
        return self._shapes[turn % len(self._shapes)]

    def read(self, plan: StepPlan, result: StepResult) -> None:
        pass

    def timed(self, plan: StepPlan, seconds: float) -> None:
        pass


def ms_a_step(
    engine: CountingEngine,
    workload: Workload,
    rows: int,
    shapes: tuple[SpeculativeConfig, ...],
    *,
    every: int = 1,
) -> float:
    """Of steps that each emit one token a row."""
    seconds = []
    for tokens in (workload.short_run, workload.long_run):
        engine.switched.take_turns(InTurns(shapes, every=every))
        seconds.append(seconds_of(engine, workload, rows, 0.0, tokens))
    return 1e3 * (seconds[1] - seconds[0]) / (workload.long_run - workload.short_run)


def measured(
    engine: CountingEngine, workload: Workload, rows: int, everies: list[int], *, repeats: int
) -> dict[str, Any]:
    """One cell: medians over repeats, which take turns."""
    drafting = engine.limits.spec
    (plain,) = (shape for shape in engine.limits.shapes if shape.is_plain)
    found: dict[str, list[float]] = {}
    for _ in range(repeats + 1):  # the first warms the programs up
        for shape in (plain, drafting):
            took = ms_a_step(engine, workload, rows, (shape,))
            found.setdefault(str(shape), []).append(took)
        for every in everies:
            took = ms_a_step(engine, workload, rows, (plain, drafting), every=every)
            found.setdefault(f"every {every}", []).append(took)
    ms = {name: statistics.median(values[1:]) for name, values in found.items()}
    mean = (ms[str(plain)] + ms[str(drafting)]) / 2
    return {
        "rows": rows,
        "ms_a_step": {name: round(value, 3) for name, value in ms.items()},
        "over_mean": {every: round(every * (ms[f"every {every}"] - mean), 2) for every in everies},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--every", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "alternating_shapes.json"
    )
    options = parser.parse_args(arguments)
    workload, cells = WORKLOADS[options.model], []
    with tempfile.TemporaryDirectory() as folder:
        engine = start(workload, Path(folder), "chain", batches=options.batches, shapes=("0/1/1",))
        for rows in options.batches:
            cells.append(measured(engine, workload, rows, options.every, repeats=options.repeats))
            print(cells[-1], flush=True)
        engine.shutdown()
    flags = os.environ.get("XLA_FLAGS", "")
    write_result(options.out, {"model": options.model, "xla_flags": flags, "cells": cells})


if __name__ == "__main__":
    main()
