"""Clients that leave at any moment, that read nothing, and that abort in storms; and the memory
afterwards.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

from .helpers import ENDLESS, ask, wait_idle
from .test_hostile import resident_mib, serving

RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER: close by a reset
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads Linux's /proc")
def test_a_client_may_be_gone_at_any_byte(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """It leaves during its request or its answer, by an end or by a reset."""
    whole = json.dumps({"text": "x", "sampling_params": ENDLESS, "stream": True}).encode()
    request = HEAD % len(whole) + whole
    engine.generate("x", {"max_new_tokens": 1})  # files that are opened once are open
    with serving(engine) as port:
        before = num_files()
        cuts = [(i, 0) for i in range(0, len(request), 9)]
        cuts += [(len(request), n) for n in (0, 1, 9, 20, 150, 200, 400, 1000, 5000)]
        for i, (sent, read) in enumerate(cuts):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                if i % 2:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                connection.sendall(request[:sent])
                while read > 0:
                    read -= len(connection.recv(read))
        wait_idle(engine)
        deadline = time.monotonic() + 30
        while num_files() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert num_files() <= before
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.slow
def test_what_no_client_reads_ends_and_health_answers(engine: Engine) -> None:
    """The system's buffers fill up, then those of the server, which are bounded."""
    wait_idle(engine)
    before = engine.stats.num_slow_readers
    body = {"text": "x", "sampling_params": ENDLESS, "stream": True}
    whole = json.dumps(body).encode()
    args = ServerArgs(log_interval=0, max_unread_events=16)
    with serving(engine, args=args, head_seconds=200) as port:  # no client is cut off for that
        held = []
        for _ in range(2):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.sendall(HEAD % len(whole) + whole)
            held.append(connection)
        deadline, worst = time.monotonic() + 120, 0.0
        while engine.stats.num_slow_readers < before + 2:
            assert time.monotonic() < deadline, engine.stats
            asked = time.monotonic()
            assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success
            worst = max(worst, time.monotonic() - asked)
            time.sleep(0.02)
        assert worst < 5.0
        for connection in held:
            connection.close()
    wait_idle(engine)


def test_a_storm_of_aborts_leaves_nothing(engine: Engine) -> None:
    """Requests end at random moments, over and over, while one stays."""
    wait_idle(engine)
    rng = random.Random(0)
    params = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0.0}
    expected = engine.generate("def f(", params)["output_ids"]

    async def storm() -> list[int]:
        async def one() -> None:
            (request,) = engine.requests(prompt="x", sampling_params=ENDLESS)
            (stream,) = await engine.submit((request,))
            for _ in range(rng.randrange(3)):
                await anext(stream)
            if rng.random() < 0.5:
                await engine.abort(request.request_id)
            await stream.aclose()

        async def many() -> None:
            for _ in range(15):
                await one()

        stays = asyncio.ensure_future(engine.async_generate("def f(", params))
        await asyncio.gather(*(many() for _ in range(8)))
        found: list[int] = (await stays)["output_ids"]
        return found

    assert asyncio.run(storm()) == expected
    wait_idle(engine)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_hostile_bodies_leave_no_memory_behind(engine: Engine) -> None:
    app = create_app(engine)
    kinds: list[Callable[[], bytes]] = [
        lambda: b'{"text": [' + b",".join([b"[]"] * 3_000_000) + b"]}",
        lambda: b'{"text": "' + b"a " * 10_000_000 + b'"}',
        lambda: b'{"input_ids": [' + b",".join([b"1"] * 4_000_000) + b"]}",
    ]
    ask(app, "POST", "/generate", content=kinds[0]())  # modules that are loaded once
    gc.collect()  # httpx keeps a request's body in a cycle
    before = resident_mib()
    for make in kinds:
        assert ask(app, "POST", "/generate", content=make()).status_code == 400
    gc.collect()
    assert resident_mib() < before + 150  # of 850


