"""Counts of what makes a step slow on a TPU, read off its compiled text, and their bounds.

A synchronous collective has nothing under it; a large copy is a layout that two operations do not
share; a loop or a sort is what XLA makes of a gather or a top-k that it cannot do otherwise. The
inner loops are those of the kernels' final bundles: a bundle is at least a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tpu_cycles.bundles import inner_loop, read
from benchmarks.tpu_cycles.kernels import FLAGS, LISTING
from benchmarks.tpu_programs import Job
from tests.engine.compiled_text import Instruction, instructions

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
LARGE_BYTES = 1 << 20
KERNELS = (
    *("paged_attention_rows", "paged_prefill", "experts_product", "gather_emitted"),
    "compact_paths",
)
ITEM_BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The most of each that a step may have. inner_loops: bundles by kernel, none if not listed."""

    collectives: int
    large_copies: int
    loops: int
    sorts: int
    inner_loops: Mapping[str, int]


# Two layers on v6e at XLA's least effort, as CI compiles them. Lower a bound with what lowers its
# count; the inner loops have 3% for changes of the compiler. Attention's and prefill's have a
# branch for whole blocks and one for each width of masked ones.
BOUNDS: Mapping[str, Bounds] = {
    "llama-3.1-8b v6e:2x2 3/4/16 prefill T=1920 sampling": Bounds(
        collectives=15,
        large_copies=15,
        loops=3,
        sorts=3,
        inner_loops={"paged_prefill": 5853},
    ),
    "qwen3-30b-a3b v6e:2x2 3/1/4 decode B=64": Bounds(
        collectives=19,
        large_copies=1,
        loops=0,
        sorts=4,
        inner_loops={
            "paged_attention_rows_1": 1824,
            "paged_attention_rows_4": 2225,
            "experts_product": 560,
            "gather_emitted": 146,
        },
    ),
    "gpt-oss-20b v6e:2x2 0/1/1 decode B=64 sampling": Bounds(
        collectives=10,
        large_copies=6,
        loops=1,
        sorts=5,
        inner_loops={},  # to list them takes twice as long as to compile the step
    ),
}


def watched(text: str) -> dict[str, Any]:
    """Return the counts of a compiled step."""
    found = list(instructions(text))
    number = Counter(x.opcode for x in found)
    return {
        "collectives": sum(number[name] for name in COLLECTIVES),
        "large_copies": [x.line.strip()[:160] for x in found if _is_large_copy(x)],
        "loops": number["while"],
        "sorts": number["sort"],
    }


def _is_large_copy(instruction: Instruction) -> bool:
    """Return True for a copy, transpose or retiling of at least LARGE_BYTES, not a prefetch."""
    if instruction.opcode not in ("copy", "transpose", "reshape") or instruction.in_fusion:
        return False
    result = instruction.types[0]
    return result.size * ITEM_BYTES.get(result.dtype, 0) >= LARGE_BYTES


def dump_environment(directory: Path) -> Mapping[str, str]:
    """Return the environment in which libtpu lists the kernels' final bundles, by their names.

    A kernel has its name from the operation's location, which the tests else leave out.
    """
    return {
        "LIBTPU_INIT_ARGS": FLAGS.format(directory),
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "10",
        "JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS": "true",
    }


def inner_loops(directory: Path) -> dict[str, int]:
    """Return the bundles of the inner loop of each kernel that is listed in `directory`: of calls
    with the same name the longest."""
    found: dict[str, int] = {}
    for path in sorted(directory.glob(f"*{LISTING}")):
        name = path.name.removesuffix(LISTING).partition("-")[2].partition(".")[0]
        loop = inner_loop(read(path)) if name.startswith(KERNELS) else None
        if loop is not None:
            found[name] = max(found.get(name, 0), loop.own)
    return found


def over_bounds(job: Job, counts: Mapping[str, Any], loops: Mapping[str, int]) -> list[str]:
    """Return what exceeds the job's bounds, and kernels that have none or were not listed."""
    bounds = BOUNDS[str(job)]
    number = {**counts, "large_copies": len(counts["large_copies"])}
    faults = [
        f"{name} is {number[name]}; expected at most {getattr(bounds, name)}"
        for name in ("collectives", "large_copies", "loops", "sorts")
        if number[name] > getattr(bounds, name)
    ]
    if set(loops) != set(bounds.inner_loops):
        faults.append(f"the kernels are {sorted(loops)}; expected {sorted(bounds.inner_loops)}")
    faults += [
        f"the inner loop of {name} has {loops[name]} bundles; expected at most {most}"
        for name, most in bounds.inner_loops.items()
        if loops.get(name, 0) > most
    ]
    return faults
