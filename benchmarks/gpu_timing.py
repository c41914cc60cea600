"""Timing of short GPU programs, and a watch over the process that runs them.

A candidate may fail to compile, fault or hang. Each is therefore run by a worker process that
says what it is about to do; when the worker dies or falls silent it is ended and a new one goes
on after the candidate that did it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

READ_TB_S = 4.49  # reading ceiling of one H200, and its bf16 matrix products
MATRIX_TFLOP_S = 790.0
L2_BYTES = 50 * 2**20

Key = TypeVar("Key")
_COMPILING = "compiling"


def num_copies(num_bytes: int, *, total: int = 2**30) -> int:
    """How many operands of this size to rotate through, so that the L2 cache serves none."""
    least = -(-4 * L2_BYTES // num_bytes) if num_bytes < 2 * L2_BYTES else 2
    return max(least, min(32, total // num_bytes))


def seconds_per_call(
    run: Callable[..., Any], arguments: Sequence[Any], calls: int, *, samples: int = 7
) -> float:
    """Median seconds of one of the `calls` programs that one `run` enqueues."""
    jax.block_until_ready(run(*arguments))
    started = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    once = max(time.perf_counter() - started, 1e-5)
    repeats = max(3, min(50, round(0.01 / once)))
    seconds = []
    for _ in range(samples):
        started = time.perf_counter()
        for _ in range(repeats):
            out = run(*arguments)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - started) / (repeats * calls))
    return median(seconds)


def sustained_seconds(
    run: Callable[..., Any], arguments: Sequence[Any], calls: int, *, seconds: float = 0.5
) -> float:
    """Median seconds of one of the `calls` programs that one `run` enqueues, under lasting load:
    the device is kept busy for `seconds` before the first sample and for as long while sampling."""
    once = max(seconds_per_call(run, arguments, calls, samples=1) * calls, 1e-5)
    repeats = max(1, round(seconds / 10 / once))
    found = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(repeats):
            out = run(*arguments)
        jax.block_until_ready(out)
        found.append((time.perf_counter() - started) / (repeats * calls))
    return median(found[10:])


def compiled_in_waves(
    jobs: Sequence[tuple[Key, Callable[[], Any]]], *, wave: int, workers: int
) -> Iterator[tuple[Key, Callable[[], Any]]]:
    """The same jobs, each replaced by a function that returns or raises what it did. A wave is
    compiled on several threads before any of it is handed out: nothing compiles, and nothing
    holds the interpreter, while a program is being timed."""
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(jobs), wave):
            pending = [(key, pool.submit(job)) for key, job in jobs[start : start + wave]]
            wait([future for _, future in pending])
            for key, future in pending:
                yield key, future.result


def say(kind: str, value: Any) -> None:
    """One line from the worker to its watcher."""
    print(f"{kind} {json.dumps(value)}", flush=True)


def measured_rows(
    jobs: Sequence[tuple[str, Callable[[], Any]]],
    measure: Callable[[str, Callable[[], Any]], dict[str, Any]],
    *,
    done: str,
    deadline: float,
    wave: int,
) -> None:
    """A worker's loop: compiles what `done`, a JSON file of keys, does not name, measures it and
    says so. Ends the process when a program has left the device unusable."""
    keys = set(json.loads(Path(done).read_text(encoding="utf-8")))
    left = [(key, job) for key, job in jobs if key not in keys]
    say("AT", _COMPILING)
    threads = max(2, min(12, (os.cpu_count() or 4) - 2))
    for key, program in compiled_in_waves(left, wave=wave, workers=threads):
        if time.monotonic() > deadline:
            return
        say("AT", key)
        row = {"key": key} | measure(key, program)
        say("RESULT", row)
        if "error" in row and not _usable():
            sys.stdout.flush()
            os._exit(3)
        say("AT", _COMPILING)


def _usable() -> bool:
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def watched(
    module: str,
    arguments: Sequence[str],
    *,
    seconds: float,
    silence: float = 45.0,
    xla_flags: str = "",
) -> list[dict[str, Any]]:
    """Results of `python -m module --worker`, restarted after every candidate that ends it."""
    environment = dict(os.environ)
    if xla_flags:
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip()
    deadline = time.monotonic() + seconds
    results: list[dict[str, Any]] = []
    lost = 0  # workers that ended while they compiled: nobody is to blame, so not for ever
    while time.monotonic() < deadline and lost < 2:
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump([row["key"] for row in results], file)
        left = str(deadline - time.monotonic())
        command = [sys.executable, "-m", module, "--worker", file.name, "--seconds", left]
        worker = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )
        finished, current = _follow(worker, deadline, silence, results)
        Path(file.name).unlink()
        if finished:
            break
        if current == _COMPILING:
            lost += 1
        elif current not in {row["key"] for row in results}:
            results.append({"key": current, "error": "the worker died or fell silent"})
    return results


def _follow(
    worker: subprocess.Popen[str], deadline: float, silence: float, results: list[dict[str, Any]]
) -> tuple[bool, str]:
    """(whether the worker came to its end, what it was at)."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(worker, lines), daemon=True).start()
    current = _COMPILING
    try:
        while time.monotonic() < deadline + silence:
            line = lines.get(timeout=silence * (3 if current == _COMPILING else 1))
            if line is None:
                return worker.wait() == 0, current
            kind, _, text = line.partition(" ")
            if kind == "AT":
                current = json.loads(text)
            elif kind == "RESULT":
                results.append(json.loads(text))
                print(line.rstrip(), file=sys.stderr, flush=True)
    except queue.Empty:
        pass
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
    return time.monotonic() >= deadline, current


def _read(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        lines.put(line)
    lines.put(None)
