"""Clients of `benchmarks.soak`: one connection per request, which may be closed at any event."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

LIMIT = 2**22  # bytes per line


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response. has_left: the client disconnected before its end."""

    text: str = ""
    error: str = ""
    has_left: bool = False


async def stream(port: int, body: dict[str, Any], *, leaves_after: int | None = None) -> Answer:
    """Return a streamed response of /generate, or its first `leaves_after` events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LIMIT)
    try:
        writer.write(_request("POST", "/generate", json.dumps(body).encode()))
        status = int((await reader.readline()).split()[1])
        if status != 200:
            _, _, told = (await reader.read()).partition(b"\r\n\r\n")
            return Answer(error=f"status {status}: {told.decode()}")
        return await _read(reader, leaves_after)
    except (OSError, IndexError, ValueError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, leaves_after: int | None) -> Answer:
    texts: dict[int, str] = {}  # of each choice
    finish, num_events = "", 0
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if num_events == leaves_after:
            return Answer(text=joined(texts), has_left=True)
        num_events += 1
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            is_whole = finish in ("length", "stop")
            error = "" if is_whole else f"it ended with {finish!r}"
            return Answer(text=joined(texts), error=error)
        event = json.loads(data)
        if "error" in event:
            return Answer(error=event["error"]["message"])
        index = event.get("index", 0)
        texts[index] = texts.get(index, "") + event["text"]
        finish = (event["meta_info"]["finish_reason"] or {}).get("type", "")
    return Answer(error="the stream ended without [DONE]")


def joined(texts: dict[int, str]) -> str:
    return "\0".join(texts[index] for index in sorted(texts))


async def fetch(port: int, path: str, body: Any = None) -> str:
    """Return the body of a GET response or, with a body, of a POST."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LIMIT)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        writer.write(_request("GET" if body is None else "POST", path, data))
        _, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return body.decode()
    finally:
        writer.close()


async def read_metrics(port: int) -> dict[str, float]:
    """Return the metrics of /metrics, without the buckets of histograms."""
    lines = (await fetch(port, "/metrics")).splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in found}


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    kind = "Content-Type: application/json\r\n" if body else ""
    return f"{head}{kind}Content-Length: {len(body)}\r\n\r\n".encode() + body
