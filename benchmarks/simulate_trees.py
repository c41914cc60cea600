"""The choice of shapes of a tree in virtual time: the real chooser, a card that is only a table.

    python -m benchmarks.simulate_trees [--out benchmarks/results/simulate_trees.json]

A tree 3/4/16 with plain steps, 3/1/4 and 3/4/8 beside it, batches of 1 to 64 rows that always
decode. What a shape costs is one H200's (adaptive_card_tree.json, the median over its
acceptances; 3/4/8 costs what eight nodes a row of 3/4/16 did there, 3 to 7% more than its own);
what is accepted follows the dial of tests/support/counting_dial.py, whose head is
more or less sure and says so by its scores, so that dropping the nodes that score least loses
little. Of each cell: tokens a second of the chooser, its first steps included, and of the best
shape held fixed.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate_shapes import catch_up_ms, limits_of, parsed, put, run
from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig
from jspec.scheduler.shapes.adaptive_shapes import AdaptiveShapes
from jspec.scheduler.shapes.shape_choice import FixedShape, ShapeChooser
from tests.support.counting_dial import LEAST_SHARE, OTHERS, SPREAD

TREE = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=4, num_draft_tokens=16)
OTHER_SHAPES = (
    SpeculativeConfig.plain(),
    replace(TREE, topk=1, num_draft_tokens=4),
    replace(TREE, num_draft_tokens=8),
)
STANDS_FOR = {"3/4/16 of 8 a row": "3/4/8"}  # a shape that was removed since (decision 29)
TABLE = Path(__file__).parent / "results" / "adaptive_card_tree.json"
BATCHES = (1, 8, 32, 64)
DIALS = (0.0, 0.3, 0.6, 0.85, 1.0)
DRAWN_STEPS = 400  # which then are dealt in any order


@dataclass(frozen=True, slots=True)
class TreeCosts:
    """Milliseconds of a step by rows and the shape's name."""

    milliseconds: Mapping[tuple[int, str], float]

    @classmethod
    def measured(cls) -> TreeCosts:
        """As benchmarks/results/adaptive_card_tree.json has it."""
        found: dict[tuple[int, str], list[float]] = {}
        for cell in json.loads(TABLE.read_text())["cells"]:
            for name, tokens in cell["tokens_a_step"].items():
                ms = 1e3 * cell["rows"] * tokens / cell["tokens_per_second"][name]
                found.setdefault((cell["rows"], STANDS_FOR.get(name, name)), []).append(ms)
        return cls({key: statistics.median(values) for key, values in found.items()})

    def step(self, shape: SpeculativeConfig, rows: int) -> float:
        return self.milliseconds[rows, str(shape)]

    def catch_up(self, rows: int) -> float:
        return catch_up_ms(rows)


def shares(sure: np.ndarray, topk: int) -> np.ndarray:
    """[.., K]: how likely each candidate is right, where the first is so to the share `sure`."""
    return sure[..., None] * (OTHERS * (1 - sure[..., None])) ** np.arange(topk)


def drawn(
    acceptance: float, shape: SpeculativeConfig, rows: int, rng: np.random.Generator
) -> np.ndarray:
    """i32[DRAWN_STEPS, rows]: what verifications of such trees emit."""
    if shape.is_plain:
        return np.ones((DRAWN_STEPS, rows), np.int32)
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


class DrawnTrees:
    """Steps of each shape, dealt anew."""

    def __init__(self, acceptance: float, limits: ServeLimits, rows: int, *, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._tables = {shape: drawn(acceptance, shape, rows, rng) for shape in limits.shapes}
        self._rng = np.random.default_rng(seed)

    def emitted(self, step: int, shape: SpeculativeConfig) -> np.ndarray:
        del step
        found: np.ndarray = self._tables[shape][self._rng.integers(DRAWN_STEPS)]
        return found

    def mean(self, shape: SpeculativeConfig) -> float:
        """Tokens a row that a step emits on average."""
        return float(self._tables[shape].mean())


def limits_of_tree() -> ServeLimits:
    return replace(limits_of(), spec=TREE, other_shapes=OTHER_SHAPES)


def cell(
    rows: int, acceptance: float, *, num_steps: int, table: TreeCosts, seed: int = 0
) -> dict[str, Any]:
    """The chooser beside each shape held fixed."""
    limits = limits_of_tree()

    def tried(who: ShapeChooser) -> tuple[float, dict[str, int]]:
        emitting = DrawnTrees(acceptance, limits, rows, seed=seed)
        return run(who, limits, rows=rows, emitting=emitting, num_steps=num_steps, table=table)

    adaptive, used = tried(AdaptiveShapes(limits, ready=lambda *_: limits.shapes))
    fixed = {str(shape): tried(FixedShape(shape))[0] for shape in limits.shapes}
    best = max(fixed, key=lambda name: fixed[name])
    return {
        "rows": rows,
        "acceptance": acceptance,
        "tokens_per_second": round(adaptive, 1),
        "fixed": {name: round(value, 1) for name, value in fixed.items()},
        "best": best,
        "of_best": round(adaptive / fixed[best], 4),
        "steps": used,
    }


def main(argv: list[str] | None = None) -> None:
    args, table = parsed(__doc__, argv), TreeCosts.measured()
    cells = [
        cell(rows, acceptance, num_steps=args.steps, table=table)
        for rows, acceptance in itertools.product(BATCHES, DIALS)
    ]
    worst = min(cells, key=lambda found: found["of_best"])
    put({"num_steps": args.steps, "worst": worst, "cells": cells}, args.out)


if __name__ == "__main__":
    main()
