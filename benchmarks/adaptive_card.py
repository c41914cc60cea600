"""Shapes chosen step by step against each shape held fixed, on a device, with the dial.

    python -m benchmarks.adaptive_card [--batches 1 8 32 64] [--acceptances 0 0.5 0.9]
    python -m benchmarks.adaptive_card --model tiny        (a smoke test on a CPU)

One engine at Llama-3.1-8B's shapes, EAGLE-3 chain 3/1/4, random weights of which the output head is
made such that the next token is the last one plus 1 (jspec/testing/counting_dial.py): so the dial
knows what is right, and a draft of each depth is accepted with the probability that a request's
seed names. The head runs whole. All that differs between two runs is who chooses the shape: the
engine's own chooser, or one that always says the same. Rows begin with a prompt of PROMPT tokens;
tokens a second are those of a long run less those of a short one, as in h200_table, medians over
repeats, which take turns. The chooser is a new one in each cell, and has seen two long runs before.
An engine that never drafts is measured first. Every text is compared with what it must be.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: find `benchmarks` and `jspec` beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environment import write_result
from benchmarks.workloads import WORKLOADS, Workload
from jspec import Engine
from jspec.core.config import ServeLimits, SpeculativeConfig
from jspec.core.engine_args import EngineArgs
from jspec.core.features import StepFeatures
from jspec.core.plan import StepPlan, StepResult
from jspec.engine.building import build_runner
from jspec.engine.loading import LoadedModels, ModelPaths, load_models
from jspec.scheduler.adaptive_shapes import AdaptiveShapes
from jspec.scheduler.shape_choice import FixedShape, ReadyShapes, ShapeChooser
from jspec.scheduler.shape_policy import ShapeTotals
from jspec.testing.counting_dial import COUNTING, counting_weights, seed_of

ROOT = Path(__file__).resolve().parent.parent
ADAPTIVE = "adaptive"
PLAIN = "plain engine"
PROMPT = 256  # or the workload's, if that is shorter
WARM_RUNS = 2  # long ones, which a new chooser has seen before it is measured
ACCEPTANCES = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0)


class Switched:
    """A ShapeChooser that is the engine's own, or a fixed one, as `use` says."""

    def __init__(self, limits: ServeLimits, ready: ReadyShapes) -> None:
        self._limits, self._ready = limits, ready
        self.adaptive = AdaptiveShapes(limits, ready=ready)
        self._now: ShapeChooser = self.adaptive

    def use(self, shape: SpeculativeConfig | None) -> None:
        """None: the engine's own chooser. Only while nothing is served."""
        self._now = self.adaptive if shape is None else FixedShape(shape)

    def renew(self) -> None:
        """The engine's own chooser as after a start."""
        self.adaptive = AdaptiveShapes(self._limits, ready=self._ready)
        self._now = self.adaptive

    @property
    def totals(self) -> ShapeTotals:
        return self._now.totals

    def choose(self, *, num_rows: int, features: StepFeatures) -> SpeculativeConfig:
        return self._now.choose(num_rows=num_rows, features=features)

    def read(self, plan: StepPlan, result: StepResult) -> None:
        self._now.read(plan, result)

    def timed(self, plan: StepPlan, seconds: float) -> None:
        self._now.timed(plan, seconds)


