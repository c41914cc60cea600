"""The step programs that are compiled ahead of time for TPUs, each in its own process.

The TPU's compiler has crashed or hung where several programs were compiled at once in one process,
and in long runs of one. So each program gets a process with a time-out, and a second one if a
signal or the time-out ended the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ("0/1/1", "3/1/4", "3/4/16")  # plain, chain, tree
PROGRAMS = ("decode B=64", "prefill T=1920 sampling", "decode B=64 sampling")
# Drafters, as tests.engine.step_compile calls them.
EAGLE3, MULTI_LAYER, NEXTN, NGRAM = "eagle3", "mtp", "nextn", "ngram"
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b")
# A slice of each chip with memory for the model in bfloat16 and KV.
V5P, V7X, V6E = "v5p:2x2x1", "tpu7x:2x2x1", "v6e:2x2"
SLICES: Mapping[str, tuple[str, ...]] = {
    "llama-3.1-8b": (V5P, V7X, "v5e:2x2", V6E),
    "qwen3-30b-a3b": (V5P, V7X, "v5e:2x4", V6E),
    "gpt-oss-20b": (V5P, V7X, "v5e:2x4", V6E),
    "llama-3.1-70b": ("v5p:2x2x2",),
}
# XLA's least effort, for tests: a third of the time. Kernels, layouts and aliasing are the same;
# fusions are coarser, so the bytes of temporaries differ.
LEAST_EFFORT: Mapping[str, str] = {"JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program of a model on a slice. layers: only the model's first ones; None: all."""

    model: str
    topology: str
    shape: str  # S/K/N
    program: str
    layers: int | None = None
    page_size: int = 64
    rounds: int = 1
    drafter: str = EAGLE3
    rows: int = 64
    quantization: str | None = None  # of the target

    def __str__(self) -> str:
        drafter = "" if self.drafter == EAGLE3 else f"{self.drafter} "
        model = self.model if self.quantization is None else f"{self.model} {self.quantization}"
        return f"{model} {self.topology} {drafter}{self.shape} {self.program}"

    @property
    def words(self) -> list[str]:
        """Return the command line after `python -m`."""
        layers = [] if self.layers is None else ["--layers", str(self.layers)]
        rounds = [] if self.rounds == 1 else ["--num-continuous-decode-steps", str(self.rounds)]
        return [
            *("tests.engine.step_compile", self.model, self.topology, self.shape),
            *("--only", self.program, "--page-size", str(self.page_size), "--backend", "tpu"),
            *layers,
            *rounds,
            *([] if self.drafter == EAGLE3 else ["--drafter", self.drafter]),
            *([] if self.rows == 64 else ["--rows", str(self.rows)]),
            *([] if self.quantization is None else ["--quantization", self.quantization]),
        ]


class CompileError(Exception):
    """Raised when a program did not compile, with the end of its process's output."""


