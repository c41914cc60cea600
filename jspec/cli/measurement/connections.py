"""A pool of keep-alive HTTP/1.1 connections, cheap compared with the server that it measures."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 2**20
NO_HEADERS: Mapping[str, str] = {}


class Connections:
    """Keep-alive connections to one server. Each request has `headers`. Raises ValueError."""

    def __init__(self, url: str, *, headers: Mapping[str, str] = NO_HEADERS) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"url is {url!r}; expected http://HOST:PORT")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> AsyncGenerator[bytes]:
        """Yield the answer's lines as they arrive. Raises RuntimeError unless status is 200."""
        async for line in self._lines("POST", path, body):
            yield line

    async def get(self, path: str) -> bytes:
        """Return the whole answer. Raises RuntimeError unless the status is 200."""
        return b"\n".join([line async for line in self._lines("GET", path, b"")])

    async def get_json(self, path: str) -> dict[str, Any]:
        """Return a JSON object; empty if the answer is another value or an error."""
        try:
            found = json.loads(await self.get(path))
        except (RuntimeError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _lines(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes]:
        reader, writer = await self._connection()
        is_whole = False
        try:
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\n"
            head += f"Host: {self._host}:{self._port}\r\n{self._headers}"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status, headers = await _read_head(reader)
            parts = _parts(reader, headers)
            if status != 200:
                text = b"".join([part async for part in parts])
                raise RuntimeError(f"status {status}: {_message(text)}")
            rest = b""
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line
            is_whole = True
            if rest:
                yield rest
        finally:
            if is_whole and headers.get("connection", "").lower() != "close":
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(
            self._host, self._port, limit=READ_BYTES, ssl=self._ssl
        )

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


def _message(text: bytes) -> str:
    try:
        found = json.loads(text)
        message = (found.get("error") or found)["message"]
    except (ValueError, AttributeError, KeyError, TypeError):
        message = text.decode(errors="replace")
    return str(message)[:200]


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = lines[0].split()
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
        raise RuntimeError(f"the answer begins with {lines[0][:60]!r}; expected HTTP")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(words[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _parts(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    if headers.get("transfer-encoding", "").lower() != "chunked":
        yield await reader.read()  # until the server closes
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
