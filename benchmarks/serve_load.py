"""A server under load through HTTP: throughput, first tokens, gaps and end-to-end times.

    python -m benchmarks.serve_load --points c64 r12 c1          (Llama-3.1-8B's shapes)
    python -m benchmarks.serve_load --model tiny --points c4 r2:8 c1     (a smoke test on a CPU)
    python -m benchmarks.serve_load --url http://127.0.0.1:30000 --points c64 --vocab-size 120000

Starts a server process (dummy weights, EAGLE-3 3/1/4, simulated acceptance, no prefix cache) or
uses any running one, and loads it from this process: c64 keeps 64 requests open, r12 sends 12 per
second. The result file is complete after every point.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

if __package__ in (
    None,
    "",
):  # started as a file: import `benchmarks` and `jspec` from the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.h200_table import engine_arguments
from benchmarks.workloads import WORKLOADS, Workload
from jspec.cli.measurement.client import run_point
from jspec.cli.measurement.figures import Seen, percentile, summary
from jspec.cli.measurement.load import WORDS, Pattern, Point

ROOT = Path(__file__).resolve().parent.parent
# The parts between two borders of jspec.serving.request_trace, in order, from client to client.
PARTS = (
    *("to_server", "http_parse", "tokenize", "submit", "queue", "plan", "dispatch", "device_read"),
    *("commit", "to_reader_and_text", "stream", "to_client"),
)
START_SECONDS = 400.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.1
PROBE_SECONDS = 2.0
SCALARS = (bool, int, float, str)
KEPT_STATES = ("avg_spec_accept_length", "num_leaked_pages")


class Server:
    """A server under load, and its process if this run started it."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.url = url.rstrip("/")
        self._process = process

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=PROBE_SECONDS) as answer:
            return bytes(answer.read())

    def info(self) -> dict[str, Any]:
        """Return /server_info; empty without one."""
        try:
            return dict(json.loads(self.get("/server_info")))
        except (OSError, ValueError):
            return {}

    @property
    def cpu_seconds(self) -> float | None:
        """Return user and system time of the process; None if this run did not start it."""
        if self._process is None or not Path("/proc").exists():
            return None
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii", errors="replace")
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self, *, deadline: float) -> None:
        """Wait until it answers. Raises RuntimeError if its process ends, or at the deadline."""
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}")
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"no answer from {self.url}/health in time")

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def started(
    options: argparse.Namespace, folder: Path, *, program: tuple[str, ...] = ("run_server.py",)
) -> Iterator[Server]:
    """Yield the server of --url, or one of --model that ends with the context.

    program: what Python runs, with `--config FILE` after it.
    """
    deadline = time.monotonic() + min(options.seconds, START_SECONDS)
    if options.url:
        server = Server(options.url)
        server.wait(deadline=deadline)
        yield server
        return
    arguments = server_arguments(options, folder)
    config = folder / "serve.toml"
    lines = (f"{name} = {json.dumps(value)}" for name, value in arguments.items())
    config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, *program, "--config", str(config)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    server = Server(f"http://127.0.0.1:{arguments['port']}", process)
    try:
        server.wait(deadline=deadline)
        yield server
    finally:
        server.stop()


