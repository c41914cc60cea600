"""What a process of its own for the engine costs and gains: servers with and without, in turns.

    python -m benchmarks.engine_process --repeats 5 --points c1:8 c8:32

Starts two servers of the bundled pair, which stay there, and loads one after the other from this
process with the same requests. Says medians of the runs and how long each server took to start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: find `benchmarks` and `jspec` beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environment import write_result
from jspec.cli.measurement.client import run_point
from jspec.cli.measurement.figures import medians, summary
from jspec.cli.measurement.load import Pattern, Point

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"inside": (), "apart": ("--engine-process",)}


@contextmanager
def server(flags: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """The URL of a server, and the seconds it took to start."""
    started = time.monotonic()
    words = ["serve", "--port", "0", "--log-interval", "0", "--disable-radix-cache", *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "jspec.cli.main", *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "ready: " in line)
        yield line.split()[3], time.monotonic() - started
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def main(argv: list[str] | None = None) -> int:
    """Prints and writes the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_process")
    parser.add_argument("--points", nargs="+", default=["c1:8", "c8:32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"start_seconds": {}, "points": {}}
    pattern = Pattern(prompt_len=64, new_tokens=options.new_tokens, vocab_size=1000)
    with ExitStack() as stack:
        urls = {}
        for kind, flags in KINDS.items():
            urls[kind], seconds = stack.enter_context(server(flags))
            result["start_seconds"][kind] = round(seconds, 2)
        for point in map(Point.parse, options.points):
            runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
            for turn in range(options.repeats + 1):
                for kind in sorted(KINDS, reverse=turn % 2 == 1):
                    found = summary(*asyncio.run(run_point(urls[kind], point, pattern)))
                    if turn:  # the first is warm-up
                        runs[kind].append(found)
            result["points"][point.name] = {kind: medians(each) for kind, each in runs.items()}
    print(json.dumps(result, indent=1))
    if options.output is not None:
        write_result(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
