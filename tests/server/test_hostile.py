"""Hostile or broken clients cannot stall others, fill memory, or occupy connections."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

from jspec.errors import RequestError
from jspec.server.app import create_app
from jspec.server.hardening.body_budget import NUM_BODIES, BodyBudget
from jspec.server.hardening.connections import bounded_protocol, most_connections
from jspec.server.hardening.json_bounds import MAX_CONTAINERS
from jspec.server.serve import GRACE_SECONDS
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from jspec.text.tokenizer.tokenizer import Tokenizer

from .helpers import ask, longest_pause


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[int]:
    """Start a live server with short time-outs; return its port."""
    args = options.get("args") or ServerArgs(request_timeout=0.3, log_interval=0)
    protocol = bounded_protocol(
        head_seconds=options.get("head_seconds", 0.3), max_connections=options.get("most", 64)
    )
    config = uvicorn.Config(create_app(engine, args), port=0, log_config=None, http=protocol)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(timeout=30)


HALF = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"

ENDLESS_BODY = json.dumps(
    {"text": "x", "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}, "stream": True}
).encode()
ENDLESS_REQUEST = (
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(ENDLESS_BODY)
) + ENDLESS_BODY


def send(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """Return all that the server answers until it closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        while data := connection.recv(65536):
            answer += data
    return answer


def test_a_head_that_does_not_come_ends_the_connection(engine: Engine) -> None:
    with serving(engine) as port:
        started = time.monotonic()
        for parts in ((), (b"GET /health HT",), (b"GET /health HTTP/1.1\r\nHost: x\r\n",)):
            assert send(port, *parts).startswith(b"HTTP/1.1 408")
        slowly = [b"GET ", b"/health ", b"HTTP/1.1\r\n", b"A: b\r\n"]
        assert b"408" in send(port, *slowly, pause=0.12)
        # An incomplete second head also times out.
        begun = send(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /he", pause=0.1)
        assert begun.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in begun
        assert time.monotonic() - started < 30


def test_a_body_that_does_not_come_is_a_408(engine: Engine) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with serving(engine) as port:
        answer = send(port, head, *[b"{"] * 2, pause=0.12)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"--request-timeout" in answer


def test_unfinished_bodies_are_bounded_together(engine: Engine) -> None:
    """Each lacks only its last byte, and has time; the oldest ones make room for the others."""
    args = ServerArgs(request_timeout=60, max_request_bytes=1000, log_interval=0)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with serving(engine, args=args, head_seconds=60) as port, ExitStack() as stack:
        held = []
        for _ in range(NUM_BODIES + 3):
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)))
            held[-1].sendall(head + b" " * 999)
            time.sleep(0.02)
        for connection in held[:3]:
            assert connection.recv(12) == b"HTTP/1.1 503"
        for connection in held[3:]:
            connection.sendall(b"{")
            assert connection.recv(12) == b"HTTP/1.1 400"  # it came whole, and is no JSON


def test_a_body_may_make_room_in_the_moment_in_which_its_time_ends() -> None:
    async def run() -> int:
        budget, loop = BodyBudget(10), asyncio.get_running_loop()
        added = loop.create_future()

        def add(limit: asyncio.Timeout) -> None:
            with budget.open(limit) as body:
                budget.add(body, 8)
                added.set_result(budget.num_bytes)

        async def hold(ample: asyncio.Timeout) -> None:
            async with asyncio.timeout(0.01) as limit:
                with budget.open(limit) as body:
                    budget.add(body, 8)
                    loop.call_at(limit.when() or 0.0, add, ample)  # just after the limit
                    await asyncio.sleep(60)

        async with asyncio.timeout(60) as ample:
            with pytest.raises(TimeoutError):
                await hold(ample)
            return await added

    assert asyncio.run(run()) == 8


@pytest.mark.parametrize(("size", "status"), [(1, b"400"), (80, b"200"), (900, b"200")])
def test_a_body_of_a_great_many_tiny_chunks_is_refused(
    engine: Engine, size: int, status: bytes
) -> None:
    """Each chunk is an event for its reader and costs 5 us or more."""
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    body = json.dumps({"prompt": "x" * 6000 * min(size, 64)}).encode()
    cut = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in cut)
    with serving(engine, args=PATIENT, head_seconds=60) as port:
        try:
            answer = send(port, head, chunks, b"0\r\n\r\n")
        except ConnectionError:  # closed while this still sends
            answer = b"HTTP/1.1 400"
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert send(port, b"GET /health HTTP/1.1\r\nConnection: close\r\nHost: x\r\n\r\n")


