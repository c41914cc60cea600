"""SGLang's router (sglang-router 0.3.2, its own process) in front of two servers."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

from .helpers import events_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None,
        reason="sglang-router is not installed; it is in the extra `dev`",
    ),
]
START = """
import sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

policy, port, *urls = sys.argv[1:]
Router.from_args(
    RouterArgs(
        worker_urls=urls,
        host="127.0.0.1",
        port=int(port),
        policy=policy,
        worker_startup_check_interval=1,
        health_check_interval_secs=1,
    )
).start()
"""
GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT = {"model": "target", "messages": [{"role": "user", "content": "a"}], "max_tokens": 6}
CHAT |= {"temperature": 0, "ignore_eos": True}
SECONDS = 30.0


class Counting:
    """An application that counts its requests by path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.paths: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.paths[scope["path"]] += 1
        await self._app(scope, receive, send)


@contextmanager
def serving(engine: Engine) -> Iterator[tuple[str, Counter[str]]]:
    app = Counting(create_app(engine, ServerArgs(log_interval=0)))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, loop="asyncio"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app.paths
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Routed:
    """A router, its client, and the counts of the servers behind it."""

    def __init__(self, client: httpx.Client, counts: dict[str, Counter[str]]) -> None:
        self.client = client
        self.urls = list(counts)
        self._counts = counts

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(path, json=body).raise_for_status()

    def spread(self, bodies: list[dict[str, Any]]) -> list[int]:
        """Requests at each server, in order of the servers' addresses."""
        before = [counts["/generate"] for counts in self._counts.values()]
        for body in bodies:
            self.post("/generate", body)
        after = [counts["/generate"] for counts in self._counts.values()]
        return [now - then for now, then in zip(after, before, strict=True)]

    def is_ready(self, num_workers: int) -> bool:
        try:
            answer = self.client.get("/readiness")
        except httpx.TransportError:
            return False
        return answer.status_code == 200 and answer.json()["healthy_workers"] == num_workers


@pytest.fixture(scope="module", params=["round_robin", "cache_aware"])
def routed(
    engine: Engine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Routed]:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    log = tmp_path_factory.mktemp("router") / "log.txt"
    with ExitStack() as stack:
        counts = dict(stack.enter_context(serving(engine)) for _ in range(2))
        command = [sys.executable, "-c", START, request.param, str(port), *counts]
        output = stack.enter_context(log.open("w"))
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
        url = f"http://127.0.0.1:{port}"
        client = stack.enter_context(httpx.Client(base_url=url, timeout=SECONDS, trust_env=False))
        found = Routed(client, counts)
        try:
            until(lambda: process.poll() is not None or found.is_ready(2))
            assert process.poll() is None, log.read_text()
            yield found
        finally:
            process.terminate()
            process.wait(timeout=SECONDS)


def test_health_and_models_are_told(routed: Routed) -> None:
    for path in ("/health", "/liveness", "/health_generate"):
        assert routed.client.get(path).status_code == 200
    assert [m["id"] for m in routed.client.get("/v1/models").json()["data"]] == ["target"]
    assert routed.client.get("/get_model_info").json()["is_generation"] is True
    loads = routed.client.get("/get_loads").json()["workers"]
    assert [each["load"] for each in loads] == [0, 0]
    workers = routed.client.get("/workers").json()["workers"]
    assert [worker["is_healthy"] for worker in workers] == [True, True]


def test_answers_are_those_of_the_servers(routed: Routed, engine: Engine) -> None:
    expected = engine.generate("def f(", GREEDY)
    body = {"text": "def f(", "sampling_params": GREEDY}
    answer = routed.post("/generate", body).json()
    assert answer["output_ids"] == expected["output_ids"]
    events = events_of(routed.post("/generate", {**body, "stream": True}).text)
    assert events[-1]["output_ids"] == expected["output_ids"]

    chat = routed.post("/v1/chat/completions", CHAT).json()
    (choice,) = chat["choices"]
    assert chat["usage"]["completion_tokens"] == 6
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(routed.post("/v1/chat/completions", {**CHAT, **options}).text)
    said = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
    assert "".join(said) == choice["message"]["content"]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0

    body = {"model": "target", "prompt": "def f(", "max_tokens": 6, "temperature": 0}
    assert routed.post("/v1/completions", {**body, "ignore_eos": True}).json()["choices"]
    respond = {"model": "target", "input": "a", "max_output_tokens": 6, "store": True}
    assert routed.post("/v1/responses", respond).json()["usage"]["output_tokens"] <= 6
    streamed = routed.post("/v1/responses", {**respond, "stream": True}).text
    assert streamed.startswith("event: response.created\n")


def test_an_error_of_a_server_reaches_the_client(routed: Routed) -> None:
    body = {"text": "a", "sampling_params": {"temperature": -1}}
    answer = routed.client.post("/generate", json=body)
    assert answer.status_code == 400
    assert "temperature is -1" in answer.json()["message"]


def test_the_policy_chooses_the_server(routed: Routed, request: pytest.FixtureRequest) -> None:
    policy = request.node.callspec.params["routed"]
    params = {**GREEDY, "max_new_tokens": 1}
    same = [{"text": "x" * 200, "sampling_params": params}] * 8
    assert sorted(routed.spread(same)) == {"round_robin": [4, 4], "cache_aware": [0, 8]}[policy]


def test_a_worker_leaves_and_comes_back(routed: Routed) -> None:
    params = {**GREEDY, "max_new_tokens": 1}
    bodies = [{"text": f"{i} {'y' * 50}", "sampling_params": params} for i in range(6)]
    workers = {w["url"]: w["id"] for w in routed.client.get("/workers").json()["workers"]}
    for index, url in enumerate(routed.urls):  # when the second leaves, the first has come back
        routed.client.delete(f"/workers/{workers[url]}").raise_for_status()
        until(lambda: routed.is_ready(1))
        assert routed.spread(bodies) == ([0, 6] if index == 0 else [6, 0])
        routed.post("/workers", {"url": url})
        until(lambda: routed.is_ready(2))
