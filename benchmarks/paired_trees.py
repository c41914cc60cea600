"""Two checkouts of jspec, or one under two environments, timed alternately on one device.

    git worktree add ../old COMMIT
    python -m benchmarks.paired_trees --tree old=../old --tree new=. --out pair.json
    python -m benchmarks.paired_trees --tree base=. --tree pdl=. \
        --env pdl:XLA_FLAGS=--xla_gpu_enable_pdl=true

Each (tree, mode) is a process with its engine, programs compiled before the first measurement. A
cell is measured in one process after the other, --rounds times, every other round in the opposite
order, so that clock and temperature of the card are the same for all. A decode cell is milliseconds
per step, from the difference of a long and a short run; a prefill cell milliseconds of one new
token, and of its parts: before the step's dispatch, during it, until its result, and after that.
Weights are random; the chain simulates an acceptance length of 3.0.

--model bundled: the shipped pair, its own drafts; for a CPU: --cells plain/1 chain/1 chain/8.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CELLS = ("plain/1", "plain/8", "plain/64", "chain/1", "chain/8", "chain/64", "prefill/1x1024")
ROUNDS = 5
PARTS = ("before", "dispatch", "wait", "after")


@dataclass(frozen=True)
class Target:
    """The target; prompts have ids below its vocabulary size."""

    vocab_size: int = 2000


@dataclass(frozen=True)
class Bundled:
    """The shipped pair, as a `benchmarks.workloads.Workload`."""

    target: Target = Target()
    prompt_len: int = 96
    long_run: int = 160
    short_run: int = 32
    batches: tuple[int, ...] = (1, 8)

    def write_configs(self, folder: Path) -> None:
        del folder

    def arguments(self, mode: str, folder: Path, *, acceptance: float) -> dict[str, Any]:
        """Return engine arguments, with fewer programs at the start if the tree supports it."""
        del folder, acceptance
        algorithm = "EAGLE3" if mode == "chain" else "NONE"
        found = {"speculative_algorithm": algorithm, "max_running_requests": max(self.batches)}
        import jspec

        has_common = (Path(jspec.__path__[0]) / "config").is_dir()  # absent in version 0.1.0
        return found | {"compile_at_start": "common" if has_common else "all"}


class Child:
    """An engine in a process, which answers lines of JSON."""

    def __init__(self, name: str, tree: Path, mode: str, *, options: argparse.Namespace) -> None:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = str(tree.resolve())
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        for item in options.env:
            owner, _, setting = item.partition(":")
            key, _, value = setting.partition("=")
            if owner == name:
                environment[key] = f"{environment.get(key, '')} {value}".strip()
        self.name, self.mode = name, mode
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        words = ["--child", mode, "--model", options.model]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *words],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a line and wait for the answer. Raises RuntimeError if the child has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._log.seek(0)
        raise RuntimeError(f"{self.name} {self.mode} ended: {self._log.read()[-2000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class Stamps:
    """Start and end of a runner's first dispatch and collect after `clear`."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, bool], float] = {}
        try:
            from jspec.engine.plan_runner import PlanRunner as Runner
        except ImportError:  # an older tree
            from jspec.engine.runner import DeviceRunner as Runner
        for name in ("dispatch", "collect"):
            setattr(Runner, name, self._stamped(name, getattr(Runner, name)))

    def _stamped(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def stamped(*arguments: Any) -> Any:
            self._at.setdefault((name, False), time.perf_counter())
            result = run(*arguments)
            self._at.setdefault((name, True), time.perf_counter())
            return result

        return stamped

    def clear(self) -> None:
        self._at.clear()

    def parts(self, started: float, ended: float) -> dict[str, float]:
        """Return the milliseconds of PARTS."""
        at = self._at
        times = [
            started,
            at["dispatch", False],
            at["dispatch", True],
            at["collect", True],
            ended,
        ]
        pairs = itertools.pairwise(times)
        return {name: 1e3 * (b - a) for name, (a, b) in zip(PARTS, pairs, strict=True)}


def run_child(mode: str, model: str) -> None:
    """Build the engine of the tree in PYTHONPATH, then answer requests."""
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
    import numpy as np

    from benchmarks.h200_table import timed_run
    from benchmarks.workloads import WORKLOADS
    from jspec import Engine

    workload: Any = Bundled() if model == "bundled" else WORKLOADS[model]
    with tempfile.TemporaryDirectory() as folder:
        workload.write_configs(Path(folder))
        arguments = workload.arguments(mode, Path(folder), acceptance=3.0)
        longest = workload.prompt_len + workload.long_run + 64
        arguments |= {
            "max_total_tokens": max(workload.batches) * longest,
            "compilation_cache_dir": f"{folder}/programs",
        }
        started = time.perf_counter()
        stamps, engine = Stamps(), Engine(**arguments)
        print(json.dumps({"start_seconds": round(time.perf_counter() - started, 2)}), flush=True)
        rng = np.random.default_rng(0)
        for line in sys.stdin:
            group, _, size = json.loads(line)["cell"].partition("/")
            if group == "prefill":
                rows, length = (int(word) for word in size.split("x"))
                stamps.clear()
                began = time.perf_counter()
                run = timed_run(engine, workload, rng, rows=rows, length=length, new_tokens=1)
                parts = stamps.parts(began, time.perf_counter())
                print(json.dumps({"ms": 1e3 * run.seconds, "parts": parts}), flush=True)
                continue
            shape = {"rows": int(size), "length": workload.prompt_len}
            short = timed_run(engine, workload, rng, new_tokens=workload.short_run, **shape)
            long = timed_run(engine, workload, rng, new_tokens=workload.long_run, **shape)
            tokens = (long.num_tokens - short.num_tokens) / (int(size) * long.acceptance_length)
            print(json.dumps({"ms": 1e3 * (long.seconds - short.seconds) / tokens}), flush=True)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians of every cell in every tree, and the ratio of each tree to the first one."""
    trees = dict(item.split("=", 1) for item in options.tree)
    modes = sorted({"plain" if c.startswith("prefill") else c.split("/")[0] for c in options.cells})
    children = {
        (name, mode): Child(name, Path(tree), mode, options=options)
        for name, tree in trees.items()
        for mode in modes
    }
    result: dict[str, Any] = {"start_seconds": {}, "cells": {}}
    try:
        for (name, mode), child in children.items():
            result["start_seconds"][f"{name} {mode}"] = child.read()["start_seconds"]
            print(name, mode, "is ready", result["start_seconds"][f"{name} {mode}"], flush=True)
        for cell in options.cells:
            group = cell.split("/")[0]
            mode = "plain" if group == "prefill" else group
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
            for i in range(options.rounds + 1):  # the first round warms up
                for name in list(trees)[:: -1 if i % 2 else 1]:
                    found[name].append(children[name, mode].ask({"cell": cell}))
            result["cells"][cell] = _summary({name: each[1:] for name, each in found.items()})
            print(cell, result["cells"][cell]["ms"], result["cells"][cell]["ratio"], flush=True)
    finally:
        for child in children.values():
            child.close()
    return result


def _summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians of one cell by tree, their ratios to the first tree's, and all values."""
    times = {name: [each["ms"] for each in answers] for name, answers in found.items()}
    medians = {name: statistics.median(of_tree) for name, of_tree in times.items()}
    first = next(iter(medians.values()))
    summary: dict[str, Any] = {
        "ms": {name: round(ms, 4) for name, ms in medians.items()},
        "ratio": {name: round(ms / first, 4) for name, ms in medians.items()},
        "all_ms": {name: [round(ms, 4) for ms in of_tree] for name, of_tree in times.items()},
    }
    if all("parts" in each for answers in found.values() for each in answers):
        summary["parts_ms"] = {
            name: {
                part: round(statistics.median(each["parts"][part] for each in answers), 4)
                for part in PARTS
            }
            for name, answers in found.items()
        }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--env", action="append", default=[], metavar="NAME:KEY=VALUE")
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child, options.model)
        return
    found = compare(options)
    if options.out:
        from benchmarks.environment import describe

        options.out.write_text(json.dumps({"environment": describe(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
