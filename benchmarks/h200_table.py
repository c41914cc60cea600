"""The table of speed: plain, chain and tree decoding, prefill and start-up, and the peers'.

    python -m benchmarks.h200_table [--cells 'chain/*' prefill/1x128] [--seconds 560] [--resume]
    python -m benchmarks.h200_table --model tiny          (a smoke test on a CPU)

End to end through jspec.Engine, on random weights: tokens/s = (tokens of a 288-token run - tokens
of a 32-token run) / (difference of the two times), median of three. The speculative modes simulate
an acceptance length of 3.0. Each mode runs in a separate process, so that a crash costs one mode
and its memory is free for the next; the result file is complete after every cell.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

if __package__ in (
    None,
    "",
):  # started as a file: import `benchmarks` and `jspec` from the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import peers
from benchmarks.environment import describe, without_paths
from benchmarks.floors import floor_ms
from benchmarks.workloads import MODES, WORKLOADS, Workload

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 3
GRACE_SECONDS = 10.0
OUT_OF_TIME = "out of time"

Cell = dict[str, Any]


class Record:
    """The cells measured so far; the file is rewritten after each."""

    def __init__(self, path: Path, *, environment: Callable[[], Mapping[str, Any]]) -> None:
        self._path = path
        self._environment = environment
        self._result: dict[str, Any] = {"cells": {}}
        if path.exists():
            self._result = json.loads(path.read_text(encoding="utf-8"))

    @property
    def cells(self) -> dict[str, Cell]:
        return self._result["cells"]

    def is_done(self, name: str) -> bool:
        return name in self.cells and not {"error", "skipped"} & set(self.cells[name])

    def forget_failures(self) -> None:
        """Drop failed and skipped cells, so that they are measured again."""
        for name in [name for name in self.cells if not self.is_done(name)]:
            del self.cells[name]
        if self._path.exists():
            self._write()

    def put(self, name: str, cell: Cell) -> None:
        """Add to a cell, log it and write the file."""
        self.cells[name] = {**self.cells.get(name, {}), **cell}
        environment = self._environment() or self._result.get("environment", {})
        self._result = {**self._result, "environment": environment, "peers": peers.SOURCE}
        print(f"{name:16} {json.dumps(cell)}", flush=True)
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._path.with_suffix(".part")  # never half a file, whenever the process ends
        whole.write_text(json.dumps(self._result, indent=1) + "\n", encoding="utf-8")
        whole.replace(self._path)


# One mode, in this process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run. deadline: time.monotonic() after which no cell starts."""

    workload: Workload
    acceptance: float
    deadline: float
    engine: Mapping[str, Any]


def cells_of(mode: str, names: list[str]) -> list[str]:
    """Return the cells that the process of `mode` measures; the plain one also prefills."""
    groups = {mode, "prefill"} if mode == "plain" else {mode}
    return [name for name in names if name.split("/")[0] in groups or name == f"startup/{mode}"]


def run_mode(mode: str, names: list[str], record: Record, options: Options) -> None:
    """Start one engine and measure `names` on it, each even if others fail."""
    workload = options.workload
    with tempfile.TemporaryDirectory() as folder:
        workload.write_configs(Path(folder))
        arguments = workload.arguments(mode, Path(folder), acceptance=options.acceptance)
        arguments |= dict(options.engine)
        try:
            engine = start_engine(mode, arguments, record)
        except Exception as error:  # the caller reads its record
            for name in names:
                record.put(name, {"error": describe_error(error)})
            return
        rng = np.random.default_rng(0)
        for name in names:
            if name.startswith("startup/"):
                continue  # the start above
            if time.monotonic() > options.deadline:
                record.put(name, {"skipped": OUT_OF_TIME})
                continue
            try:
                record.put(name, measure(engine, name, workload, rng))
            except Exception as error:  # the other cells must still run
                record.put(name, {"error": describe_error(error)})
                if engine.is_closed:
                    return  # the caller starts a new process for the rest
        engine.shutdown()


def describe_error(error: Exception) -> str:
    """Return one line of an error, since a compiler may write megabytes."""
    return f"{type(error).__name__}: {error}"[:500]


def start_engine(mode: str, arguments: Mapping[str, Any], record: Record) -> Any:
    """Start an engine and record its start-up."""
    from jspec import Engine

    named = arguments.get("compilation_cache_dir")
    cache = Path.home() / ".cache" / "jspec" / "programs" if named is None else Path(named)
    num_cached = sum(1 for _ in cache.rglob("*")) if named != "" else 0
    started = time.monotonic()

    def progress(done: int, total: int, what: str, how: str) -> None:
        print(f"  {time.monotonic() - started:6.1f} s {how} {done}/{total}: {what}", flush=True)

    print(f"starting {mode}", flush=True)
    engine = Engine(progress=progress, **arguments)
    is_warm = num_cached > 0 and sum(1 for _ in cache.rglob("*")) == num_cached
    kind = start_kind(record.cells.get(f"startup/{mode}", {}), is_warm=is_warm)
    info = engine.get_server_info()
    found = {kind: round(engine.startup_seconds, 2), "num_programs": info["num_programs"]}
    record.put(f"startup/{mode}", found)
    return engine


