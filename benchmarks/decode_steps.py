"""Decode steps of a model, each with its floor: plain, chain, tree, and every other drafter.

    python -m benchmarks.decode_steps [--cells 'mtp/*' ngram/1] [--parts 'ngram/*']
    python -m benchmarks.decode_steps --model gpt-oss-20b --cells plain/1 chain/64
    python -m benchmarks.decode_steps --model tiny        (a smoke test on a CPU)

Weights, shapes, context and the simulated acceptance of 3.0 are those of benchmarks.h200_table,
which starts an engine with all of its programs; here one decode program a batch is compiled, and
one for prompts. `device_ms` is that program dispatched back to back, `engine_ms` the time between
two results through scheduler and loop. Other drafters than EAGLE-3 are chains 3/1/4 (an EAGLE-1
head, three layers for multi-token prediction, Llama-3.2-1B's shapes as a language model that
drafts, lookup), and block drafters of five layers as chains and trees. The floor
(benchmarks.floors) is what target and drafter read, or multiply where that takes longer; with
plain, chain and tree, which also serve MoEs, it is the bytes of the target alone. Of several
devices (--engine tp_size=2) each has its share, and what they exchange is not counted. --parts also
times the drafter's two halves alone, --trace the largest kernels of a step (with
XLA_FLAGS=--xla_gpu_enable_command_buffer= each has its name). A mode has one start for all of its
batches.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

if __package__ in (
    None,
    "",
):  # started as a file: import `benchmarks` and `jspec` from the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from benchmarks.environment import write_result
from benchmarks.floors import Rows, draft_floor, target_floor
from benchmarks.h200_table import describe_error, engine_arguments, target_floor_ms
from benchmarks.step_parts import advance_part, propose_part
from benchmarks.step_profile import Bench, compiled, engine_step_ms, prepare, step_of, whole_step
from benchmarks.step_timing import largest_kernels, part_ms
from benchmarks.workloads import DRAFTERS, MODES, WORKLOADS, Workload
from jspec.engine.programs.compilation import compiler_options
from jspec.engine.steps.step_def import ProgramKey
from jspec.messages.plan import StepKind
from jspec.messages.step_options import PLAIN

ROOT = Path(__file__).resolve().parent.parent

Cell = dict[str, Any]


def floor_of(bench: Bench, batch: int) -> Cell:
    """Return the least milliseconds of target and draft, in the middle of a long run."""
    models, draft_shape = bench.models, bench.program.draft_shape
    rows = Rows(batch=batch, context=bench.committed, itemsize=bench.dtype.itemsize)
    target = target_floor(models.target, rows, nodes=draft_shape.num_draft_tokens)
    draft = draft_floor(models.drafter, draft_shape, rows)
    both = target + draft
    named = {"target": target.ms, "draft": draft.ms, **asdict(both)}
    return {name: round(ms / bench.mesh.size, 4) for name, ms in named.items()}


def measure(bench: Bench, mode: str, batch: int, *, trace: bool) -> Cell:
    """Measure one cell without its parts. trace: list the largest kernels, too."""
    device, run = whole_step(bench, batch)
    through = engine_step_ms(bench, batch)
    if mode in DRAFTERS:
        floor = floor_of(bench, batch)
    else:
        ms = target_floor_ms(bench.workload, mode, batch) / bench.mesh.size
        floor = {"ms": round(ms, 4)}
    accepted = bench.program.draft_shape.simulate_acceptance or 1.0
    return {
        "device_ms": round(device, 4),
        "engine_ms": round(through, 4),
        "floor": floor,
        "share": round(floor["ms"] / through, 4),
        "tokens_per_second": round(1e3 * batch * accepted / through, 1),
        **({"kernels": largest_kernels(run)} if trace else {}),
    }


def draft_parts(bench: Bench, batch: int) -> Cell:
    """Return milliseconds of the drafter's two halves, each alone in a loop of one program."""
    state = bench.state()
    step = step_of(bench, state, batch)
    found: Cell = {}
    for part in (propose_part(step, state), advance_part(step, state)):
        ms = part_ms(
            part,
            step,
            bench.mesh,
            floor_ms=0.0,
            compiler_options=compiler_options(
                ProgramKey(StepKind.DECODE, batch, PLAIN),
                bench.limits,
                platform=jax.default_backend(),
                ops=bench.program.ops,
            ),
        )
        found[part.name] = round(ms, 4)
    return found


def run_mode(
    workload: Workload,
    mode: str,
    options: argparse.Namespace,
    put: Callable[[str, Cell], None],
) -> None:
    """Run all requested cells of one mode."""
    wanted = {f"{mode}/{b}": b for b in workload.batches if is_wanted(options.cells, mode, b)}
    if not wanted:
        return
    batches = tuple(wanted.values())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_arguments(options.engine)
        first = prepare(
            workload, mode, max(batches), Path(folder), engine, smaller=tuple(sorted(batches)[:-1])
        )
        bench = compiled(first)
        print(f"{mode}: ready in {time.monotonic() - started:.1f} s", flush=True)
        for name, batch in wanted.items():
            if time.monotonic() > options.deadline:
                put(name, {"error": "out of time"})
                continue
            try:
                cell = measure(bench, mode, batch, trace=options.trace)
                put(name, cell)
                if is_wanted(options.parts, mode, batch):
                    put(name, {**cell, "parts": draft_parts(bench, batch)})
            except Exception as error:  # the other cells are still wanted
                put(name, {"error": describe_error(error)})
    gc.collect()  # weights and pools, before the next mode's are made


def is_wanted(patterns: list[str], mode: str, batch: int) -> bool:
    return any(fnmatch(f"{mode}/{batch}", pattern) for pattern in patterns)


def table(cells: Mapping[str, Cell]) -> str:
    """Return Markdown: engine and device milliseconds, the floor, and the share of it."""
    lines = ["| cell | engine | device | floor | share |", "|---|---|---|---|---|"]
    for name, cell in cells.items():
        if "error" in cell:
            lines.append(f"| {name} | {cell['error'][:60]} | | | |")
            continue
        lines.append(
            f"| {name} | {cell['engine_ms']:.2f} | {cell['device_ms']:.2f} | "
            f"{cell['floor']['ms']:.2f} | {100 * cell['share']:.0f}% |"
        )
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="llama-3.1-8b")
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="MODE/B")
    parser.add_argument("--parts", nargs="+", default=[], metavar="DRAFTER/B")
    parser.add_argument("--trace", action="store_true", help="list the largest kernels too")
    parser.add_argument("--seconds", type=float, default=540.0, help="no cell starts after this")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every requested cell has its figures."""
    options = parse(sys.argv[1:] if argv is None else argv)
    options.deadline = time.monotonic() + options.seconds
    workload = WORKLOADS[options.model]
    name = options.model.replace("-", "_").replace(".", "_")
    output = options.output or ROOT / "benchmarks" / "results" / f"decode_steps_{name}.json"
    cells: dict[str, Cell] = {}

    def put(name: str, cell: Cell) -> None:
        cells[name] = cell
        print(f"{name:16} {cell}", flush=True)
        write_result(output, {"model": options.model, "cells": cells})

    for mode in (*MODES, *workload.drafters):
        try:
            run_mode(workload, mode, options, put)
        except Exception as error:  # the other modes are still wanted
            put(mode, {"error": describe_error(error)})
    if not cells:
        print(f"no cell matches {options.cells}, as in 'mtp/8'", file=sys.stderr)
        return 2
    print(table(cells))
    return 1 if any("error" in cell for cell in cells.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
