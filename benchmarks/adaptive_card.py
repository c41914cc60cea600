"""Adaptive draft shapes compared with each fixed shape on a device, at controlled acceptance.

    python -m benchmarks.adaptive_card [--batches 1 8 32 64] [--acceptances 0 0.5 0.9]
    python -m benchmarks.adaptive_card --mode tree [--shapes 0/1/1 3/1/4]
    python -m benchmarks.adaptive_card --model tiny        (a smoke test on a CPU)

One engine with Llama-3.1-8B's shapes, EAGLE-3 chain 3/1/4 and random weights, with an output head
for which the next token is the last one plus 1 (tests/support/counting_dial.py). A draft of each
depth is then accepted with the probability that the request's seed encodes; the head runs in full.
Two runs differ only in the chooser of the shape: the engine's own, or a fixed one. A new chooser in
each cell warms up for WARM_STEPS. Tokens per second are the difference of a long and a short run,
as in h200_table, and medians over alternating repeats, --times as many for the chooser. A plain
engine on the same device alternates with them. Every text is verified.

--mode tree: the largest shape is 3/4/16. The acceptance is that of the first candidate, so of a
chain; a tree accepts more.

--shapes: other candidates than the mode's, in addition to the largest. Programs with filters are
not compiled.

Each shape of a cell has its tokens per row and step (1 for a plain step), and the chooser's runs
the number of steps of each shape, including probes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jspec.messages.plan import StepPlan, StepResult
from jspec.messages.step_options import PLAIN, StepOptions

if __package__ in (
    None,
    "",
):  # started as a file: import `benchmarks` and `jspec` from the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environment import write_result
from benchmarks.workloads import WORKLOADS, Workload
from jspec import Engine
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.engine.building import build_runner
from jspec.engine.weights.loading import LoadedModels, ModelPaths, load_models
from jspec.scheduler.shapes.adaptive_shapes import AdaptiveShapes
from jspec.scheduler.shapes.shape_choice import FixedShape, ShapeChooser, ShapeTotals, StepCosts
from tests.support.counting_dial import COUNTING, counting_weights, seed_of

ROOT = Path(__file__).resolve().parent.parent
ADAPTIVE = "adaptive"
PLAIN_ENGINE = "plain engine"
PROMPT = 256  # or the workload's, if that is shorter
SPARE_TOKENS = 192  # of a row, for pages that are not full and for drafts
LONGEST_BUILD = 300.0  # seconds until all programs are compiled
WARM_STEPS = 500  # at least, of long runs, before a new chooser is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The defaults of a mode. shapes: in addition to the largest; None: the engine's own rule,
    which for a tree has more, each with a program per batch.
    """

    acceptances: tuple[float, ...]
    shapes: tuple[str, ...] | None = None
    result: str


CARDS = {
    "chain": Card(acceptances=(0.0, 0.3, 0.5, 0.7, 0.85, 1.0), result="adaptive_card.json"),
    "tree": Card(
        acceptances=(0.3, 0.6, 0.85),
        shapes=("0/1/1", "3/1/4"),
        result="adaptive_card_tree.json",
    ),
}


def shape_named(name: str, largest: SpeculativeConfig) -> SpeculativeConfig:
    """Return the shape S/K/N of the largest one's drafter. Raises ValueError for another format."""
    steps, topk, most = (int(number) for number in name.split("/"))
    if steps == 0:
        return SpeculativeConfig.plain()
    return replace(largest, num_steps=steps, topk=topk, num_draft_tokens=most)


@dataclass(slots=True)
class Taken:
    """The number of steps of one shape, and all their rows and tokens."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0

    def add(self, other: Taken) -> None:
        self.steps += other.steps
        self.rows += other.rows
        self.tokens += other.tokens

    @property
    def tokens_a_step(self) -> float | None:
        """Tokens per row and step."""
        return _ratio(self.tokens, self.rows)


class Switched:
    """A ShapeChooser that is the engine's own or a fixed one."""

    def __init__(self, limits: ServeLimits, step_costs: StepCosts) -> None:
        self._limits, self._step_costs = limits, step_costs
        self.adaptive = AdaptiveShapes(limits, step_costs=step_costs)
        self._now: ShapeChooser = self.adaptive
        self._taken: dict[str, Taken] = {}

    def use(self, shape: SpeculativeConfig | None) -> None:
        """Use a fixed shape; None: the engine's own chooser. Only while no request is served."""
        self._now = self.adaptive if shape is None else FixedShape(shape)

    def take_turns(self, chooser: ShapeChooser) -> None:
        """Use another chooser. Only while no request is served."""
        self._now = chooser

    def renew(self) -> None:
        """Replace the engine's own chooser by a new one."""
        self.adaptive = AdaptiveShapes(self._limits, step_costs=self._step_costs)
        self._now = self.adaptive

    def taken(self) -> dict[str, Taken]:
        """Return steps by shape since the last call."""
        taken, self._taken = self._taken, {}
        return taken

    @property
    def totals(self) -> ShapeTotals:
        return self._now.totals

    def choose(self, *, num_rows: int, options: StepOptions) -> SpeculativeConfig:
        return self._now.choose(num_rows=num_rows, options=options)

    def read(self, plan: StepPlan, result: StepResult) -> None:
        if not plan.is_prefill:
            taken = self._taken.setdefault(str(plan.shape), Taken())
            rounds = len(result.rounds)
            tokens = sum(int(of_round.num_emitted.sum()) for of_round in result.rounds)
            taken.add(Taken(steps=rounds, rows=rounds * len(plan.rows), tokens=tokens))
        self._now.read(plan, result)

    def timed(self, plan: StepPlan, seconds: float) -> None:
        self._now.timed(plan, seconds)