def start_kind(before: Cell, *, is_warm: bool) -> str:
    """Return cold, warm, or the name of a second start that should have been warm and was not."""
    if is_warm:
        return "warm_seconds"
    return "second_seconds" if "cold_seconds" in before else "cold_seconds"


def measure(engine: Any, name: str, workload: Workload, rng: np.random.Generator) -> Cell:
    """Measure one cell of decoding or of prefill."""
    group, size = name.split("/")
    if group == "prefill":
        rows, length = (int(word) for word in size.split("x"))
        timed_run(engine, workload, rng, rows=rows, length=length, new_tokens=1)
        times = [
            timed_run(engine, workload, rng, rows=rows, length=length, new_tokens=1).seconds
            for _ in range(REPEATS)
        ]
        seconds = statistics.median(times)
        return {
            "ms": round(1e3 * seconds, 3),
            "tokens_per_second": round(rows * length / seconds, 1),
            "all_ms": [round(1e3 * t, 3) for t in times],
        }
    shape = {"rows": int(size), "length": workload.prompt_len}
    timed_run(engine, workload, rng, new_tokens=workload.short_run, **shape)
    rates, acceptance = [], 1.0
    for _ in range(REPEATS):
        short = timed_run(engine, workload, rng, new_tokens=workload.short_run, **shape)
        long = timed_run(engine, workload, rng, new_tokens=workload.long_run, **shape)
        rates.append((long.num_tokens - short.num_tokens) / (long.seconds - short.seconds))
        acceptance = long.acceptance_length
    rate = statistics.median(rates)
    milliseconds = 1e3 * int(size) * acceptance / rate
    floor = target_floor_ms(workload, group, int(size))
    return {
        "tokens_per_second": round(rate, 1),
        "ms_per_step": round(milliseconds, 4),
        "target_floor_ms": round(floor, 4),
        "share_of_floor": round(floor / milliseconds, 4),
        "acceptance_length": round(acceptance, 3),
        "all_tokens_per_second": [round(r, 1) for r in rates],
    }


