"""How many nodes a row may verify before a step takes 1.1 and 1.25 times a plain step.

With few rows a step is bound by reading weights, so more tokens cost little until the sums between
devices, attention, or the products themselves take longer than that. Everything but attention
depends on the tokens of a step, rows times nodes: a few steps are compiled, and others lie between.
Attention is simulated for the rows. The steps verify drafts that are looked up (NGRAM), so no draft
model is in them: a head's own forwards come on top.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.tpu_cycles.bundles import read
from benchmarks.tpu_cycles.chips import chip_of
from benchmarks.tpu_cycles.kernels import compile_case, listing
from benchmarks.tpu_cycles.scalar_core import Core, Program, Words
from benchmarks.tpu_cycles.steps import LAYERS, MEAN_CONTEXT, dump, estimate, slug
from benchmarks.tpu_programs import Job
from tests.engine import step_compile

ROWS, MOST_NODES = (1, 4, 8), 64
RATIOS = (1.1, 1.25)
SHOWN = (1, 4, 8, 16, 32, 64)
MODEL = "llama-3.1-8b"
COMPILED = ((1, 1), (8, 1), (1, 64), (8, 16), (8, 32), (8, 64))  # rows, nodes
KERNELS = {
    1: "rows, 8b tp4 R 1 page 64",
    4: "rows, 8b tp4 R 4 page 64",
    16: "rows, 8b tp4 tree of 16",
    64: "rows, 8b tp4 tree of 64",
}
BATCH = 64  # of the kernels' shapes; rows beyond the step's are empty

Points = Sequence[tuple[int, float]]


def between(points: Points, x: float) -> float:
    """Return the value at x on the line through the points.

    In:  [(1, 2.0), (64, 8.3)], 11    Out: 3.0
    """
    at = min(max(bisect_right([point for point, _ in points], x), 1), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (x - left) / (right - left)


def crossing(points: Points, limit: float) -> float | None:
    """Return the first x whose value is `limit`; None: all are lower.

    In:  [(1, 1.0), (16, 1.2), (64, 1.6)], 1.1    Out: 8.5
    """
    for (left, low), (right, high) in pairwise(points):
        if low <= limit < high:
            return left + (right - left) * (limit - low) / (high - low)
    return None


def attention_us(topology: str, directory: Path) -> dict[int, Points]:
    """Return, by rows, microseconds of one layer's attention by nodes."""
    found: dict[int, list[tuple[int, float]]] = {rows: [] for rows in ROWS}
    chip = chip_of(topology)
    for nodes, case in KERNELS.items():
        place = directory / f"{chip.name}_attention_{nodes}"
        if not place.exists():
            place.mkdir(parents=True)
            compile_case(case, topology, place)
        program = Program(read(listing(place, f"paged_attention_rows_{nodes}")))

        def us(rows: int, program: Program = program, nodes: int = nodes) -> float:
            committed = [MEAN_CONTEXT] * rows + [0] * (BATCH - rows)
            limits = [n + nodes if n else 0 for n in committed]
            operands: dict[int, Words] = {0: committed, 1: limits, 2: [0] * BATCH, 4: 1}
            return Core(program, chip, operands).run().us(chip)

        empty = us(0)  # the rows of the kernel that the step does not have
        for rows in ROWS:
            found[rows].append((nodes, us(rows) - empty * (BATCH - rows) / BATCH))
    return dict(found)


def without_attention(topology: str, directory: Path, *, evaluate: bool) -> Points:
    """Return milliseconds of a step without attention by its tokens, from the compiled steps."""
    found: dict[int, float] = {}
    for rows, nodes in COMPILED:
        job = Job(
            model=MODEL,
            topology=topology,
            shape="0/1/1" if nodes == 1 else f"{nodes - 1}/1/{nodes}",
            program=f"decode B={rows}",
            layers=LAYERS,
            rows=rows,
            drafter="ngram" if nodes > 1 else "eagle3",
        )
        dump(job, directory / slug(job), evaluate=evaluate)
        step = estimate(job, directory / slug(job), {})
        attention = step["kernels"][f"paged_attention_rows_{nodes}"]["us"]
        depth = step_compile.MODELS[MODEL].num_layers
        found[rows * nodes] = step["ms"] - depth * attention / 1e3
    return sorted(found.items())


def find(topology: str, directory: Path, *, evaluate: bool) -> dict[int, dict[str, Any]]:
    """Return, by rows, milliseconds and ratios by nodes, and the nodes of each of RATIOS."""
    rest = without_attention(topology, directory, evaluate=evaluate)
    depth = step_compile.MODELS[MODEL].num_layers
    cells = {}
    for rows, attention in attention_us(topology, directory).items():
        # The products of a single token become a multiplication and a sum, which takes longer.
        points = [(tokens, value) for tokens, value in rest if tokens >= rows]
        ms = {
            n: between(points, rows * n) + depth * between(attention, n) / 1e3
            for n in range(1, MOST_NODES + 1)
        }
        ratios = [(n, value / ms[1]) for n, value in ms.items()]
        found = {str(limit): crossing(ratios, limit) for limit in RATIOS}
        cells[rows] = {
            "ms": {n: round(ms[n], 3) for n in SHOWN},
            "ratio": {n: round(ms[n] / ms[1], 3) for n in SHOWN},
            "nodes": {limit: None if n is None else int(n) for limit, n in found.items()},
            "attention_us": [(n, round(value, 2)) for n, value in attention],
            "tokens_and_ms_without_attention": [(n, round(value, 3)) for n, value in rest],
        }
    return cells
