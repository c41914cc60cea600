"""Replicas that are killed under load: no stream ends with an error, and no text changes.

    python -m benchmarks.ray_kill --seconds 120 --output ray_kill_cpu.json

Starts a Ray cluster of two nodes on this machine, with one replica of the bundled pair on each, and
keeps --streams streams open over HTTP: greedy and sampled ones, with grammars, stop strings,
several choices and log-probabilities. Every --kill-every seconds a replica gets SIGKILL. Afterwards
every answer is compared with that of the same requests without kills, in float32.

Fails (status 1) on an error or a differing answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.environment import write_result

TOLERANCE = 1e-3
STORE_BYTES = 80 * 2**20
PROMPTS = ("def fib(n):", "class Stack:\n", "import os\n\n\ndef walk(path", "for i in range(10):\n")
KINDS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 1.0, "stop": ["\n\n\n", "return 1"]},
    {"temperature": 1.0, "n": 2},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 1.0, "regex": "(yes|no|maybe|[a-z]{3,9} ){40,90}"},
)


@dataclass(slots=True, kw_only=True)
class Answer:
    """The output of one request. text, reasons: by choice."""

    text: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""
    longest_pause: float = 0.0

    def equals(self, other: Answer) -> bool:
        """Compare all but times; log-probabilities may differ by rounding."""
        pairs = [*zip(self.logprobs, other.logprobs, strict=False)]
        return (
            (self.text, self.reasons, self.num_tokens)
            == (other.text, other.reasons, other.num_tokens)
            and len(self.logprobs) == len(other.logprobs)
            and all(a == b and abs(x - y) < TOLERANCE for (a, x), (b, y) in pairs)
        )


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    body = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": max_tokens, "seed": number}
    return {
        **body,
        **KINDS[number % len(KINDS)],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def fetch(client: httpx.AsyncClient, number: int, max_tokens: int) -> Answer:
    answer, last = Answer(), time.monotonic()
    try:
        body = body_of(number, max_tokens)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = (await response.aread()).decode()
                return answer
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                answer.longest_pause, last = max(answer.longest_pause, now - last), now
                _add(answer, json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        answer.error = repr(error)
    if not answer.error and not answer.num_tokens:
        answer.error = "the stream ended without its usage"
    return answer


def _add(answer: Answer, event: Mapping[str, Any]) -> None:
    if "error" in event or event.get("object") == "error":
        answer.error = json.dumps(event)
        return
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        index = choice["index"]
        answer.text[index] = answer.text.get(index, "") + choice["text"]
        if choice["finish_reason"] is not None:
            answer.reasons[index] = choice["finish_reason"]
        if choice.get("logprobs"):
            pairs = zip(
                choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True
            )
            answer.logprobs += pairs


async def keep_killing(
    client: httpx.AsyncClient, every: float, until: float, kills: list[float]
) -> None:
    """Send SIGKILL to one of the live replicas, regularly."""
    chance, began = random.Random(0), time.monotonic()
    killed: set[int] = set()
    while time.monotonic() + every < until:
        await asyncio.sleep(every)
        info = (await client.get("/server_info")).json()
        alive = sorted(set(info["replica_process_ids"]) - killed)
        if alive:  # else both are starting
            process = chance.choice(alive)
            killed.add(process)
            os.kill(process, signal.SIGKILL)
            kills.append(round(time.monotonic() - began, 2))


async def under_kills(
    url: str, options: argparse.Namespace
) -> tuple[dict[int, Answer], list[float]]:
    """Keep the streams open for the time given; return the answers by their number."""
    answers: dict[int, Answer] = {}
    kills: list[float] = []
    until = time.monotonic() + options.seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def keep_open(first: int) -> None:
            number = first
            while time.monotonic() < until:
                answers[number] = await fetch(client, number, options.max_tokens)
                number += options.streams

        killing = asyncio.create_task(keep_killing(client, options.kill_every, until, kills))
        await asyncio.gather(*map(keep_open, range(options.streams)))
        await killing
    return answers, kills


async def undisturbed(url: str, numbers: list[int], options: argparse.Namespace) -> list[Answer]:
    gate = asyncio.Semaphore(options.streams)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(number: int) -> Answer:
            async with gate:
                return await fetch(client, number, options.max_tokens)

        return await asyncio.gather(*map(one, numbers))


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from jspec.distributed.ray_serve import app

    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=options.verbose, logging_level="warning")
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        arguments = {
            "num_replicas": 2,
            "max_running_requests": options.streams // 2,
            "max_queued_requests": 4 * options.streams,
            "context_length": 1024,
            "dtype": "float32",
            "log_interval": 0.0,
            "health_check_period_s": 1.0,
            **json.loads(options.engine),
        }
        began = time.monotonic()
        serve.run(app(arguments))
        started = time.monotonic() - began
        url = f"http://127.0.0.1:{port}"
        answers, kills = asyncio.run(under_kills(url, options))
        numbers = sorted(answers)
        whole = asyncio.run(undisturbed(url, numbers, options))
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return result_of(options, answers, dict(zip(numbers, whole, strict=True)), kills, started)


def result_of(
    options: argparse.Namespace,
    answers: Mapping[int, Answer],
    whole: Mapping[int, Answer],
    kills: list[float],
    started: float,
) -> dict[str, Any]:
    differing = [number for number in answers if not answers[number].equals(whole[number])]
    if options.verbose:
        for number in differing[:3]:
            print(number, answers[number], whole[number], sep="\n", file=sys.stderr)
    pauses = sorted(answer.longest_pause for answer in answers.values())
    return {
        "nodes": 2,
        "replicas": 2,
        "streams": options.streams,
        "seconds": options.seconds,
        "start_seconds": round(started, 1),
        "kill_every": options.kill_every,
        "kills_at": kills,
        "num_kills": len(kills),
        "num_answers": len(answers),
        "num_tokens": sum(answer.num_tokens for answer in answers.values()),
        "num_errors": sum(bool(answer.error) for answer in (*answers.values(), *whole.values())),
        "errors": sorted({answer.error for answer in answers.values() if answer.error})[:5],
        "num_differing": len(differing),
        "median_of_longest_pause": round(pauses[len(pauses) // 2], 2),
        "longest_pause": round(pauses[-1], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kill-every", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--engine", default="{}", help="further arguments, as a JSON object")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    result = measure(options)
    print(json.dumps(result, indent=1))
    if options.output is not None:
        write_result(options.output, result)
    return int(bool(result["num_errors"] or result["num_differing"] or not result["num_kills"]))


if __name__ == "__main__":
    raise SystemExit(main())