def load_counting(
    batches: tuple[int, ...],
    names: tuple[str, ...] | None,
    args: EngineArgs,
    paths: ModelPaths,
    /,
    *,
    mesh: Any,
) -> LoadedModels:
    """Load the pair that `args` names, with a counting target and a drafter of controlled
    acceptance, and programs only for those batches and for the named shapes and the largest.
    """
    models = load_models(args, paths, mesh=mesh, drafters=COUNTING)
    target = counting_weights(models.params["target"])
    chunks, shapes = models.config.prefill_buckets, models.config.other_shapes
    if names is not None and shapes:  # an adaptive engine
        shapes = tuple(shape_named(name, models.config.speculative) for name in names)
    config = replace(
        models.config,
        decode_buckets=batches,
        prefill_buckets=tuple(sorted({chunks[len(chunks) // 2], chunks[-1]})),
        other_shapes=shapes,
    )
    return replace(models, config=config, params={**models.params, "target": target})


class CountingEngine(Engine):
    """An engine on `load_counting`, whose chooser can be switched if it is adaptive."""

    switched: Switched

    def __init__(
        self, batches: tuple[int, ...], names: tuple[str, ...] | None, **arguments: Any
    ) -> None:
        self._batches, self._names = batches, names
        # Without log-probabilities, whose programs are the largest.
        arguments |= {"max_running_requests": batches[-1], "disable_logprobs": True}
        super().__init__(**arguments)

    def _build_runner(self, progress: Any) -> Any:
        load = partial(load_counting, self._batches, self._names)
        return build_runner(self.args, progress=progress, load=load)

    def _shapes(self, runner: Any) -> ShapeChooser | None:
        if not self.config.speculative_adaptive:
            return None
        self.switched = Switched(runner.limits, runner.step_costs)
        return self.switched

    @property
    def num_programs(self) -> int:
        return self._runner.num_programs

    def step_costs(self, rows: int) -> Mapping[SpeculativeConfig, float]:
        """Return measured seconds by shape."""
        return self._runner.step_costs(rows, PLAIN)

    def wait_for_programs(self) -> None:
        """Wait until all shapes are compiled and measured, and cancel later programs, which would
        be compiled during the measurement. Raises RuntimeError if they do not become ready.
        """
        runner = self._runner
        wanted = set(self.limits.shapes) if self.limits.other_shapes else set()  # else no costs
        deadline = time.monotonic() + LONGEST_BUILD
        while any(set(runner.step_costs(rows, PLAIN)) != wanted for rows in self._batches):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.num_programs} programs after {LONGEST_BUILD} s")
            time.sleep(0.2)
        runner.stop_growing()


def start(
    workload: Workload,
    folder: Path,
    mode: str,
    *,
    batches: list[int],
    shapes: tuple[str, ...] | None = None,
    **more: Any,
) -> CountingEngine:
    """Start an engine for plain decoding, or an adaptive chain or tree, with all its programs."""
    started = time.monotonic()
    workload.write_configs(folder)
    arguments = workload.arguments(mode, folder, acceptance=1.0)
    del arguments["max_running_requests"]
    each = min(PROMPT, workload.prompt_len) + workload.long_run + SPARE_TOKENS
    # Two engines share the device.
    arguments["max_total_tokens"] = min(arguments["max_total_tokens"], max(batches) * each)
    if arguments.pop("simulate_acceptance", None) is not None:
        arguments["speculative_adaptive"] = True
    engine = CountingEngine(tuple(sorted(batches)), shapes, **arguments, **more)
    engine.wait_for_programs()
    names = ", ".join(map(str, engine.limits.shapes))
    seconds, count = time.monotonic() - started, engine.num_programs
    print(f"{mode}: {names}: {count} programs after {seconds:.1f} s", flush=True)
    return engine


def seconds_of(
    engine: CountingEngine, workload: Workload, rows: int, acceptance: float, new_tokens: int
) -> float:
    """Return the seconds of one batch. Raises RuntimeError if its tokens are wrong."""
    length = min(PROMPT, workload.prompt_len)
    vocab_size = engine.limits.programs.vocab_size
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
    """Return tokens per second of the batch, from the difference of a long and a short run."""
    short, long = workload.short_run, workload.long_run
    seconds = [seconds_of(engine, workload, rows, acceptance, tokens) for tokens in (short, long)]
    return rows * (long - short) / (seconds[1] - seconds[0])


def expected_length(acceptance: float, num_steps: int) -> float:
    return sum(acceptance**depth for depth in range(num_steps + 1))


def measured(
    engine: CountingEngine,
    plain: CountingEngine,
    workload: Workload,
    rows: int,
    acceptance: float,
    *,
    repeats: int,
    times: int,
) -> dict[str, Any]:
    """Measure one cell: plain engine, every fixed shape and the chooser, alternating. times: runs
    of the chooser for each of theirs.
    """
    named: dict[str, SpeculativeConfig | None] = {str(s): s for s in engine.limits.shapes}
    named[ADAPTIVE] = None
    engine.switched.renew()
    seconds_of(plain, workload, rows, acceptance, workload.short_run)
    engine.switched.taken()
    num_steps = 0
    while num_steps < WARM_STEPS:
        seconds_of(engine, workload, rows, acceptance, workload.long_run)
        num_steps += sum(taken.steps for taken in engine.switched.taken().values())
    found: dict[str, list[float]] = {name: [] for name in (PLAIN_ENGINE, *named)}
    used: dict[str, dict[str, Taken]] = {name: {} for name in named}
    for _ in range(repeats):
        found[PLAIN_ENGINE].append(rate(plain, workload, rows, acceptance))
        for name, shape in named.items():
            engine.switched.use(shape)
            engine.switched.taken()
            for _ in range(times if shape is None else 1):
                found[name].append(rate(engine, workload, rows, acceptance))
            for other, steps in engine.switched.taken().items():
                used[name].setdefault(other, Taken()).add(steps)
    rates = {name: statistics.median(values) for name, values in found.items()}
    best = max((name for name in rates if name != ADAPTIVE), key=lambda name: rates[name])
    totals = engine.switched.adaptive.totals
    return {
        "rows": rows,
        "acceptance": acceptance,
        "chain_acceptance_length": round(
            expected_length(acceptance, engine.limits.draft_shape.num_steps), 3
        ),
        "tokens_per_second": {name: round(value, 1) for name, value in rates.items()},
        "all": {name: [round(v, 1) for v in values] for name, values in found.items()},
        "best": best,
        "of_best": round(rates[ADAPTIVE] / rates[best], 4),
        "tokens_a_step": {
            name: used[name][name].tokens_a_step for name in named if name != ADAPTIVE
        },
        "measured_ms": {
            str(shape): round(1e3 * seconds, 3)
            for shape, seconds in engine.step_costs(rows).items()
        },
        "chosen": {
            name: {"steps": steps.steps, "tokens_a_step": steps.tokens_a_step}
            for name, steps in used[ADAPTIVE].items()
        },
        "emitted_of_expected": _ratio(totals.emitted_tokens, totals.expected_tokens),
        "seconds_of_expected": _ratio(totals.measured_seconds, totals.expected_seconds),
        "changes": totals.num_changes,
        "probes": totals.num_probes,
    }


def _ratio(came: float, expected: float) -> float | None:
    return round(came / expected, 4) if expected else None


def summary(cell: dict[str, Any], *, seconds: float) -> str:
    """Return a line for each shape. seconds: since the start of the benchmark."""
    lines = [
        f"{seconds:5.0f} s: {cell['rows']} rows, acceptance {cell['acceptance']}: "
        f"{cell['of_best']} of {cell['best']}"
    ]
    for name, value in cell["tokens_per_second"].items():
        length = cell["tokens_a_step"].get(name)
        chosen = cell["chosen"].get(name)
        lines.append(
            f"    {name:22} {value:9.1f} tokens/s"
            + ("" if length is None else f", {length} a row and step")
            + ("" if chosen is None else f", chosen {chosen['steps']} times")
        )
    return "\n".join(lines)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options, with the mode's defaults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKLOADS, default="llama-3.1-8b")
    parser.add_argument("--mode", choices=CARDS, default="chain")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--acceptances", type=float, nargs="+")
    parser.add_argument("--shapes", nargs="+", metavar="S/K/N", help="beside the largest")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--times", type=int, default=3, help="runs of the chooser")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no cell begins later")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    card = CARDS[options.mode]
    options.acceptances = options.acceptances or list(card.acceptances)
    options.shapes = card.shapes if options.shapes is None else tuple(options.shapes)
    options.out = options.out or ROOT / "benchmarks" / "results" / card.result
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    started = time.monotonic()
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        workload, folder = WORKLOADS[options.model], Path(name)
        batches = options.batches
        plain = start(workload, folder, "plain", batches=batches)
        engine = start(workload, folder, options.mode, batches=batches, shapes=options.shapes)
        for rows in batches:
            for acceptance in options.acceptances:
                if time.monotonic() - started > options.seconds:
                    continue
                cell = measured(
                    engine,
                    plain,
                    workload,
                    rows,
                    acceptance,
                    repeats=options.repeats,
                    times=options.times,
                )
                cells.append(cell)
                result = {"model": options.model, "mode": options.mode, "cells": cells}
                write_result(options.out, result)
                print(summary(cell, seconds=time.monotonic() - started), flush=True)
        engine.shutdown()
        plain.shutdown()
    if cells:
        print(f"least of the best: {min(cell['of_best'] for cell in cells)}")


if __name__ == "__main__":
    main()