SMUGGLED = b"GET /server_info HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 99\r\n\r\n",
        b"HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["length first", "length last", "two lengths", "http/1.0"],
)
def test_a_body_of_two_lengths_smuggles_no_request(engine: Engine, head: bytes) -> None:
    """A proxy may use one length and the server the other: one's body is then the other's next
    request."""
    with serving(engine) as port:
        answer = send(port, b"POST /abort_request " + head + b"0\r\n\r\n" + SMUGGLED)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_slow_answer_is_no_slow_request(engine: Engine) -> None:
    params = {"max_new_tokens": 400, "ignore_eos": True}
    with serving(engine) as port:
        url = f"http://127.0.0.1:{port}/generate"
        body = {"text": "x", "sampling_params": params}
        answer = httpx.post(url, json=body, timeout=60, trust_env=False).json()
    assert answer["meta_info"]["e2e_latency"] > 0.3
    assert len(answer["output_ids"]) == 400


IDS = json.dumps({"tokens": [5] * 3_000_000}).encode()  # its answer exceeds the system's buffers
PATIENT = ServerArgs(request_timeout=60, log_interval=0)  # with bodies


def ask_for_much(port: int, version: bytes, *, buffer: int) -> socket.socket:
    """Open a connection with an answer of 6 MB to come. HTTP/1.0: the server closes it
    afterwards."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", port))
    head = b"POST /detokenize HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % (version, len(IDS)) + IDS)
    return connection


@pytest.mark.slow
def test_an_answer_that_nobody_reads_ends_the_connection(engine: Engine) -> None:
    with serving(engine, args=PATIENT) as port:
        held = [ask_for_much(port, version, buffer=4096) for version in (b"1.1", b"1.0")]
        for connection in held:
            with connection:
                poll = select.poll()
                poll.register(connection, select.POLLERR | select.POLLHUP)
                assert poll.poll(30_000), "it is held for as long as the client likes"


@pytest.mark.slow
def test_an_answer_that_is_read_slowly_comes_whole(engine: Engine) -> None:
    with (
        serving(engine, args=PATIENT) as port,
        ask_for_much(port, b"1.0", buffer=65536) as connection,
    ):
        num_bytes, began = 0, time.monotonic()
        while data := connection.recv(100_000):
            num_bytes += len(data)
            if time.monotonic() < began + 2:  # of 0.5 in which something must be taken
                time.sleep(0.05)
        assert num_bytes > 3_000_000


def test_connections_are_bounded(engine: Engine) -> None:
    assert 1 <= most_connections() <= 4096
    assert most_connections(128) > 32  # other open files are counted, not guessed
    assert most_connections(3) == 1
    with serving(engine, args=PATIENT, head_seconds=60, most=2) as port:
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        for connection in held:  # whose answers are to come
            connection.sendall(ENDLESS_REQUEST)
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert send(port).startswith(b"HTTP/1.1 503")
        for connection in held:
            connection.close()
        ends, health = (
            time.monotonic() + 30,
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close",
        )
        while b"200 OK" not in send(port, health + b"\r\n\r\n"):
            assert time.monotonic() < ends, "closed connections still count"
            time.sleep(0.05)


def test_who_has_sent_no_head_makes_room(engine: Engine) -> None:
    """Connections that only wait for their head make room, the oldest first."""
    endless = json.dumps({"text": "x", "sampling_params": {"max_new_tokens": 300}, "stream": True})
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(endless)
    with serving(engine, most=3, head_seconds=30) as port, ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))]
        held[0].sendall(head + endless.encode())
        assert held[0].recv(12) == b"HTTP/1.1 200"
        for _ in range(2):
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)))
            held[-1].sendall(b"GET /hea")
        health = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert send(port, health).startswith(b"HTTP/1.1 200")
        assert held[1].recv(12) == b"HTTP/1.1 503"
        held[2].sendall(b"lth HTTP/1.1\r\nHost: x\r\n\r\n")
        assert held[2].recv(12) == b"HTTP/1.1 200"


@pytest.mark.slow
def test_others_are_answered_while_a_long_body_is_checked(engine: Engine) -> None:
    """Checking the settings of sixty thousand requests takes two seconds."""
    settings = [{"temperature": 1.0}] * 60_000
    whole = json.dumps({"text": ["x"] * 60_000, "sampling_params": settings}).encode()
    with serving(engine, args=PATIENT, head_seconds=60) as port:
        url = f"http://127.0.0.1:{port}"
        asking = threading.Thread(
            target=httpx.post,
            args=(f"{url}/generate",),
            kwargs={"content": whole, "timeout": 60, "trust_env": False},
        )
        waits = []
        with httpx.Client(timeout=60, trust_env=False) as client:
            client.get(f"{url}/health")
            began = time.monotonic()
            asking.start()
            while asking.is_alive():
                asked = time.monotonic()
                assert client.get(f"{url}/health").is_success
                waits.append(time.monotonic() - asked)
                time.sleep(0.005)
            lasted = time.monotonic() - began
    # A share of the whole, for beside other work all waits grow alike: a body that is checked
    # where requests are answered has all of it, a thread's check a tenth.
    assert max(waits) < lasted / 2


def test_containers_are_counted_outside_of_text(engine: Engine) -> None:
    app = create_app(engine)
    body = b'{"text": [' + b",".join([b"[]"] * (MAX_CONTAINERS + 1)) + b"]}"
    response = ask(app, "POST", "/generate", content=body)
    assert response.status_code == 400
    assert f"expected at most {MAX_CONTAINERS}" in response.json()["message"]
    text = '[{"\\' * MAX_CONTAINERS
    response = ask(app, "POST", "/tokenize", json={"prompt": text})
    assert response.json()["count"] == len(text)


def test_many_prompts_are_refused_before_they_are_tokenized(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any, **named: Any) -> Any:
        raise AssertionError(named)

    monkeypatch.setattr(engine._intake, "requests", made)
    app = create_app(engine)
    response = ask(app, "POST", "/generate", json={"text": ["x" * 4000] * 2000})
    assert response.status_code == 400
    assert "2000 sequences at once; expected at most max_queued" in response.json()["message"]
    for body in ({"text": ["x"] * 70_000}, {"input_ids": [[1]] * 70_000}):
        response = ask(app, "POST", "/generate", json=body)
        assert "is a list of 70000; expected at most 65536" in response.json()["message"]
    response = ask(app, "POST", "/v1/completions", json={"prompt": ["x"] * 70_000})
    assert "is a list of 70000; expected at most 65536" in response.json()["message"]


def test_text_that_cannot_fit_is_not_tokenized(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer.max_chars_per_token == len("<|endoftext|>")
    most = 13 * 16383
    started = time.monotonic()
    with pytest.raises(RequestError, match=f"has 30000000 characters; expected at most {most}"):
        engine.requests(prompt="x" * 30_000_000)
    assert time.monotonic() - started < 5  # of more than ten
    with pytest.raises(RequestError, match=f"the prompt has {most} tokens; expected fewer than"):
        engine.requests(prompt="x" * most)
    ends = "<|endoftext|>" * 16383  # as long as a text that fits can be
    assert len(engine.requests(prompt=ends)[0].prompt_ids) == 16383


def test_other_threads_run_while_text_is_tokenized() -> None:
    from jspec.engine.weights.loading import BUNDLED

    tokenizer = Tokenizer.from_directory(BUNDLED / "target")
    text = "def f(x):\n    return x + 1\n" * 40_000
    worst, whole = longest_pause(partial(tokenizer.encode, text))
    assert worst < whole / 2


def test_sigterm_lets_what_runs_end(
    engine_arguments: dict[str, Any], subprocess_env: dict[str, str]
) -> None:
    flags = [
        part
        for name, value in engine_arguments.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    server = subprocess.Popen(
        [sys.executable, "-m", "jspec.cli.main", "serve", "--port", "0", *flags],
        env={**subprocess_env, **{k: v for k, v in os.environ.items() if k.startswith("JAX")}},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        url = next(line.split()[3] for line in server.stderr if "ready: " in line)
        body = {
            "text": "x",
            "stream": True,
            "sampling_params": {"max_new_tokens": 250, "ignore_eos": True},
        }
        with (
            httpx.Client(timeout=60, trust_env=False) as client,
            client.stream("POST", f"{url}/generate", json=body) as answer,
            socket.create_connection(("127.0.0.1", httpx.URL(url).port), 60) as half_sent,
        ):
            half_sent.sendall(HALF)
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert half_sent.recv(12) == b"HTTP/1.1 503"
            deadline = time.monotonic() + 10  # it still listens, and refuses
            while client.get(f"{url}/ready").status_code != 503:
                assert time.monotonic() < deadline
            assert client.post(f"{url}/generate", json=body).status_code == 503
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        assert last["meta_info"]["completion_tokens"] == 250
        ended = time.monotonic()
        server.wait(timeout=30)
        assert time.monotonic() < ended + GRACE_SECONDS, "it waited for a body that does not come"
        log = server.stderr.read()
        assert "Traceback" not in log
        assert log.endswith("] stopped\n"), "the engine was not closed, or nobody was told"
        assert server.returncode == 0
    finally:
        server.kill()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()


def resident_mib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_a_long_text_leaves_no_memory_behind() -> None:
    from jspec.engine.weights.loading import BUNDLED

    tokenizer = Tokenizer.from_directory(BUNDLED / "target")
    text = "def f(x):\n    return x + 1\n" * 40_000  # takes 125 MiB while it is tokenized
    before = resident_mib()
    encoding = threading.Thread(target=tokenizer.encode, args=(text,))
    encoding.start()
    encoding.join()
    assert resident_mib() < before + 60
