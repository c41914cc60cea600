"""Tiles of the mixture's kernels for few tokens, each timed as a whole mixture with its norms.

    python -m benchmarks.few_tiles_gpu [--models qwen3-30b-a3b gpt-oss-20b] [--tokens 1 4 8 16]
                                       [--seconds 100] [--out few_tiles_gpu.json]

What is timed is `benchmarks.mixture_gpu`'s chain of 24 layers, and the floors are its floors. For
each model and number of tokens: the plan, and the plan with one or two of its tiles changed.
Several programs compile at once; nothing compiles while one is timed. What is left when the time is
over is not timed: the candidates are ordered by what is expected of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax

from benchmarks.environment import write_result
from benchmarks.experts_gpu import MODELS
from benchmarks.gpu_timing import compiled_in_waves, seconds_per_call
from benchmarks.mixture_gpu import LAYERS, drawn, layers, weights_of
from jspec.pallas_kernels.experts.plan import ExpertsTuning, choose_few

RESULT = Path(__file__).parent / "results" / "few_tiles_gpu.json"
# Of a multiprocessor's 227 KiB, so much should be on its way: the programs that fit one, times what
# each has asked for. Deeper rings for the second product, whose rounds are half as large.
FEW: dict[str, dict[str, int]] = {
    "down in rounds of 128": {"down_k": 128},
    "down, 8 stages": {"down_stages": 8},
    "down, 128 columns": {"down_n": 128},
    "down, 128 columns and inputs, 3 stages": {"down_n": 128, "down_k": 128, "down_stages": 3},
    "four stages": {"num_stages": 4, "down_stages": 0},
    "gate and up, 6 stages": {"num_stages": 6, "down_stages": 8},
    "gate and up, 3 stages": {"num_stages": 3, "down_stages": 6},
    "gate and up in rounds of 128, 3 stages": {"gate_up_k": 128, "num_stages": 3, "down_stages": 6},
    "gate and up 32 columns": {"gate_up_n": 32, "num_stages": 6},
    "eight warps": {"num_warps": 8},
    "two warps": {"num_warps": 2},
}


@dataclass(frozen=True)
class Candidate:
    """Tiles at one model and number of tokens."""

    model: str
    tokens: int
    name: str
    tuning: ExpertsTuning

    def compiled(self) -> Callable[..., Any]:
        x, _, _ = drawn_once(self.model, self.tokens)
        chain: Any = layers(self.model, tuning=self.tuning, count=length())
        program: Callable[..., Any] = chain.lower(x, weights_once(self.model)).compile()
        return program


def length() -> int:
    """Of the chain; interpreted, its compilation takes seconds a layer."""
    return LAYERS if jax.default_backend() == "gpu" else 2


@cache
def weights_once(model: str) -> Any:
    return weights_of(model)


@cache
def drawn_once(model: str, tokens: int) -> tuple[jax.Array, list[jax.Array], float]:
    return drawn(MODELS[model], tokens)


def candidates(name: str, tokens: int) -> list[Candidate]:
    """The plan first, then what differs from it and serves the model."""
    model = MODELS[name]
    plan = choose_few(
        tokens,
        num_experts=model.num_experts,
        size=model.size,
        inner=model.inner,
        is_packed=model.is_packed,
    )
    if plan is None:
        raise SystemExit(f"{tokens} tokens of {name} have no plan; expected 1 to 16")
    found = [Candidate(name, tokens, "few", plan)]
    for what, change in FEW.items():
        tuning = replace(plan, **change)
        is_new = all(tuning != candidate.tuning for candidate in found)
        if is_new and tuning.problem(model.size, model.inner, is_packed=model.is_packed) is None:
            found.append(Candidate(name, tokens, what, tuning))
    return found


def measured(candidate: Candidate, program: Callable[[], Any]) -> dict[str, Any]:
    """One row; what fails says so."""
    x, _, floor = drawn_once(candidate.model, candidate.tokens)
    row: dict[str, Any] = asdict(candidate) | {"floor_microseconds": floor * 1e6}
    try:
        arguments = (x, weights_once(candidate.model))
        seconds = seconds_per_call(program(), arguments, length(), samples=5)
        row |= {"microseconds": seconds * 1e6, "share": floor / seconds}
    except Exception as failure:  # the other candidates go on
        row["error"] = f"{type(failure).__name__}: {str(failure)[:200]}"
    return row


def shown(row: dict[str, Any]) -> str:
    took = f"{row['microseconds']:7.1f} us {row['share']:6.1%}" if "share" in row else row["error"]
    return f"{row['model']:14} {row['tokens']:>2} {took}  {row['name']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS][:2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    each = [candidates(name, t) for name in arguments.models for t in arguments.tokens]
    by_rank = [c[i] for i in range(max(map(len, each))) for c in each if i < len(c)]
    for candidate in by_rank:  # threads share them: made before the first of those
        drawn_once(candidate.model, candidate.tokens)
        weights_once(candidate.model)
    jobs = [(candidate, candidate.compiled) for candidate in by_rank]
    rows = []
    for candidate, program in compiled_in_waves(jobs, wave=12, workers=12):
        if time.monotonic() > deadline:
            break
        rows.append(measured(candidate, program))
        print(shown(rows[-1]), flush=True)
        write_result(arguments.out, {"rows": rows})
    rows.sort(key=lambda row: (row["model"], row["tokens"], row.get("microseconds", 1e9)))
    print("", *map(shown, rows), sep="\n")
    write_result(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