def load_counting(
    batches: tuple[int, ...], args: EngineArgs, paths: ModelPaths, /, *, mesh: Any
) -> LoadedModels:
    """The pair that `args` names, with a target that counts and a drafter with a dial; programs for
    those batches only."""
    models = load_models(args, paths, mesh=mesh, drafters=COUNTING)
    target = counting_weights(models.params["target"])
    chunks = models.config.prefill_buckets
    config = replace(
        models.config,
        decode_buckets=batches,
        prefill_buckets=tuple(sorted({chunks[len(chunks) // 2], chunks[-1]})),
    )
    return replace(models, config=config, params={**models.params, "target": target})


class CountingEngine(Engine):
    """An engine on `load_counting`, whose chooser can be switched if it is adaptive."""

    switched: Switched

    def __init__(self, batches: tuple[int, ...], **arguments: Any) -> None:
        self._batches = batches
        super().__init__(**arguments, max_running_requests=batches[-1])

    def _build_runner(self, progress: Any) -> Any:
        load = partial(load_counting, self._batches)
        return build_runner(self.args, progress=progress, load=load)

    def _shapes(self, runner: Any) -> ShapeChooser | None:
        if not self.config.speculative_adaptive:
            return None
        self.switched = Switched(runner.limits, runner.ready_shapes)
        return self.switched

    def wait_for_programs(self) -> None:
        """Until all shapes can be chosen."""
        while self._runner.num_programs < self._runner.num_programs_wanted:
            time.sleep(0.2)


def start(
    workload: Workload, folder: Path, mode: str, *, batches: list[int], **more: Any
) -> CountingEngine:
    """Plain decoding, or an adaptive chain, with all programs."""
    workload.write_configs(folder)
    arguments = workload.arguments(mode, folder, acceptance=1.0)
    del arguments["max_running_requests"]
    if arguments.pop("simulate_acceptance", None) is not None:
        arguments["speculative_adaptive"] = True
    engine = CountingEngine(tuple(sorted(batches)), **arguments, **more)
    engine.wait_for_programs()
    print(f"{mode}: ready after {engine.startup_seconds:.1f} s", flush=True)
    return engine


def plain_rates(
    workload: Workload, folder: Path, batches: list[int], *, repeats: int
) -> dict[int, float]:
    """Tokens a second of an engine that never drafts, by batch."""
    engine = start(workload, folder, "plain", batches=batches)
    rates = {}
    for rows in batches:
        seconds_of(engine, workload, rows, 0.0, workload.short_run)
        rates[rows] = statistics.median(rate(engine, workload, rows, 0.0) for _ in range(repeats))
    engine.shutdown()
    print(f"plain engine: {rates}", flush=True)
    return rates


def seconds_of(
    engine: CountingEngine, workload: Workload, rows: int, acceptance: float, new_tokens: int
) -> float:
    """Of one batch. Raises RuntimeError if its tokens are not what the target counts."""
    length = min(PROMPT, workload.prompt_len)
    vocab_size = engine.limits.vocab_size
    firsts = [(row * 1009 + round(1e6 * acceptance)) % (vocab_size // 2) for row in range(rows)]
    prompts = [[(first + i) % vocab_size for i in range(length)] for first in firsts]
    sampling = [
        {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
            "sampling_seed": seed_of(first=first, acceptance=acceptance),
        }
        for first in firsts
    ]
    started = time.perf_counter()
    results = engine.generate(input_ids=prompts, sampling_params=sampling)
    seconds = time.perf_counter() - started
    for first, result in zip(firsts, results, strict=True):
        wanted = [(first + length + i) % vocab_size for i in range(new_tokens)]
        if result["output_ids"] != wanted:
            raise RuntimeError(f"{result['output_ids'][:8]} came; expected {wanted[:8]}")
    return seconds


def rate(engine: CountingEngine, workload: Workload, rows: int, acceptance: float) -> float:
    """Tokens a second of the whole batch."""
    short, long = workload.short_run, workload.long_run
    seconds = [seconds_of(engine, workload, rows, acceptance, tokens) for tokens in (short, long)]
    return rows * (long - short) / (seconds[1] - seconds[0])


def expected_length(acceptance: float, num_steps: int) -> float:
    """Acceptance length of a chain, bonus included."""
    return sum(acceptance**depth for depth in range(num_steps + 1))


def measured(
    engine: CountingEngine,
    workload: Workload,
    rows: int,
    acceptance: float,
    *,
    repeats: int,
    plain_rate: float,
) -> dict[str, Any]:
    """One cell: every fixed shape and the chooser, taking turns; plain_rate: of plain decoding."""
    shapes = engine.limits.shapes
    named: dict[str, SpeculativeConfig | None] = {str(shape): shape for shape in shapes}
    named[ADAPTIVE] = None
    engine.switched.renew()
    for _ in range(WARM_RUNS):
        seconds_of(engine, workload, rows, acceptance, workload.long_run)
    found: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(repeats):
        for name, shape in named.items():
            engine.switched.use(shape)
            found[name].append(rate(engine, workload, rows, acceptance))
    rates = {name: statistics.median(values) for name, values in found.items()}
    rates[PLAIN] = plain_rate
    best = max((name for name in rates if name != ADAPTIVE), key=lambda name: rates[name])
    totals = engine.switched.adaptive.totals
    cell = {
        "rows": rows,
        "acceptance": acceptance,
        "acceptance_length": round(expected_length(acceptance, engine.limits.spec.num_steps), 3),
        "tokens_per_second": {name: round(value, 1) for name, value in rates.items()},
        "all": {name: [round(v, 1) for v in values] for name, values in found.items()},
        "best": best,
        "of_best": round(rates[ADAPTIVE] / rates[best], 4),
        "emitted_of_expected": _ratio(totals.emitted_tokens, totals.expected_tokens),
        "seconds_of_expected": _ratio(totals.measured_seconds, totals.expected_seconds),
        "changes": totals.num_changes,
        "probes": totals.num_probes,
    }
    print(f"{rows:3} rows, {acceptance:4}: {cell['of_best']} of {best}; {rates}", flush=True)
    return cell


def _ratio(came: float, expected: float) -> float | None:
    return round(came / expected, 4) if expected else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, default="llama-3.1-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--acceptances", type=float, nargs="+", default=list(ACCEPTANCES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no cell begins later")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "adaptive_card.json"
    )
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        workload = WORKLOADS[options.model]
        plain = plain_rates(workload, Path(folder), options.batches, repeats=options.repeats)
        engine = start(workload, Path(folder), "chain", batches=options.batches)
        for rows in options.batches:
            for acceptance in options.acceptances:
                if time.monotonic() < deadline:
                    cell = measured(
                        engine,
                        workload,
                        rows,
                        acceptance,
                        repeats=options.repeats,
                        plain_rate=plain[rows],
                    )
                    cells.append(cell)
                    write_result(options.out, {"model": options.model, "cells": cells})
        engine.shutdown()
    print(f"least of the best: {min(cell['of_best'] for cell in cells)}")


if __name__ == "__main__":
    main()
