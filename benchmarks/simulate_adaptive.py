"""Adaptive draft shapes in virtual time: the real chooser, with a card that is a table of costs.

    python -m benchmarks.simulate_adaptive [--out benchmarks/results/simulate_adaptive.json]

Batches of 1 to 64 rows that always decode. Step costs are a card's, as recorded by
benchmarks/adaptive_card.py and benchmarks/h200_table.py; acceptance is controlled as in
tests/support/counting_dial.py, constant or changing halfway. Each cell has the tokens per second of
the chooser, from its first step on, and of each fixed shape, including 0/1/1 (plain steps). Results
are read one step late, as at overlap depth 1.

The chooser is given costs like those that a runner measures when a program becomes ready: off by up
to MEASURING, and for some cells measured in a slow period. Under load costs differ by up to
UNDER_LOAD, and every step grows with the texts of its rows. A step after one of another shape takes
longer, and so does a draft prefill of the tokens of plain steps.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig
from jspec.messages.plan import RoundResult, RowRef, StepKind, StepPlan, StepResult, StepRun
from jspec.messages.step_options import PLAIN
from jspec.scheduler.shapes.adaptive_shapes import AdaptiveShapes
from jspec.scheduler.shapes.shape_choice import FixedShape, ShapeChooser
from jspec.spec.indexing import powers_of_two
from tests.support.counting_dial import LEAST_SHARE, OTHERS, SPREAD
from tests.support.flat_limits import flat_limits

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 8, 32, 64)
CHAIN_DIALS = ((0.0,), (0.1,), (0.2,), (0.3,), (0.5,), (0.7,), (0.85,), (1.0,))
TREE_DIALS = ((0.0,), (0.3,), (0.6,), (0.85,), (1.0,))
CHANGES = ((0.1, 0.9), (0.9, 0.1))
DRAWN_STEPS = 400  # of each shape and acceptance, drawn in any order
NOISE = 0.01  # of a step's time, either way
MEASURING = 0.02  # of a cost measured at ready time, either way
UNDER_LOAD = 0.04  # of a shape's cost, either way, from then to serving
# Observed on an H100's host: occasionally some consecutive steps of any shape are longer.
SLOW_EVERY, SLOW_STEPS, SLOW_MS = 200, 6, 20.0  # mean interval, length; largest delay
# Attention reads the rows' KV, so a step becomes longer with their texts, until other rows replace
# them (Llama-3.1-8B in bf16: 131 kB per token, at 3 TB/s).
TEXT_TOKENS, TOKEN_MS = 320, 131072 / 3e9
SWITCH_MS = 4.0  # extra, of a step after another shape's, on an H200 (docs/adaptive.md)
# Of a draft prefill: the drafter's weights are read and multiplied by a page of tokens per row.
CATCH_UP_MS, CATCH_UP_ROW_MS = 0.25, 0.0625


def spec(steps: int, topk: int, nodes: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        algorithm=Algorithm.EAGLE3, num_steps=steps, topk=topk, num_draft_tokens=nodes
    )


PLAIN_STEP = SpeculativeConfig.plain()
CHAIN, TREE = spec(3, 1, 4), spec(3, 4, 16)
Milliseconds = Mapping[tuple[int, SpeculativeConfig], float]  # by rows and shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The shapes that one card's engine can run, smallest first, and their costs."""

    shapes: tuple[SpeculativeConfig, ...]
    milliseconds: Milliseconds

    @property
    def limits(self) -> ServeLimits:
        return flat_limits(
            draft_shape=self.shapes[-1],
            other_shapes=self.shapes[:-1],
            num_slots=64,
            num_pages=4096,
            page_size=64,
            context_length=4096,
            decode_buckets=powers_of_two(1, 64),
            prefill_buckets=(1024,),
            prefill_rows=16,
        )


def recorded(name: str, shapes: tuple[SpeculativeConfig, ...]) -> Card:
    """Return the card of a result of benchmarks/adaptive_card.py; medians over its acceptances."""
    found: dict[tuple[int, SpeculativeConfig], list[float]] = {}
    for cell in json.loads((RESULTS / name).read_text())["cells"]:
        for shape in shapes:
            tokens, rate = cell["tokens_a_step"][str(shape)], cell["tokens_per_second"][str(shape)]
            found.setdefault((cell["rows"], shape), []).append(1e3 * cell["rows"] * tokens / rate)
    milliseconds = {key: statistics.median(values) for key, values in found.items()}
    return Card(shapes=shapes, milliseconds=milliseconds)