@contextmanager
def served(
    arguments: dict[str, Any], env: dict[str, str], *more: str, port: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server in a separate process; return its URL."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "jspec.cli.main", "serve", "--port", str(port), *flags, *more],
        env={**env, **{k: v for k, v in os.environ.items() if k.startswith("JAX")}},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        yield process, next(line.split()[3] for line in process.stderr if "ready: " in line)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_a_second_signal_ends_a_drain_at_once(
    engine_arguments: dict[str, Any], subprocess_env: dict[str, str]
) -> None:
    body = {"text": "x", "stream": True, "sampling_params": ENDLESS}
    with (
        served(engine_arguments, subprocess_env) as (process, url),
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream("POST", f"{url}/generate", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        while client.get(f"{url}/ready").status_code != 503:
            time.sleep(0.01)
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
        assert time.monotonic() - asked < 5.0  # of 25
        assert rest[-1] == "data: [DONE]"
        ended = json.loads(rest[-2].removeprefix("data: "))["meta_info"]["finish_reason"]
        assert ended == {"type": "abort", "message": "the server is shutting down"}
        process.wait(timeout=30)


@pytest.mark.slow
def test_what_outlasts_a_drain_is_aborted_whether_it_runs_or_waits(
    engine_arguments: dict[str, Any], subprocess_env: dict[str, str]
) -> None:
    flags = ("--drain-seconds", "0.5", "--max-running-requests", "1")
    arguments = {k: v for k, v in engine_arguments.items() if k != "max_running_requests"}
    body = {"text": "x", "sampling_params": ENDLESS}
    of_openai = {"prompt": "x", "max_tokens": ENDLESS["max_new_tokens"], "stream": True}
    calls = [
        ("generate", {**body, "stream": True}),
        ("generate", body),
        ("v1/completions", {**of_openai, "model": "default", "ignore_eos": True}),
    ]
    with (
        ThreadPoolExecutor(len(calls)) as pool,  # ends last: without the server its calls do
        httpx.Client(timeout=60, trust_env=False) as client,
        served(arguments, subprocess_env, *flags) as (process, url),
    ):
        answers = [pool.submit(client.post, f"{url}/{path}", json=sent) for path, sent in calls]
        deadline = time.monotonic() + 30
        while not re.search(r"num_queue_reqs\S* 2\.0", client.get(f"{url}/metrics").text):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        stream, whole, of_openai_stream = (answer.result() for answer in answers)
        expected = {"type": "abort", "message": "the server is shutting down"}
        assert whole.json()["meta_info"]["finish_reason"] == expected
        for answer, reason in ((stream, expected), (of_openai_stream, "abort")):
            *_, last, done = (line for line in answer.text.splitlines() if line)
            assert done == "data: [DONE]"
            found = json.loads(last.removeprefix("data: "))
            assert (found.get("meta_info") or found["choices"][0])["finish_reason"] == reason
        process.wait(timeout=30)


@pytest.mark.slow
def test_a_killed_server_leaves_no_process_and_starts_again_on_its_port(
    engine_arguments: dict[str, Any], subprocess_env: dict[str, str]
) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 8, "temperature": 0.0}}
    texts = []
    port, child = 0, None
    for _ in range(2):
        with served(engine_arguments, subprocess_env, "--engine-process", port=port) as (
            process,
            url,
        ):
            port = int(url.rsplit(":", 1)[1])
            info = httpx.get(f"{url}/server_info", trust_env=False).json()
            child = info["engine_process_id"]
            assert child is not None
            texts.append(httpx.post(f"{url}/generate", json=body, trust_env=False).json()["text"])
            with httpx.stream(
                "POST",
                f"{url}/generate",
                json={**body, "stream": True, "sampling_params": ENDLESS},
                trust_env=False,
                timeout=60,
            ) as answer:
                next(answer.iter_lines())
                process.kill()
                process.wait()
        deadline = time.monotonic() + 20
        while child is not None and is_there(child):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert texts[0] == texts[1]


def is_there(process_id: int) -> bool:
    """Return True if the process runs; a zombie does not."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