def server_arguments(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the TOML file: the workload's engine, a free port, and the overrides of --engine."""
    workload = WORKLOADS[options.model]
    workload.write_configs(folder)
    arguments = workload.arguments(options.mode, folder, acceptance=options.acceptance)
    if options.text:
        write_tokenizer(folder / "target", workload)
        arguments["skip_tokenizer_init"] = False
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        arguments["port"] = probe.getsockname()[1]
    if options.trace:
        arguments["trace_requests"] = str(options.trace.resolve())
    arguments |= engine_arguments(options.engine)
    wrong = {name: value for name, value in arguments.items() if not isinstance(value, SCALARS)}
    if wrong:
        raise ValueError(f"--engine gave {wrong}; expected numbers, true, false or text")
    return arguments


def write_tokenizer(directory: Path, workload: Workload) -> None:
    """Write a byte-level tokenizer as large as the model's vocabulary: each word of a prompt is one
    token, and every id has its own text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    size = workload.target.vocab_size
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in (f"\u0120{word}" for word in WORDS):  # U+0120 is the space
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab and len(vocab) < size:
                merges.append((word[: end - 1], word[end - 1]))
                vocab[word[:end]] = len(vocab)
    for index in range(len(vocab), size):
        vocab[f"\u0120{index}"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


# Measuring.


def measure(server: Server, point: Point, pattern: Pattern, trace: Path | None) -> dict[str, Any]:
    """Return one point's figures, CPU time of both sides, and the parts of first tokens."""
    at_start: list[float | None] = []
    own = [0.0]

    def on_start() -> None:
        at_start.append(server.cpu_seconds)
        own[0] = time.process_time()

    seen, seconds = asyncio.run(run_point(server.url, point, pattern, on_start=on_start))
    figures = summary(seen, seconds)
    figures["client_cores"] = round((time.process_time() - own[0]) / seconds, 3)
    now, before = server.cpu_seconds, at_start[0]
    if now is not None and before is not None:
        figures["server_cpu_ms_per_token"] = round(
            1e3 * (now - before) / max(seen.num_tokens, 1), 4
        )
    if trace is not None:
        figures["first_token_ms"] = summarise(trace, seen)
    return figures


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median throughput, and throughput and first tokens of all runs."""
    if len(runs) == 1:
        return runs[0]
    rates = [run["output_tokens_per_second"] for run in runs]
    chosen = runs[rates.index(statistics.median_low(rates))]
    names = ("output_tokens_per_second", "ttft_ms", "tpot_ms", "gap_ms")
    return {**chosen, **{f"all_{name}": [run[name] for run in runs] for name in names}}


def environment(
    info: Mapping[str, Any], argv: list[str], *, module: str = "serve_load"
) -> dict[str, Any]:
    """Return the environment of a result, with the server's chip."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # here alone: servers use the accelerator
    from benchmarks.environment import cpu_name, describe, without_paths

    device = str(info.get("device", "unknown"))
    packages = {}
    for name in ("starlette", "uvicorn"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        **describe(),
        "command": " ".join([f"python -m benchmarks.{module}", *without_paths(argv)]),
        "chip": cpu_name() if device == "cpu" else device,
        **packages,
    }


def run(options: argparse.Namespace, argv: list[str]) -> int:
    """Measure all points; return 0 if none had an error."""
    deadline = time.monotonic() + options.seconds
    points = [Point.parse(text) for text in options.points]
    pattern = pattern_of(options)
    result: dict[str, Any] = {"points": {}}
    with tempfile.TemporaryDirectory() as name, started(options, Path(name)) as server:
        info = server.info()
        startup = info.get("startup_seconds")
        result = {"environment": environment(info, argv), "startup_seconds": startup, "points": {}}
        for point in points:
            cell = repeated(server, point, pattern, options, deadline=deadline)
            result["points"][point.name] = cell
            write(options.output, result)
        result |= counted(server)
    write(options.output, result)
    print(table(result["points"]))
    return int(any(cell.get("num_errors", 1) for cell in result["points"].values()))


def repeated(
    server: Server, point: Point, pattern: Pattern, options: argparse.Namespace, *, deadline: float
) -> dict[str, Any]:
    """Return the median of --repeats runs of a point; no run starts after the deadline."""
    runs: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        if time.monotonic() > deadline:
            break
        seeded = replace(pattern, seed=pattern.seed + repeat)
        runs.append(measure(server, point, seeded, options.trace))
        print(f"{point.name:6} {json.dumps(runs[-1])}", flush=True)
    return middle(runs) if runs else {"skipped": "out of time"}


def counted(server: Server) -> dict[str, Any]:
    """Return the acceptance length of all requests and the pages that were not given back."""
    states = server.info().get("internal_states", [{}])[0]
    return {key: states[key] for key in KEPT_STATES if key in states}


def pattern_of(options: argparse.Namespace) -> Pattern:
    """Return --prompt-len and the like, with defaults of the model."""
    is_tiny = not options.url and options.model.startswith("tiny")
    workload = WORKLOADS[options.model]
    vocab_size = options.vocab_size
    if vocab_size is None:
        vocab_size = workload.target.vocab_size if is_tiny else 120_000
    return Pattern(
        prompt_len=options.prompt_len or (48 if is_tiny else 1024),
        new_tokens=options.new_tokens or (32 if is_tiny else 256),
        prefix_len=options.prefix_len,
        jitter=options.jitter,
        vocab_size=vocab_size,
        seed=options.seed,
        is_text=options.text,
        trace=options.trace is not None,
    )


def write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")  # replace the file atomically
    whole.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)


