"""Batch runs: every line goes through the server's own routes, without a socket. Defaults such as
the seed derive from the line number, so a killed run continues with the same results."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message

from jspec.cli.batch_files.batch_file import AnswerFile, Line, answer, is_well, refusal
from jspec.errors import EngineClosedError
from jspec.messages.seeds import MAX_SEED, choice_seed
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

RETRY_SECONDS = 0.05
# Random ids of tool calls (jspec.text.calls.registry).
_LONG_ID, _SHORT_ID = re.compile("call_[0-9a-f]{24}"), re.compile("[A-Za-z0-9]{9}")
SEED_NAMES = ("seed", "sampling_seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    seed: int
    created: int  # seconds since 1970
    window: int  # lines in progress at once
    server: ServerArgs = field(default_factory=ServerArgs)


def window_of(engine: Engine) -> int:
    """Return enough lines to keep all slots busy, within the queue's limit."""
    limits = engine.limits
    return max(1, min(2 * limits.pool.max_rows + 16, limits.scheduling.max_queued_requests))


async def run_batch(
    engine: Engine,
    lines: Iterator[Line],
    answers: AnswerFile,
    settings: BatchSettings,
    *,
    on_answer: Callable[[bool], None],
) -> None:
    """Answer all `lines`; on_answer gets True for each success. Raises EngineClosedError."""
    app = create_app(engine, settings.server)
    waiting: deque[asyncio.Task[dict[str, Any]]] = deque()

    async def write_next() -> None:
        found = await waiting[0]
        waiting.popleft()
        answers.write(found)
        on_answer(is_well(found))

    try:
        for line in lines:
            waiting.append(asyncio.ensure_future(_answer_line(app, engine, line, settings)))
            while len(waiting) >= settings.window:
                await write_next()
        while waiting:
            await write_next()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _answer_line(
    app: ASGIApp, engine: Engine, line: Line, settings: BatchSettings
) -> dict[str, Any]:
    if line.answered is not None:
        return dict(line.answered)
    if line.wrong:
        return refusal(line, "invalid_request", line.wrong)
    body = json.dumps(with_seed(line, settings.seed)).encode()
    while True:
        status, found = await post(app, line.url, body)
        if engine.is_closed:
            raise EngineClosedError(f"the engine ended at line {line.number}: {found}")
        if status != HTTPStatus.SERVICE_UNAVAILABLE:
            return answer(line, status, _of_line(line, found, settings))
        await asyncio.sleep(RETRY_SECONDS)  # the queue is full: a line may request many sequences


def with_seed(line: Line, seed: int) -> dict[str, Any]:
    """Return the body with a missing seed (and for /generate rid) derived from the line."""
    own = choice_seed(seed & MAX_SEED, line.number)
    if line.url != "/generate":
        return {**line.body, **({} if _has_seed(line.body) else {"seed": own})}
    params = line.body.get("sampling_params") or {}
    if isinstance(params, list):
        seeded: Any = [_seeded(each, choice_seed(own, i)) for i, each in enumerate(params)]
    else:
        seeded = _seeded(params, own)
    named = {} if line.body.get("rid") else {"rid": line.answer_id}
    return {**line.body, **named, "sampling_params": seeded}


def _seeded(params: Any, seed: int) -> Any:
    if not isinstance(params, dict) or _has_seed(params):
        return params
    return {**params, "sampling_seed": seed}


def _has_seed(params: Mapping[str, Any]) -> bool:
    return any(params.get(name) is not None for name in SEED_NAMES)


def _of_line(line: Line, found: Any, settings: BatchSettings) -> Any:
    """Replace what a rerun would not reproduce: time, ids, and the number of cached tokens."""
    if not isinstance(found, dict):
        return found
    if found.get("object") == "response":
        return _response_of_line(line, found, settings)
    if "created" not in found:
        return found
    kind = str(found["id"]).split("-")[0]
    for choice in found["choices"]:
        calls = choice.get("message", {}).get("tool_calls") or ()
        for i, call in enumerate(calls):
            call["id"] = _call_id(call["id"], f"{line.answer_id} {choice['index']} {i}")
    usage = {**found["usage"], "prompt_tokens_details": None}
    of_line = {"id": f"{kind}-{line.answer_id}", "created": settings.created, "usage": usage}
    return {**found, **of_line}


def _response_of_line(line: Line, found: dict[str, Any], settings: BatchSettings) -> dict[str, Any]:
    for i, item in enumerate(found["output"]):
        place = f"{line.answer_id} {i}"
        kind = item["id"].split("_")[0]
        item["id"] = f"{kind}_{hashlib.blake2b(place.encode()).hexdigest()[:32]}"
        if "call_id" in item:
            item["call_id"] = _call_id(item["call_id"], place)
    # OpenAI's schema requires a number of cached tokens.
    cached = {**found["usage"]["input_tokens_details"], "cached_tokens": 0}
    usage = {**found["usage"], "input_tokens_details": cached}
    of_line = {"id": f"resp_{line.answer_id}", "created_at": settings.created, "usage": usage}
    return {**found, **of_line}


def _call_id(given: str, place: str) -> str:
    digest = hashlib.blake2b(place.encode()).hexdigest()
    if _LONG_ID.fullmatch(given):
        return f"call_{digest[:24]}"
    return digest[:9] if _SHORT_ID.fullmatch(given) else given


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, Any]:
    messages: deque[Message] = deque([{"type": "http.request", "body": body, "more_body": False}])
    status, parts = 0, []

    async def receive() -> Message:
        if not messages:  # stays connected until the answer is complete
            await asyncio.Event().wait()
        return messages.popleft()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 0),
    }
    await app(scope, receive, send)
    return status, json.loads(b"".join(parts))