def target_floor_ms(workload: Workload, mode: str, batch: int) -> float:
    """Return the target's least milliseconds per step on one H200, in the middle of a long run."""
    shape = MODES[mode]
    return floor_ms(
        workload.target,
        batch=batch,
        nodes=1 if shape is None else shape[2],
        context=workload.prompt_len + workload.long_run // 2,
        dtype=workload.dtype,
        formats=workload.formats,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of generate with a whole batch."""

    seconds: float
    num_tokens: int
    acceptance_length: float


def timed_run(
    engine: Any,
    workload: Workload,
    rng: np.random.Generator,
    *,
    rows: int,
    length: int,
    new_tokens: int,
) -> Run:
    """Time fresh random prompts, so that no cache can help. Raises if tokens are missing."""
    prompts = rng.integers(0, workload.target.vocab_size, (rows, length)).tolist()
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    started = time.perf_counter()
    results = engine.generate(input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(result["output_ids"]) for result in results)
    if num_tokens != rows * new_tokens:
        raise RuntimeError(f"{num_tokens} tokens came; expected {rows} x {new_tokens}")
    lengths = [result["meta_info"].get("acceptance_length", 1.0) for result in results]
    return Run(seconds=seconds, num_tokens=num_tokens, acceptance_length=statistics.mean(lengths))


# All modes, each in a separate process.


def run_all(options: argparse.Namespace, names: list[str], argv: list[str]) -> int:
    """Run a process per mode, then a second start where the first one had to compile."""
    deadline = time.monotonic() + options.seconds
    for mode in MODES:
        wanted = [name for name in cells_of(mode, names) if name not in reread(options).cells]
        while wanted:  # each turn settles at least one cell
            why = run_child(mode, wanted, options, argv, deadline=deadline)
            record = reread(options)
            left = [name for name in wanted if name not in record.cells]
            if left and (why is not None or len(left) == len(wanted)):
                why = why or "its process left nothing behind"
                kind = "skipped" if why == OUT_OF_TIME else "error"
                record.put(left.pop(0), {kind: why})  # the one it was at, as they go in order
            wanted = left
    for mode in MODES:
        cell = reread(options).cells.get(f"startup/{mode}", {})
        if f"startup/{mode}" in names and "cold_seconds" in cell and "warm_seconds" not in cell:
            run_child(mode, [f"startup/{mode}"], options, argv, deadline=deadline)
    record = reread(options)
    print(table(record.cells, WORKLOADS[options.model]))
    return 0 if all(record.is_done(name) for name in names) else 1


def reread(options: argparse.Namespace) -> Record:
    """Read the file as the last process left it."""
    return Record(options.output, environment=dict)


def run_child(
    mode: str,
    names: list[str],
    options: argparse.Namespace,
    argv: list[str],
    *,
    deadline: float,
) -> str | None:
    """Measure `names` in another process; return its failure, or None."""
    left = deadline - time.monotonic()
    if left <= 0:
        return OUT_OF_TIME
    words = ["--only-mode", mode, "--model", options.model, "--output", str(options.output)]
    words += [f"--seconds={left:.1f}", f"--acceptance={options.acceptance}"]
    words += [f"--as-run={' '.join(without_paths(argv))}"]
    words += [f"--engine={pair}" for pair in options.engine]
    command = [sys.executable, "-m", "benchmarks.h200_table", *words, "--cells", *names]
    child = subprocess.Popen(command, cwd=ROOT, env=os.environ, start_new_session=True)
    try:
        code = child.wait(timeout=left + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return None if code == 0 else f"its process ended with {code}"


def table(cells: Mapping[str, Cell], workload: Workload) -> str:
    """Return Markdown: jspec compared with the better peer, and the ratio (above 1 is better)."""
    has_peers = workload.name == peers.MODEL  # measured on this model alone
    lines = [f"source of the peers' figures: {peers.SOURCE}", ""] if has_peers else []
    lines += ["| cell | jspec | better peer | ratio |", "|---|---|---|---|"]
    for name in workload.cells():
        if name not in cells:
            continue
        group, size = name.split("/")
        unit, value = figure(group, cells[name])
        peer = peers.better_peer(group, size)
        beside = "" if peer is None or not has_peers else f"{peer[0]} {peer[1]:g}"
        times = peers.ratio(group, size, value) if value is not None else None
        ratio = "" if times is None or not has_peers else f"{times:.2f}"
        why = str(cells[name].get("error", cells[name].get("skipped", "")))
        shown = why[:60] if value is None else f"{value:g} {unit}"
        lines.append(f"| {name} | {shown} | {beside} | {ratio} |")
    return "\n".join(lines)


def figure(group: str, cell: Cell) -> tuple[str, float | None]:
    """Return (unit, the one number of a cell); a warm start counts if both were measured."""
    if group == "prefill":
        return "ms", cell.get("ms")
    if group == "startup":
        is_warm = "warm_seconds" in cell
        return f"s {'warm' if is_warm else 'cold'}", cell.get(
            "warm_seconds", cell.get("cold_seconds")
        )
    return "tokens/s", cell.get("tokens_per_second")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="llama-3.1-8b")
    parser.add_argument("--cells", nargs="+", default=["*"], help="patterns: 'chain/*' prefill/*")
    parser.add_argument("--seconds", type=float, default=560.0, help="no cell starts after this")
    parser.add_argument("--acceptance", type=float, default=3.0)
    parser.add_argument("--resume", action="store_true", help="keep the cells that are there")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME=VALUE", help="an engine argument"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "h200_table.json"
    )
    parser.add_argument("--only-mode", choices=tuple(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--as-run", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.output = options.output.resolve()
    return options


def engine_arguments(pairs: list[str]) -> dict[str, Any]:
    """Parse page_size=64 → {"page_size": 64}; a value that is not JSON is text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every requested cell has its figure."""
    words = sys.argv[1:] if argv is None else argv
    options = parse(words)
    workload = WORKLOADS[options.model]
    names = [name for name in workload.cells() if any(fnmatch(name, p) for p in options.cells)]
    if not names:
        print(f"no cell matches {options.cells}; there are {workload.cells()}", file=sys.stderr)
        return 2
    if options.only_mode is None:
        if not options.resume:
            options.output.unlink(missing_ok=True)
        reread(options).forget_failures()
        return run_all(options, names, words)
    fixed = {**describe(), "command": f"python -m benchmarks.h200_table {options.as_run}".strip()}
    shared = Options(
        workload=workload,
        acceptance=options.acceptance,
        deadline=time.monotonic() + options.seconds,
        engine=engine_arguments(options.engine),
    )
    run_mode(options.only_mode, names, Record(options.output, environment=lambda: fixed), shared)
    return 0


if __name__ == "__main__":
    sys.exit(main())