def of_table() -> Card:
    """Return an H200 by h200_table.json. It has no 1/1/2, whose cost is interpolated between
    plain's one node and the chain's four.
    """
    cells = json.loads((RESULTS / "h200_table.json").read_text())["cells"]
    found: dict[tuple[int, SpeculativeConfig], float] = {}
    for rows in BATCHES:
        plain, chain = (cells[f"{name}/{rows}"]["ms_per_step"] for name in ("plain", "chain"))
        found |= {(rows, PLAIN_STEP): plain, (rows, CHAIN): chain}
        found[rows, spec(1, 1, 2)] = plain + (chain - plain) / 3
    return Card(shapes=(PLAIN_STEP, spec(1, 1, 2), CHAIN), milliseconds=found)


def cards() -> dict[str, Card]:
    chains, trees = (PLAIN_STEP, spec(1, 1, 2), CHAIN), (PLAIN_STEP, CHAIN, TREE)
    return {
        "H100 chain": recorded("adaptive_card_h100_rows.json", chains),
        "H200 chain": of_table(),
        "H100 tree": recorded("adaptive_card_h100_tree.json", trees),
        "H200 tree": recorded("adaptive_card_tree.json", trees),
    }


def shares(sure: np.ndarray, topk: int) -> np.ndarray:
    """Return [.., K]: the probability of each candidate, `sure` of the first."""
    return sure[..., None] * (OTHERS * (1 - sure[..., None])) ** np.arange(topk)


