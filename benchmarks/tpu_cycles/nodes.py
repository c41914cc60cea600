"""How many nodes a row may verify before a step takes 1.1 and 1.25 times a plain step.

With few rows a step is bound by reading weights, so more tokens cost little until the sums between
devices, attention, or the products themselves take longer than that. The steps verify drafts that
are looked up (NGRAM), so no draft model is in them: a head's own forwards come on top.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tpu_cycles.bundles import read
from benchmarks.tpu_cycles.chips import chip_of
from benchmarks.tpu_cycles.kernels import compile_case, listing
from benchmarks.tpu_cycles.scalar_core import Core, Program, Words
from benchmarks.tpu_cycles.steps import LAYERS, MEAN_CONTEXT, dump, estimate, slug
from benchmarks.tpu_programs import Job

ROWS, NODES = (1, 4, 8), (1, 16, 64)
RATIOS = (1.1, 1.25)
MODEL = "llama-3.1-8b"
CASE = "rows, 8b tp4 tree of {}"
CASES = {1: "rows, 8b tp4 R 1 page 64", 16: CASE.format(16), 64: CASE.format(64)}
BATCH = 64  # of the kernels' shapes; rows beyond the step's are empty


def crossing(ratios: Sequence[tuple[int, float]], limit: float) -> float | None:
    """Return the first N at which the ratio is `limit`, between two points; None: it is lower.

    In:  [(1, 1.0), (16, 1.2), (64, 1.6)], 1.1    Out: 8.5
    """
    for (n, low), (m, high) in itertools.pairwise(ratios):
        if low <= limit < high:
            return n + (m - n) * (limit - low) / (high - low)
    return None


def attention(nodes: int, topology: str, directory: Path) -> Program:
    """Return the attention kernel of `nodes` queries a row, compiled into `directory` once."""
    kernel = f"paged_attention_rows_{nodes}"
    place = directory / f"{topology.partition(':')[0]}_{kernel}"
    if not place.exists():
        place.mkdir(parents=True)
        compile_case(CASES[nodes], topology, place)
    return Program(read(listing(place, kernel)))


def attention_us(program: Program, rows: int, nodes: int, topology: str) -> dict[str, Any]:
    """Simulate `rows` rows of equal context; the report is like those of `kernels`."""
    committed = [MEAN_CONTEXT - 24] * rows + [0] * (BATCH - rows)
    limits = [n + nodes if n else 0 for n in committed]
    operands: dict[int, Words] = {0: committed, 1: limits, 2: [0] * BATCH, 4: 1}
    chip = chip_of(topology)
    run = Core(program, chip, operands).run()
    return {"us": run.us(chip), "hbm_bytes": run.hbm_bytes, "faults": dict(run.faults)}


def find(rows: int, topology: str, directory: Path, *, evaluate: bool) -> dict[str, Any]:
    """Return milliseconds by N, and the N of each ratio."""
    times: dict[int, float] = {}
    for nodes in NODES:
        shape = "0/1/1" if nodes == 1 else f"{nodes - 1}/1/{nodes}"
        job = Job(
            model=MODEL,
            topology=topology,
            shape=shape,
            program=f"decode B={rows}",
            layers=LAYERS,
            rows=rows,
            drafter="ngram" if nodes > 1 else "eagle3",
        )
        dump(job, directory / slug(job), evaluate=evaluate)
        run = attention_us(attention(nodes, topology, directory), rows, nodes, topology)
        simulated = {f"{rows} rows": run}
        reports = {"": {"kernel": f"paged_attention_rows_{nodes}", "simulated": simulated}}
        times[nodes] = estimate(job, directory / slug(job), reports)["ms"]
    ratios = [(n, ms / times[1]) for n, ms in times.items()]
    found = {str(limit): crossing(ratios, limit) for limit in RATIOS}
    return {
        "ms": times,
        "ratio": {n: round(ratio, 3) for n, ratio in ratios},
        "nodes": {limit: None if n is None else round(n, 1) for limit, n in found.items()},
    }
