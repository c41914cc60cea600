"""A soak test: a server for minutes with too little memory and clients that disconnect.

    python -m benchmarks.soak --minutes 10
    python -m benchmarks.soak --minutes 0.33 --output soak.json
    python -m benchmarks.soak --minutes 10 --engine-process --kill-every 60
    python -m benchmarks.soak --minutes 12 --mixed --clients 24

Serves the bundled pair with a tenth of the KV pool that its clients would fill, so that rows are
retracted all the time. A third of the clients disconnect at a random event of their stream.
Afterwards every text that was read to its end is compared with that of the idle server for the same
seed. With --kill-every the engine's process is killed regularly. With --mixed requests also have
grammars, LoRA adapters, several choices and priorities; bad bodies are among them, and weights and
adapters are loaded again and again meanwhile.

Fails (status 1) on an error, a differing text, leaked pages, rows, descriptors or threads, and
resident memory that grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

if __package__ in (
    None,
    "",
):  # started as a file: import `benchmarks` and `jspec` from the checkout
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environment import write_result
from benchmarks.soak_client import Answer, fetch, read_metrics, stream
from jspec.engine.weights.loading import BUNDLED
from tests.support.lora_adapters import write_adapter

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    *("def fib(n):", "class Stack:\n    def __init__(self", "import os\n\n\ndef walk(path", "#"),
    *("for i in range(10):\n", "def test_", "async def read(stream):\n", "x = [1, 2, 3]\n" * 6),
    *("def add(a, b):\n    return a + b\n\n\n" * 4, "try:\n", "with open(", "SELECT = "),
)
SEEDS = 6
MAX_NEW_TOKENS = (16, 48, 96, 160)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fib", "sum"]}, "values": {"type": "array", "maxItems": 4}},
    "required": ["name"],
    "additionalProperties": False,
}
MIXED: dict[str, dict[str, Any]] = {
    "": {},
    "regex": {"sampling_params": {"regex": "[a-z]{5,30}(, [a-z]{2,9}){1,9}", "ignore_eos": False}},
    "schema": {"sampling_params": {"json_schema": json.dumps(SCHEMA), "ignore_eos": False}},
    "choices": {"sampling_params": {"n": 2, "max_new_tokens": 24}},
    "adapter a": {"lora_path": "a"},
    "adapter b": {"lora_path": "b"},
    "penalties": {"sampling_params": {"frequency_penalty": 0.5, "min_p": 0.02}},
    "numbers": {"return_logprob": True, "top_logprobs_num": 2},
}
ADAPTED = ("q_proj", "v_proj", "down_proj")
BAD_BODIES = (
    *({"text": ""}, {"text": "a", "lora_path": "none"}, {"text": ["a"] * 70_000}, ["a"], {}),
    *({"text": "a", "sampling_params": {"temperature": -1}}, {"input_ids": [10**9]}),
    *({"text": "a", "sampling_params": {"regex": "(a"}}, {"text": "a" * 100_000}),
    {"text": "a", "sampling_params": {"json_schema": '{"$ref": "#"}'}},
)
CHANGE_SECONDS = 20.0  # between updates of weights or adapters
TOKENS_A_CLIENT = 200  # at most, of its prompt and output
SAMPLE_SECONDS = 2.0
IDLE_SECONDS = 120.0
# Growth that is tolerated, in the second half of a run of five minutes or more.
MOST_GROWTH = 1.0  # MiB a minute
# Each update of weights takes and frees tens of MiB, and 288 in a row moved the level by 40.
MOST_MIXED_GROWTH = 5.0
RESTARTS = "jspec:num_engine_restarts_total"
KILLED = "times that the engine failed"  # the error of a request whose engine failed twice


@dataclass(frozen=True, slots=True)
class Job:
    """A request; equal jobs have equal texts."""

    prompt: int
    seed: int
    max_new_tokens: int
    has_stop: bool
    mixed: str = ""  # the key in MIXED of more options

    @classmethod
    def draw(cls, rng: random.Random, *, is_mixed: bool = False) -> Job:
        prompts, seeds = (4, 3) if is_mixed else (len(PROMPTS), SEEDS)  # each is compared later
        prompt, seed = rng.randrange(prompts), rng.randrange(seeds)
        mixed = rng.choice(tuple(MIXED)) if is_mixed else ""
        tokens = MAX_NEW_TOKENS[(prompt + seed) % 4]
        return cls(prompt, seed, tokens, (prompt + seed) % 3 == 0, mixed)

    @property
    def body(self) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "sampling_seed": self.seed,
            "temperature": (0.0, 0.7, 1.0)[self.seed % 3],
            "ignore_eos": True,
        }
        if self.has_stop:
            params["stop"] = ["\n\n\n\n", "assert False"]
        more = MIXED[self.mixed]
        params |= more.get("sampling_params", {})
        body = {"text": PROMPTS[self.prompt], "stream": True, **more}
        return {**body, "sampling_params": params}


@dataclass(slots=True)
class Seen:
    """The clients' results. texts: of each job, all that were read to the end."""

    texts: dict[Job, set[str]] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    num_read: int = 0
    num_left: int = 0
    num_killed: int = 0
    resident: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB
    kills: int = 0
    num_refused: int = 0  # bad bodies, each with a 400
    num_changes: int = 0  # of weights and adapters
    longest_health: float = 0.0  # seconds until /health was answered

    def take(self, job: Job, answer: Answer) -> None:
        if answer.error and KILLED in answer.error:
            self.num_killed += 1
        elif answer.error:
            self.errors[answer.error[:200]] += 1
        elif answer.has_left:
            self.num_left += 1
        else:
            self.num_read += 1
            self.texts.setdefault(job, set()).add(answer.text)


