"""Long calls of /tokenize and /detokenize: within bounds, and one after the other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette

from jspec.messages.unknown_fields import IgnoredFields
from jspec.server.control import control_endpoints
from jspec.server.control.control_endpoints import ControlEndpoints
from jspec.server.hardening.body_budget import BodyBudget
from jspec.server.http.exchange import HANDLERS
from jspec.server.server_args import ServerArgs
from jspec.server.service import INLINE_CHARS, Service

LONG = INLINE_CHARS + 1
MAX_SIZE = 2 * LONG  # here; the real one takes seconds to write


class SlowTokenizer:
    """One id per text; it takes 20 ms, and records the most threads that were in it at once."""

    def __init__(self) -> None:
        self.most_at_once = 0
        self._num_inside = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:  # noqa: ARG002
        self._work()
        return (len(text),)

    def decode_all(
        self,
        rows: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool,  # noqa: ARG002
    ) -> list[str]:
        self._work()
        return [str(len(row)) for row in rows]

    def _work(self) -> None:
        with self._lock:
            self._num_inside += 1
            self.most_at_once = max(self.most_at_once, self._num_inside)
        time.sleep(0.02)
        with self._lock:
            self._num_inside -= 1


def served(tokenizer: SlowTokenizer, *, context_length: int = 100) -> httpx.AsyncClient:
    engine = SimpleNamespace(
        tokenizer=tokenizer,
        limits=SimpleNamespace(pool=SimpleNamespace(context_length=context_length)),
        check_ids=lambda *_: None,
    )
    service = cast(Service, SimpleNamespace(engine=engine, args=ServerArgs()))
    app = Starlette(
        routes=cast(Any, ControlEndpoints(service).routes()), exception_handlers=dict(HANDLERS)
    )
    app.state.body_budget, app.state.ignored_fields = BodyBudget(2**30), IgnoredFields()
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * LONG}),
        ("/tokenize", {"prompt": ["x" * LONG, "y"]}),
        ("/detokenize", {"tokens": [1] * LONG}),
        ("/detokenize", {"tokens": [[]] * LONG}),
    ],
    ids=["text", "texts", "ids", "lists"],
)
def test_long_calls_are_answered_one_after_the_other(path: str, body: dict[str, Any]) -> None:
    """They would take all the threads in which others' bodies are read."""
    tokenizer = SlowTokenizer()

    async def run() -> list[httpx.Response]:
        async with served(tokenizer) as client:
            return await asyncio.gather(*(client.post(path, json=body) for _ in range(4)))

    assert [answer.status_code for answer in asyncio.run(run())] == [200] * 4
    assert tokenizer.most_at_once == 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"prompt": "x" * (MAX_SIZE + 1)}, f"prompt has {MAX_SIZE + 1} characters"),
        ("/tokenize", {"prompt": ["x" * MAX_SIZE, "y"]}, f"prompt has {MAX_SIZE + 1} characters"),
        ("/detokenize", {"tokens": [1] * (MAX_SIZE + 1)}, f"tokens has {MAX_SIZE + 1} ids"),
    ],
    ids=["text", "texts", "ids"],
)
def test_what_is_too_long_is_refused_unread(
    path: str, body: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_endpoints, "MAX_SIZE", MAX_SIZE)
    tokenizer = SlowTokenizer()

    async def run() -> list[httpx.Response]:
        found = []
        for context_length in (100, MAX_SIZE):  # a prompt that fits the context is accepted
            async with served(tokenizer, context_length=context_length) as client:
                found.append(await client.post(path, json=body))
        return found

    refused, taken = asyncio.run(run())
    assert refused.status_code == 400
    assert f"{message}; expected at most {MAX_SIZE}" in refused.json()["message"]
    assert taken.status_code == 200


def test_too_many_texts_are_refused() -> None:
    async def run() -> httpx.Response:
        async with served(SlowTokenizer()) as client:
            return await client.post("/tokenize", json={"prompt": [""] * 70_000})

    assert "is a list of 70000; expected at most 65536" in asyncio.run(run()).json()["message"]
