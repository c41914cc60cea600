"""Shared code of the server's tests: idleness, events, and clients without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from starlette.applications import Starlette

from jspec.serving.engine import Engine

ENDLESS = {"max_new_tokens": 16000, "ignore_eos": True}


def longest_pause(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of this thread's longest pause while another worked, and of all the
    work."""
    worst, last = 0.0, (began := time.monotonic())
    working = threading.Thread(target=work)
    working.start()
    while working.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        worst, last = max(worst, now - last), now
    return worst, last - began


def wait_idle(engine: Engine, *, seconds: float = 120.0) -> None:
    """Wait until no request runs, then assert that every slot and page is free."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stats = engine.stats
        at_work = stats.num_running or stats.num_queued or stats.num_steps_in_flight
        # The numbers are read one after the other: pages may come back a moment later.
        if not at_work and stats.num_free_pages == stats.num_pages:
            assert stats.num_leaked_pages == 0
            return
        time.sleep(0.02)
    raise AssertionError(f"not idle after {seconds} s: {engine.stats}")


def wait_running(engine: Engine, num_running: int, *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while engine.stats.num_running != num_running:
        assert time.monotonic() < deadline, engine.stats
        time.sleep(0.005)


def wait_taken(engine: Engine, num_taken: int, *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while engine.stats.num_running + engine.stats.num_queued < num_taken:
        assert time.monotonic() < deadline, engine.stats
        time.sleep(0.005)


def events_of(body: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream, which must end with [DONE]."""
    parts = body.split("\n\n")
    assert parts[-1] == ""
    assert parts[-2] == "data: [DONE]"
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def ask(app: Starlette, method: str, path: str, **options: Any) -> httpx.Response:
    """Send one request to an application, without a socket."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())