def main(argv: list[str] | None = None) -> int:
    """Run, print and write the result; return 0 if the server is sound."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder, server(options, Path(folder)) as started:
        process, port = started
        options.folder = Path(folder)
        result = asyncio.run(soak(options, process.pid, port))
    result["is_whole"] = not result["faults"]
    print(json.dumps(result, indent=1))
    if options.output is not None:
        write_result(options.output, result)
    return 0 if result["is_whole"] else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--leaving", type=float, default=1 / 3, help="share that leaves")
    parser.add_argument("--rows", type=int, default=16, help="--max-running-requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed", action="store_true", help="requests of every kind")
    parser.add_argument("--engine-process", action="store_true")
    parser.add_argument("--kill-every", type=float, help="seconds between kills of the process")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    if options.kill_every and not options.engine_process:
        parser.error("--kill-every is given without --engine-process; expected both")
    return options


@contextmanager
def server(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server and yield it with its port. folder: of adapters."""
    tokens = options.clients * TOKENS_A_CLIENT // 10
    flags = {
        "--port": 0,
        "--max-running-requests": options.rows,
        "--max-total-tokens": max(tokens, 2 * TOKENS_A_CLIENT),
        "--chunked-prefill-size": 64,
        "--context-length": 512,
        "--log-interval": 0,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    words += ["--incremental-streaming-output", "--dtype", "float32"]
    words += ["--engine-process"] if options.engine_process else []
    if options.mixed:
        base = load_file(BUNDLED / "target" / "model.safetensors")
        for seed, name in enumerate("abc"):
            write_adapter(folder / name, base, ADAPTED, seed=seed, size=0.05)
        words += ["--lora-paths", *(f"{name}={folder / name}" for name in "ab")]
        words += ["--max-loras-per-batch", "3", "--enable-priority-scheduling"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jspec.cli.main", "serve", *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "ready: " in line:
                break
        else:
            raise SystemExit(f"the server did not start:\n{''.join(lines)}")
        draining = subprocess.Popen(["cat"], stdin=process.stderr, stdout=sys.stderr)
        yield process, int(line.split()[3].rsplit(":", 1)[1])
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        draining.wait()
        process.stderr.close()


async def soak(options: argparse.Namespace, pid: int, port: int) -> dict[str, Any]:
    """Run the load, then check the idle server."""
    await compare(port, {Job(0, 0, 16, False): set()})  # warm up: some objects are made once
    before = held(pid)
    seen, started = Seen(), time.monotonic()
    until = started + 60 * options.minutes
    clients = [
        client(port, options, random.Random(options.seed * 1000 + i), until, seen)
        for i in range(options.clients)
    ]
    watching = [asyncio.ensure_future(watch(pid, port, started, seen))]
    if options.mixed:
        changing = asyncio.ensure_future(change(port, options.folder, until, seen))
        clients += [changing, send_bad_bodies(port, until, seen)]
    if options.kill_every:
        watching.append(asyncio.ensure_future(kill(port, options.kill_every, seen)))
    await asyncio.gather(*clients)
    seconds = time.monotonic() - started
    for task in watching:
        task.cancel()
    idle = await until_idle(port, seen.kills)
    metrics = await read_metrics(port)
    after = held(pid)
    differing = await compare(port, seen.texts)
    slope = growth(seen.resident)
    faults = [
        *(f"{count} times: {error}" for error, count in seen.errors.items()),
        *([] if idle else [f"not idle after {IDLE_SECONDS:g} s"]),
        *differing,
        *leaks(metrics, before, after),
    ]
    if not metrics["sglang:num_retracted_requests_total"]:
        faults.append("nothing was retracted: the memory was not short")
    most = MOST_MIXED_GROWTH if options.mixed else MOST_GROWTH
    if options.minutes >= 5 and slope is not None and slope > most:
        faults.append(f"resident memory grew by {slope:.2f} MiB a minute in the second half")
    return {
        "minutes": round(seconds / 60, 3),
        "clients": options.clients,
        "engine_process": options.engine_process,
        "num_read": seen.num_read,
        "num_left": seen.num_left,
        "num_failed_by_kills": seen.num_killed,
        "num_kills": seen.kills,
        "mixed": options.mixed,
        "num_refused": seen.num_refused,
        "num_changes_of_weights_and_adapters": seen.num_changes,
        "longest_health_seconds": round(seen.longest_health, 2),
        "num_distinct_jobs": len(seen.texts),
        "num_differing": len(differing),
        "num_retractions": metrics["sglang:num_retracted_requests_total"],
        "num_restarts": metrics[RESTARTS],
        "num_tokens": metrics["sglang:generation_tokens_total"],
        "held_before": before,
        "held_after": after,
        "resident_mib": [[round(at), round(mib, 1)] for at, mib in thinned(seen.resident)],
        "growth_mib_a_minute": None if slope is None else round(slope, 3),
        "faults": faults,
    }


async def client(
    port: int, options: argparse.Namespace, rng: random.Random, until: float, seen: Seen
) -> None:
    """Send one request after the other until the time is over."""
    while time.monotonic() < until:
        job = Job.draw(rng, is_mixed=options.mixed)
        leaves = rng.randrange(40) if rng.random() < options.leaving else None
        body = {**job.body, "priority": rng.randrange(-2, 3)} if options.mixed else job.body
        seen.take(job, await stream(port, body, leaves_after=leaves))


async def send_bad_bodies(port: int, until: float, seen: Seen) -> None:
    while time.monotonic() < until:
        for body in BAD_BODIES:
            answer = await stream(port, body)
            if answer.error.startswith("status 400"):
                seen.num_refused += 1
            else:
                seen.errors[f"a bad body got {answer}"[:200]] += 1
            await asyncio.sleep(0.2)


async def change(port: int, folder: Path, until: float, seen: Seen) -> None:
    """Read the same weights again, and load and unload an adapter: the texts stay."""
    target = {"model_path": str(BUNDLED / "target"), "selector": "target"}
    changes = (
        ("/update_weights_from_disk", {**target, "abort_all_requests": False}),
        ("/load_lora_adapter", {"lora_name": "c", "lora_path": str(folder / "c")}),
        ("/unload_lora_adapter", {"lora_name": "c"}),
    )
    while time.monotonic() < until:
        for path, body in changes:
            answer = json.loads(await fetch(port, path, body))
            if answer["success"]:
                seen.num_changes += 1
            else:
                seen.errors[f"{path}: {answer}"[:200]] += 1
            await asyncio.sleep(CHANGE_SECONDS)


async def watch(pid: int, port: int, started: float, seen: Seen) -> None:
    while True:
        at = time.monotonic()
        seen.resident.append((at - started, resident_mib(pid)))
        await fetch(port, "/health")
        seen.longest_health = max(seen.longest_health, time.monotonic() - at)
        await asyncio.sleep(SAMPLE_SECONDS)


async def kill(port: int, every: float, seen: Seen) -> None:
    """Kill the engine's process every `every` seconds, after a request has been answered: an engine
    that is starting is not killed.
    """
    while True:
        await asyncio.sleep(every)
        await stream(port, Job(0, 0, 1, False).body)
        info = json.loads(await fetch(port, "/server_info"))
        os.kill(info["engine_process_id"], signal.SIGKILL)
        seen.kills += 1


async def until_idle(port: int, kills: int) -> bool:
    """Return whether all requests have ended, with the engine running again after all kills."""
    deadline = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < deadline:
        metrics = await read_metrics(port)
        waiting = metrics["sglang:num_running_reqs"] or metrics["sglang:num_queue_reqs"]
        if not waiting and metrics[RESTARTS] >= kills:
            await asyncio.sleep(1.0)  # until connections are closed
            return True
        await asyncio.sleep(0.2)
    return False


async def compare(port: int, texts: dict[Job, set[str]]) -> list[str]:
    """Return the differences of the texts from those of the idle server."""
    found = []
    for job, given in texts.items():
        alone = await stream(port, job.body)
        if alone.error:
            found.append(f"{job}: {alone.error[:200]}")
        elif given - {alone.text}:
            found.append(f"{job}: {sorted(given)!r} under load, {alone.text!r} alone")
    return found


def leaks(
    metrics: dict[str, float], before: dict[str, int], after: dict[str, int]
) -> Iterator[str]:
    """Yield pages, files and threads that were not released."""
    if metrics["jspec:num_leaked_pages"]:
        yield f"{metrics['jspec:num_leaked_pages']:g} leaked pages"
    free, whole = metrics["sglang:kv_available_tokens"], metrics["sglang:max_total_num_tokens"]
    if free < whole:
        yield f"{free:g} of {whole:g} tokens free when idle"
    for name in before:
        if after[name] > before[name] + 8:  # a thread pool grows once
            yield f"{after[name]} {name} when idle, {before[name]} before"


def held(pid: int) -> dict[str, int]:
    """Return the open resources of a process."""
    proc = Path(f"/proc/{pid}")
    return {
        "files": len(list((proc / "fd").iterdir())),
        "threads": len(list((proc / "task").iterdir())),
    }


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(samples: list[tuple[float, float]]) -> float | None:
    """Return MiB per minute in the second half, by least squares; None for too few samples."""
    half = [(at, mib) for at, mib in samples if at >= samples[-1][0] / 2]
    if len(half) < 3:
        return None
    at, mib = np.array(half).T
    return float(np.polyfit(at / 60, mib, 1)[0])


def thinned(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most 60 of the samples."""
    return samples[:: max(len(samples) // 60, 1)]


if __name__ == "__main__":
    sys.exit(main())