def table(points: Mapping[str, Mapping[str, Any]]) -> str:
    """Return Markdown: a line per point, p50 / p99 in milliseconds."""
    names = ("ttft_ms", "tpot_ms", "gap_ms", "e2e_ms")
    lines = ["| load | tokens/s | first token | a token after it | gap | end to end | errors |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, cell in points.items():
        if "skipped" in cell:
            lines.append(f"| {name} | {cell['skipped']} | | | | | |")
            continue
        pairs = " | ".join(f"{cell[key][0]} / {cell[key][1]}" for key in names)
        rate = cell["output_tokens_per_second"]
        lines.append(f"| {name} | {rate} | {pairs} | {cell['num_errors']} |")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--url", help="a server that runs; unset: one is started")
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="llama-3.1-8b")
    parser.add_argument("--mode", choices=("plain", "chain", "tree"), default="chain")
    parser.add_argument("--acceptance", type=float, default=3.0, help="simulated")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME=VALUE", help="a server argument"
    )
    parser.add_argument(
        "--points", nargs="+", default=["c64", "r12", "c1"], help="cCLIENTS or rRATE, :REQUESTS"
    )
    parser.add_argument("--repeats", type=int, default=1, help="of each point, other seeds")
    parser.add_argument("--text", action="store_true", help="send words instead of ids")
    parser.add_argument("--prompt-len", type=int, help="longest, in tokens (1024; tiny: 48)")
    parser.add_argument("--prefix-len", type=int, default=0, help="tokens before each, the same")
    parser.add_argument("--new-tokens", type=int, help="longest answer (256; tiny: 32)")
    parser.add_argument("--jitter", type=float, default=0.5, help="shortest over longest")
    parser.add_argument("--vocab-size", type=int, help="ids are below it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, help="where a first token's time goes, by request")
    parser.add_argument("--seconds", type=float, default=540.0, help="no point starts after this")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "serve_load.json"
    )
    return parser.parse_args(argv)


def summarise(trace: Path, seen: Seen) -> dict[str, Any]:
    """Return p50 and p99 of each part of the time to first token and of the whole, in milliseconds.

    Client and server run on one machine, so their clocks are one.
    """
    spans: dict[str, list[float]] = {part: [] for part in (*PARTS, "whole")}
    for line in trace.read_text(encoding="utf-8").splitlines():
        marks = json.loads(line)
        name = marks.pop("request_id")
        if name not in seen.sent or name not in seen.first:
            continue
        times = [seen.sent[name], *marks.values(), seen.first[name]]
        for part, (begin, end) in zip(PARTS, pairwise(times), strict=True):
            spans[part].append(end - begin)
        spans["whole"].append(times[-1] - times[0])
    figures: dict[str, Any] = {
        part: [round(1e3 * percentile(values, percent), 3) for percent in (50, 99)]
        for part, values in spans.items()
        if values
    }
    return {"num_requests": len(spans["whole"]), **figures}


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every request of every point was answered."""
    words = sys.argv[1:] if argv is None else argv
    return run(parse(words), words)


if __name__ == "__main__":
    sys.exit(main())
