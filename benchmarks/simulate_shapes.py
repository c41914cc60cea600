"""The choice of shapes in virtual time: the real chooser, a card that is only a table of costs.

    python -m benchmarks.simulate_shapes [--out benchmarks/results/simulate_shapes.json]

Batches of 1 to 64 rows that always decode; what a shape costs is one H200's (h200_table.json:
plain and chain 3/1/4), between them in proportion to the tokens that a step runs, since 1/1/2 was
not measured; what is accepted follows the dial's own draws (tests/support/dial_drafter.py), so that
a draft is accepted where the true token of its position was guessed, after all before it. The
acceptance length of 3/1/4 goes from 1 to 4, held for a whole run or changing halfway.

Of each cell: tokens a second of the chooser, and of the best shape held fixed; plain is one of
them. Steps are read one step late, as at overlap depth 1. The first step of a program after another
one takes longer.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import random
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig
from jspec.config.shape_sets import shapes_for
from jspec.messages.features import PLAIN
from jspec.messages.plan import RoundResult, RowRef, StepKind, StepPlan, StepResult
from jspec.scheduler.shapes.adaptive_shapes import AdaptiveShapes
from jspec.scheduler.shapes.shape_choice import FixedShape, ShapeChooser
from jspec.spec.indexing import powers_of_two
from tests.support.dial_drafter import dial_rank

CHAIN = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=1, num_draft_tokens=4)
TABLE = Path(__file__).parent / "results" / "h200_table.json"
BATCHES = (1, 2, 4, 8, 16, 32, 64)
# Of the dial: probability that a draft is the true token, by acceptance length of 3/1/4.
DIALS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CHANGES = ((0.1, 0.9), (0.9, 0.1))
POSITIONS = 4096  # of the dial's draws, which then repeat
NOISE = 0.01  # of a step's time, either way
COLD_RUNS, COLD_MS = 2, 10.0  # of a program: how many of its first runs are longer, and by how much
# Seen on an H100's host: now and then some steps in a row are longer, whatever their shape.
SLOW_EVERY, SLOW_STEPS, SLOW_MS = 200, 6, 20.0  # steps from one on average; how many; up to so much
# Rows read what they have written: a step is longer by so much once they have made so many tokens;
# then others take their place (Llama-3.1-8B in bf16: 131 kB a token, at 3 TB/s).
TEXT_TOKENS, TOKEN_MS = 320, 131072 / 3e9
SWITCH_MS = 4.0  # of a step after another program's, on top: seen on an H200 (docs/adaptive.md)
# Of telling the drafter: its weights are read, and every row multiplies a page of tokens by them.
# So much it takes at 64 rows by what 0/1/1 held fixed loses to an engine that never drafts.
CATCH_UP_MS, CATCH_UP_ROW_MS = 0.25, 0.0625


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds of a step: (rows, ms), ascending, of plain and of 3/1/4."""

    plain: tuple[tuple[int, float], ...]
    chain: tuple[tuple[int, float], ...]

    @classmethod
    def measured(cls) -> CostTable:
        """As benchmarks/results/h200_table.json has it."""
        cells = json.loads(TABLE.read_text())["cells"]

        def of(name: str) -> tuple[tuple[int, float], ...]:
            return tuple((b, cells[f"{name}/{b}"]["ms_per_step"]) for b in (1, 8, 32, 64))

        return cls(of("plain"), of("chain"))

    def step(self, shape: SpeculativeConfig, rows: int) -> float:
        """In proportion to the nodes between plain's one and the chain's four."""
        plain, chain = at(self.plain, rows), at(self.chain, rows)
        return plain + (chain - plain) * (shape.num_draft_tokens - 1) / 3

    def catch_up(self, rows: int) -> float:
        return catch_up_ms(rows)


def catch_up_ms(rows: int) -> float:
    return max(CATCH_UP_MS, CATCH_UP_ROW_MS * rows)


def at(points: tuple[tuple[int, float], ...], x: int) -> float:
    """On the line between the two nearest."""
    sizes = [size for size, _ in points]
    i = min(max(bisect.bisect_left(sizes, x), 1), len(sizes) - 1)
    (low, less), (high, more) = points[i - 1], points[i]
    return less + (more - less) * (x - low) / (high - low)


def dial_hits(acceptance: float, rows: int) -> np.ndarray:
    """bool[rows, POSITIONS]: whether a chain of the dial guesses the token of each position."""
    seeds = np.arange(1, rows + 1, dtype=np.uint32)[:, None]
    positions = np.arange(POSITIONS, dtype=np.uint32)[None]
    return np.asarray(dial_rank(seeds, positions, topk=1, acceptance=acceptance)) == 0


def limits_of() -> ServeLimits:
    return ServeLimits(
        spec=CHAIN,
        other_shapes=shapes_for(CHAIN)[:-1],
        num_slots=64,
        num_pages=4096,
        page_size=64,
        context_length=4096,
        decode_buckets=powers_of_two(1, 64),
        prefill_buckets=(1024,),
        prefill_rows=16,
    )