def run_job(
    job: Job,
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    command: Callable[[Job], Sequence[str]] = lambda job: [sys.executable, "-m", *job.words],
) -> dict[str, Any]:
    """Return step_compile's report of the program, and `ended`: how earlier processes ended. Raises
    CompileError if both were ended by a signal or the time-out, or one reported an error.
    """
    ended: list[str] = []
    said = ""
    while len(ended) < 2:
        try:
            done = subprocess.run(
                command(job),
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        except subprocess.TimeoutExpired as error:
            said = error.stderr.decode(errors="replace") if error.stderr else ""
            ended.append(f"no end within {timeout:g} s")
            continue
        said = done.stderr
        if done.returncode == 0:
            lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
            if len(lines) != 1:
                raise CompileError(f"{job}: {len(lines)} programs are called so; expected one")
            found: dict[str, Any] = json.loads(lines[0])
            return found | {"ended": ended}
        if done.returncode > 0:
            raise CompileError(f"{job}: {said[-4000:]}")
        ended.append(f"signal {-done.returncode}")
    raise CompileError(f"{job}: {', then '.join(ended)}\n{said[-4000:]}")


def full_depth() -> list[Job]:
    """Return the matrix by importance: the newest large chips first."""
    slices = [(model, i) for i in range(len(SLICES["llama-3.1-8b"])) for model in MODELS]
    first = [
        Job(model=model, topology=SLICES[model][i], shape=shape, program=program)
        for model, i in slices
        for program, shape in (
            ("prefill T=1920 sampling", "0/1/1"),
            *(("decode B=64", shape) for shape in SHAPES),
        )
    ]
    every = [
        Job(model=model, topology=topology, shape=shape, program=program)
        for model, topologies in SLICES.items()
        for topology in topologies
        for shape in SHAPES
        for program in PROGRAMS
    ]
    return list(dict.fromkeys((*first, *every)))


def multi_layer() -> list[Job]:
    """Return MiMo-V2-Flash's first two layers, one of them an MoE, and its three draft layers: each
    program that speculates, as a chain and as a tree.

    They have 48 rows: with 64, a chain's four tokens per row are as many as the experts, and
    activations would have the transposed shape of the router's weights.
    """
    programs = [program.replace("B=64", "B=48") for program in PROGRAMS]
    return [
        Job(
            model="mimo-v2-flash",
            topology=topology,
            shape=shape,
            program=program,
            layers=2,
            drafter=MULTI_LAYER,
            rows=48,
        )
        for program in programs
        for shape in SHAPES[1:]
        for topology in (V5P, V7X)
    ]


def hybrid() -> list[Job]:
    """Return programs of Qwen3.5-9B's first eight layers, six of them delta nets, and its MTP layer
    as a tree."""
    return [
        Job(
            model="qwen3.5-9b",
            topology=V6E,
            shape=SHAPES[2],
            program=program,
            layers=8,
            drafter=NEXTN,
        )
        for program in ("decode B=64", "prefill T=1920 sampling")
    ]


def sparse() -> list[Job]:
    """Return programs of GLM-5.2's first two layers, both with an indexer, with a lookup's tree."""
    return [
        Job(
            model="glm-5.2",
            topology=V6E,
            shape="3/4/12",
            program=program,
            layers=2,
            drafter=NGRAM,
        )
        for program in ("decode B=64", "prefill T=1920 sampling")
    ]


def blocks() -> list[Job]:
    """Return decode steps of drafters that guess a block at once, as a chain and as trees of 64 and
    256 nodes, on each of the newer chips.

    No batch has as many tokens as the model is wide: activations would look like weights.
    """
    return [
        Job(
            model="llama-3.1-8b",
            topology=topology,
            shape=shape,
            program=f"decode B={rows}",
            layers=2,
            drafter=drafter,
            rows=rows,
        )
        for shape, rows in (("7/8/64", 48), ("7/1/8", 48), ("7/8/256", 12))
        for drafter in ("dflash", "dspark", "dflash2", "peagle")
        for topology in (V6E, V5P, V7X)
    ]


def quantized() -> list[Job]:
    """Return decode steps with 8-bit weights on chips that multiply them, chains first."""
    chips = (("v5e:2x2", "w8a8_int8"), (V7X, "fp8"), (V6E, "w8a8_int8"))
    return [
        Job(
            model="llama-3.1-8b",
            topology=topology,
            shape=shape,
            program="decode B=64",
            layers=2,
            quantization=quantization,
        )
        for shape in (SHAPES[1], SHAPES[0])
        for topology, quantization in chips
    ]


def few(layers: int = 2) -> list[Job]:
    """Return three of the nine kinds (S/K/N x program) on each model and chip, so that every chip
    compiles all nine, and every model does.

    Kind (shape s, program p) belongs to group (s + p) % 3; model m on chip c has group (m + c) % 3,
    and three groups are all nine kinds.
    """
    return [
        Job(
            model=model,
            topology=SLICES[model][chip],
            shape=SHAPES[shape],
            program=PROGRAMS[(m + chip - shape) % 3],
            layers=layers,
        )
        for m, model in enumerate(MODELS)
        for chip in range(len(SLICES[model]))
        for shape in range(len(SHAPES))
    ]


def fewest(layers: int = 2) -> list[Job]:
    """Return one kind of `few` of each model on a v6e, which so compiles all three shapes and all
    three programs. Model m has shape 2 - m.
    """
    return [
        job
        for job in few(layers)
        if SHAPES.index(job.shape) == 2 - MODELS.index(job.model) and job.topology == V6E
    ]