@functools.cache
def drawn(acceptance: float, shape: SpeculativeConfig, rows: int, seed: int) -> np.ndarray:
    """Return i32[DRAWN_STEPS, rows]: tokens that verifications of this shape emit."""
    if shape.is_plain:
        return np.ones((DRAWN_STEPS, rows), np.int32)
    rng = np.random.default_rng(seed)
    count, K = DRAWN_STEPS * rows, shape.topk
    reach = SPREAD * min(acceptance, 1 - acceptance)
    beams, right = np.zeros((count, 1)), np.ones((count, 1), bool)
    all_scores, all_right = [], []
    for _ in range(shape.num_steps):
        # After right tokens all beams of a row are one; after a wrong one each has its own draws.
        of_true = rng.random((count, 1))
        draws = np.where(right, of_true, rng.random(right.shape))
        likely = shares(acceptance + reach * (2 * draws - 1), K)
        rank = (rng.random((count, 1, 1)) >= np.cumsum(likely, axis=-1)).sum(axis=-1)
        hits = right[..., None] & (np.arange(K) == rank[..., None])
        scores = beams[..., None] + np.log(np.maximum(likely, LEAST_SHARE))
        scores, hits = scores.reshape(count, -1), hits.reshape(count, -1)
        all_scores.append(scores)
        all_right.append(hits)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :K]
        beams, right = (np.take_along_axis(x, best, 1) for x in (scores, hits))
    scores, hits = np.concatenate(all_scores, axis=1), np.concatenate(all_right, axis=1)
    best = np.argsort(-scores, axis=1, kind="stable")[:, : shape.num_draft_tokens - 1]
    hits = np.take_along_axis(hits, best, 1)
    return (1 + hits.sum(axis=1)).astype(np.int32).reshape(DRAWN_STEPS, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """rows that decode for num_steps steps on a card, an equal part of them at each acceptance."""

    card: Card
    rows: int
    dials: tuple[float, ...]
    num_steps: int
    seed: int = 0

    def cost(self, shape: SpeculativeConfig) -> float:
        """Return the milliseconds of a step under load, without the growth by texts."""
        luck = random.Random(f"{shape} {self.seed} {self.rows}").uniform(-1, 1)
        return self.card.milliseconds[self.rows, shape] * (1 + UNDER_LOAD * luck)

    def measured(self) -> dict[SpeculativeConfig, float]:
        """Return seconds by shape, as a runner measures them."""
        luck = random.Random(self.seed)
        found = {}
        for shape in self.card.shapes:
            ms = self.card.milliseconds[self.rows, shape]
            ms *= 1 + luck.uniform(-MEASURING, MEASURING)
            is_slow = luck.random() * SLOW_EVERY < SLOW_STEPS / 2  # may affect all measuring runs
            found[shape] = (ms + is_slow * luck.uniform(0, SLOW_MS / 4)) / 1e3
        return found

    def emitted(self, step: int, shape: SpeculativeConfig, rng: random.Random) -> np.ndarray:
        dial = self.dials[step * len(self.dials) // self.num_steps]
        found: np.ndarray = drawn(dial, shape, self.rows, self.seed)[rng.randrange(DRAWN_STEPS)]
        return found

    def run(self, chooser: ShapeChooser) -> tuple[float, dict[str, int]]:
        """Return (tokens per second, number of steps by shape)."""
        limits, rows = self.card.limits, self.rows
        costs = {shape: self.cost(shape) for shape in self.card.shapes}
        used: dict[str, int] = {}
        refs = tuple(RowRef(slot, 1) for slot in range(1, rows + 1))
        luck, draws = random.Random(self.seed), random.Random(self.seed)
        pending, now, tokens, slow = 0, 0.0, 0, 0
        unread: deque[tuple[StepPlan, StepResult, float]] = deque()
        before: SpeculativeConfig | None = None
        for step in range(self.num_steps):
            shape = chooser.choose(num_rows=rows, options=PLAIN)
            used[str(shape)] = used.get(str(shape), 0) + 1
            recalled = pending if pending > (limits.max_pending - 1 if shape.is_plain else 0) else 0
            pending = (pending - recalled + 1) if shape.is_plain else 0
            plan = StepPlan(
                step=step,
                runs=(StepRun(StepKind.DECODE, shape),),
                options=PLAIN,
                rows=refs,
                pending=(recalled,) * rows if recalled else (),
            )
            emitted = self.emitted(step, shape, draws)
            tokens += int(emitted.sum())
            ms = costs[shape] * luck.uniform(1 - NOISE, 1 + NOISE)
            ms += SWITCH_MS * (before not in (None, shape))
            ms += TOKEN_MS * rows * (tokens / rows % TEXT_TOKENS)
            ms += max(CATCH_UP_MS, CATCH_UP_ROW_MS * rows) * (recalled > 0)
            slow = SLOW_STEPS if luck.random() * SLOW_EVERY < 1 else max(slow - 1, 0)
            ms += luck.uniform(0, SLOW_MS) * (slow > 0)
            before, now = shape, now + ms
            result = RoundResult(num_emitted=emitted, ids=np.zeros((rows, 1), np.int32))
            unread.append((plan, StepResult(step=step, rounds=(result,)), ms / 1e3))
            if len(unread) > 1:
                read_plan, read_result, took = unread.popleft()
                chooser.timed(read_plan, took)
                chooser.read(read_plan, read_result)
        return 1e3 * tokens / now, used

    def result(self) -> dict[str, Any]:
        """Return the chooser compared with each fixed shape."""
        limits, costs = self.card.limits, self.measured()
        chooser = AdaptiveShapes(limits, step_costs=lambda *_: costs)
        adaptive, used = self.run(chooser)
        fixed = {str(shape): self.run(FixedShape(shape))[0] for shape in self.card.shapes}
        best = max(fixed, key=lambda name: fixed[name])
        totals = chooser.totals
        return {
            "rows": self.rows,
            "dials": self.dials,
            "tokens_per_second": round(adaptive, 1),
            "fixed": {name: round(value, 1) for name, value in fixed.items()},
            "best": best,
            "of_best": round(adaptive / fixed[best], 4),
            "steps": used,
            "changes": totals.num_changes,
            "probes": totals.num_probes,
            "expected_of_emitted": round(totals.expected_tokens / totals.emitted_tokens, 4),
            "expected_of_measured_seconds": round(
                totals.expected_seconds / max(totals.measured_seconds, 1e-9), 4
            ),
        }


def every_cell(*, num_steps: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the cells of each card."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, card in cards().items():
        dials = CHAIN_DIALS if card.shapes[-1] == CHAIN else TREE_DIALS
        found[name] = [
            Cell(card=card, rows=rows, dials=each, num_steps=num_steps, seed=seed).result()
            for rows, each in itertools.product(BATCHES, dials + CHANGES)
        ]
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000, help="decode steps of a cell")
    parser.add_argument("--seed", type=int, default=0, help="of draws, noise and mistaken costs")
    parser.add_argument("--out", type=Path, help="where the JSON goes; the standard output")
    args = parser.parse_args(argv)
    found = every_cell(num_steps=args.steps, seed=args.seed)
    worst = {name: min(cells, key=lambda c: c["of_best"]) for name, cells in found.items()}
    result = {"num_steps": args.steps, "seed": args.seed, "worst": worst, "cells": found}
    text = json.dumps(result, indent=1) + "\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