class DialledChains:
    """What chains emit: an equal part of `num_steps` steps at each dial."""

    def __init__(self, rows: int, dials: tuple[float, ...], num_steps: int) -> None:
        self._hits = [dial_hits(dial, rows) for dial in dials]
        self._lengths, self._num_steps = np.zeros(rows, np.int64), num_steps

    def emitted(self, step: int, shape: SpeculativeConfig) -> np.ndarray:
        hit = self._hits[step * len(self._hits) // self._num_steps]
        ahead = (self._lengths[:, None] + np.arange(shape.num_steps)) % POSITIONS
        every_row = np.arange(len(hit))[:, None]
        accepted = np.cumprod(hit[every_row, ahead], axis=1).sum(axis=1)
        self._lengths += accepted + 1
        return (accepted + 1).astype(np.int32)


class Costs(Protocol):
    """Milliseconds."""

    def step(self, shape: SpeculativeConfig, rows: int) -> float: ...

    def catch_up(self, rows: int) -> float:
        """Of telling the drafter what plain steps made."""
        ...


class Emitting(Protocol):
    """i32[rows] of a step of this shape."""

    def emitted(self, step: int, shape: SpeculativeConfig) -> np.ndarray: ...


def run(
    chooser: ShapeChooser,
    limits: ServeLimits,
    *,
    rows: int,
    emitting: Emitting,
    num_steps: int,
    table: Costs,
) -> tuple[float, dict[str, int]]:
    """Tokens a second over `num_steps` steps, and how many steps were of which shape."""
    used: dict[str, int] = {}
    refs = tuple(RowRef(slot, 1) for slot in range(1, rows + 1))
    noise, owed, now, tokens = random.Random(0), 0, 0.0, 0
    unread: deque[tuple[StepPlan, StepResult, float]] = deque()
    before: SpeculativeConfig | None = None
    slow = 0  # steps that are left of a slow moment
    for step in range(num_steps):
        shape = chooser.choose(num_rows=rows, features=PLAIN)
        used[str(shape)] = used.get(str(shape), 0) + 1
        room = limits.deferred_tokens - 1 if shape.is_plain else 0
        told = owed if owed > room else 0
        plan = StepPlan(
            step=step,
            kind=StepKind.DECODE,
            features=PLAIN,
            rows=refs,
            shape=shape,
            owed=(told,) * rows if told else (),
        )
        owed = (owed - told + 1) if shape.is_plain else 0
        emitted = emitting.emitted(step, shape)
        tokens += int(emitted.sum())
        seconds = table.step(shape, rows) * noise.uniform(1 - NOISE, 1 + NOISE)
        seconds += COLD_MS * (used[str(shape)] <= COLD_RUNS)
        seconds += SWITCH_MS * (shape != before)
        seconds += TOKEN_MS * rows * (tokens / rows % TEXT_TOKENS)
        slow = SLOW_STEPS if noise.random() * SLOW_EVERY < 1 else max(slow - 1, 0)
        seconds += noise.uniform(0, SLOW_MS) * (slow > 0)
        before = shape
        if told:
            seconds += table.catch_up(rows)
        now += seconds
        result = RoundResult(num_emitted=emitted, ids=np.zeros((rows, 1), np.int32))
        unread.append((plan, StepResult(step=step, rounds=(result,)), seconds / 1e3))
        if len(unread) > 1:
            read_plan, read_result, took = unread.popleft()
            chooser.timed(read_plan, took)
            chooser.read(read_plan, read_result)
    return 1e3 * tokens / now, used


def cell(
    rows: int, dials: tuple[float, ...], *, num_steps: int, table: CostTable
) -> dict[str, Any]:
    """The chooser beside each shape held fixed."""
    limits = limits_of()
    chooser = AdaptiveShapes(limits, ready=lambda *_: limits.shapes)

    def tried(who: ShapeChooser) -> tuple[float, dict[str, int]]:
        emitting = DialledChains(rows, dials, num_steps)
        how: dict[str, Any] = {"rows": rows, "num_steps": num_steps, "table": table}
        return run(who, limits, emitting=emitting, **how)

    adaptive, used = tried(chooser)
    fixed = {str(shape): tried(FixedShape(shape))[0] for shape in limits.shapes}
    best = max(fixed, key=lambda name: fixed[name])
    totals = chooser.totals
    return {
        "rows": rows,
        "dials": dials,
        "tokens_per_second": round(adaptive, 1),
        "fixed": {name: round(value, 1) for name, value in fixed.items()},
        "best": best,
        "of_best": round(adaptive / fixed[best], 4),
        "steps": used,
        "changes": totals.num_changes,
        "expected_of_emitted": round(totals.expected_tokens / totals.emitted_tokens, 4),
        "expected_of_measured_seconds": round(totals.expected_seconds / totals.measured_seconds, 4),
    }


def table_of(*, num_steps: int) -> dict[str, Any]:
    """Every cell, and the worst of them."""
    table = CostTable.measured()
    dials = [(dial,) for dial in DIALS] + list(CHANGES)
    cells = [
        cell(rows, each, num_steps=num_steps, table=table)
        for rows, each in itertools.product(BATCHES, dials)
    ]
    worst = min(cells, key=lambda found: found["of_best"])
    return {"num_steps": num_steps, "worst": worst, "cells": cells}


def parsed(doc: str, argv: list[str] | None) -> argparse.Namespace:
    """steps and out of a simulation's command line."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--steps", type=int, default=4000, help="decode steps of a cell")
    parser.add_argument("--out", type=Path, help="where the JSON goes; the standard output")
    return parser.parse_args(argv)


def put(result: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(result, indent=1) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text)


def main(argv: list[str] | None = None) -> None:
    args = parsed(__doc__, argv)
    put(table_of(num_steps=args.steps), args.out)


if __name__ == "__main__":
    main()
