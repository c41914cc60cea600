"""Decode steps of rows that begin alike: told so, and not, in turns.

    python -m benchmarks.shared_prefix [--modes plain chain] [--batches 16 32 64]
    python -m benchmarks.shared_prefix --model tiny --prefixes 128    (a smoke test on a CPU)

Llama-3.1-8B's shapes, random weights, an EAGLE-3 chain 3/1/4 with a simulated acceptance of 3.0, or
plain decoding. All rows of a batch begin in the same pages, and have OWN tokens of their own. Both
programs read the same page tables; the one that is told reads the common pages once for as many
rows as a tile of queries holds, the other relies on the L2 cache. Milliseconds of a step,
dispatched back to back, medians of --repeats turns; ratios are of one turn each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: find `benchmarks` and `jspec` beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks.environment import write_result
from benchmarks.step_profile import Bench, DecodeRuns, first_length, prepare, slope_ms, warm
from benchmarks.workloads import WORKLOADS
from jspec.device.state import EngineState
from jspec.engine.programs.compilation import compile_all
from jspec.engine.programs.program_keys import ProgramKey, with_sharing
from jspec.engine.runner import init_state
from jspec.messages.features import PLAIN
from jspec.messages.plan import StepKind

ROOT = Path(__file__).resolve().parent.parent
OWN = 168  # tokens after the prefix, in the middle of a run

Cell = dict[str, Any]


def keys_of(batch: int) -> tuple[ProgramKey, ProgramKey]:
    """(what is not told, what is)."""
    key = ProgramKey(StepKind.DECODE, batch, PLAIN)
    return key, key._replace(features=with_sharing(PLAIN))


def compiled(bench: Bench) -> Bench:
    """With both programs of each batch."""
    program, limits = bench.program, bench.limits
    state = jax.eval_shape(lambda: init_state(program, limits, shards=1, kv_dtype=bench.dtype))
    keys = tuple(key for batch in limits.decode_buckets for key in keys_of(batch))
    params = bench.models.params
    made = compile_all(program, limits, mesh=bench.mesh, params=params, state=state, keys=keys)
    return replace(bench, executables=made)


def with_prefix(bench: Bench, state: EngineState, prefix: int) -> EngineState:
    """All rows begin in the same pages, of `prefix` tokens, and go on in pages of their own."""
    size = bench.limits.page_size
    slots, width = state.rows.page_table.shape
    shared, own = prefix // size, -(-2 * OWN // size)
    table = np.zeros((slots, width), np.int32)
    table[1:, :shared] = 1 + np.arange(shared)
    rest = np.arange((slots - 1) * own).reshape(-1, own)
    table[1:, shared : shared + own] = 1 + shared + rest
    assert table.max() <= bench.limits.num_pages
    placed = jax.device_put(table, state.rows.page_table.sharding)
    return replace(state, rows=replace(state.rows, page_table=placed))


def cell(
    bench: Bench, state: EngineState, *, batch: int, prefix: int, repeats: int
) -> tuple[Cell, EngineState]:
    """One batch and prefix; and the state, which is handed from step to step."""
    first = first_length(bench, prefix + OWN)
    lens = np.where(np.arange(bench.limits.num_slots + 1) > 0, first, 0).astype(np.int32)
    runs = DecodeRuns(bench, with_prefix(bench, state, prefix), lens)
    alone = runs.of(batch)
    together = runs.of(batch, with_sharing(PLAIN), shared_keys=prefix)
    warm(alone, together)
    turns = [(slope_ms(alone), slope_ms(together)) for _ in range(repeats)]
    found = {
        "by_row_ms": round(statistics.median(a for a, _ in turns), 4),
        "together_ms": round(statistics.median(b for _, b in turns), 4),
        "together_of_by_row": round(statistics.median(b / a for a, b in turns), 4),
    }
    return found, runs.state


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="llama-3.1-8b")
    parser.add_argument("--modes", nargs="+", default=["plain", "chain"])
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=540.0, help="no cell starts after this")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "shared_prefix.json"
    )
    options = parser.parse_args(argv)
    workload, started, cells = WORKLOADS[options.model], time.monotonic(), {}
    context = min(max(options.prefixes) + 2 * OWN, workload.target.max_position)
    for mode in options.modes:
        with tempfile.TemporaryDirectory() as folder:
            *smaller, largest = sorted(options.batches)
            tokens = context + largest * (2 * OWN + 128)
            engine = {"context_length": context, "max_total_tokens": tokens}
            bench = prepare(workload, mode, largest, Path(folder), engine, smaller=tuple(smaller))
            bench = compiled(bench)
            state = bench.state(1)
            for batch in sorted(options.batches, reverse=True):
                for prefix in options.prefixes:
                    if time.monotonic() - started > options.seconds:
                        continue
                    found, state = cell(
                        bench, state, batch=batch, prefix=prefix, repeats=options.repeats
                    )
                    cells[f"{mode}/{batch}/{prefix}"] = found
                    print(f"{mode} B={batch} prefix={prefix}: {found}", flush=True)
                    write_result(options.output, {"own_tokens": OWN, "cells": cells})
    return 0


if __name__ == "__main__":
    sys.exit(main())
