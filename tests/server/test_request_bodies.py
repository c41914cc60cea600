"""Bodies that are not JSON or too long, on a real socket: every client reads its answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn

from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

from .helpers import ask

MALFORMED = [
    (b"", "the request body is empty; expected a JSON object"),
    (b"{", "not JSON"),
    (b'{"text": "\xe9"}', "the request body is not UTF-8: byte 0xe9 at offset 10"),
    ('{"text": "a"}'.encode("utf-16"), "the request body is not UTF-8: byte 0xff at offset 0"),
    (b'{"text": NaN}', "NaN is not a JSON number"),
    (
        b'{"text": "x", "rid": 1' + b"0" * 5000 + b"}",
        "cannot be read as JSON: it has an integer of 5001 digits; expected at most 4300",
    ),
    (b"[" * 100_000, "nested too deeply"),
    (b"null", "expected a JSON object"),
]


@pytest.mark.parametrize(("body", "message"), MALFORMED, ids=[m for _, m in MALFORMED])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/abort_request"])
def test_a_malformed_body_is_a_400(
    client: httpx.Client, path: str, body: bytes, message: str
) -> None:
    response = client.post(path, content=body)
    assert response.status_code == 400
    found = response.json()["error"]["message"]
    assert message in found
    assert "sys." not in found  # clients see no advice about Python


def test_a_huge_body_is_a_413(engine: Engine) -> None:
    app = create_app(engine, ServerArgs(max_request_bytes=1000))
    response = ask(app, "POST", "/generate", json={"text": "x" * 1000})
    assert response.status_code == 413
    assert "more than 1000 bytes" in response.json()["message"]


def test_the_limit_counts_the_bytes_that_come(engine: Engine) -> None:
    """The body comes in chunks, without a header for its length."""
    app = create_app(engine, ServerArgs(max_request_bytes=1000))

    async def sent(num_bytes: int) -> AsyncIterator[bytes]:
        yield b" " * (num_bytes - 2)
        yield b"{}"

    def status(num_bytes: int) -> int:
        headers = {"Content-Type": "application/json"}
        return ask(app, "POST", "/generate", content=sent(num_bytes), headers=headers).status_code

    assert (status(1000), status(1001)) == (400, 413)


def test_the_413_reaches_a_client_that_sends_everything_first(engine: Engine) -> None:
    config = uvicorn.Config(
        create_app(engine, ServerArgs(max_request_bytes=1000, log_interval=0)),
        port=0,
        log_config=None,
        loop="asyncio",
        http="h11",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        for chunked in (False, True):
            status, headers = post_all_then_read(port, b" " * 8_000_000, chunked=chunked)
            assert status.startswith("HTTP/1.1 413 ")  # Python 3.13 has other words after it
            assert "connection: close" in headers.lower()
        # A client that has sent no part of the body is answered, whether it asks first or not.
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            head = b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 1001\r\n\r\n"
            connection.sendall(head)
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            asks = "POST /generate HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\n"
            connection.sendall(f"{asks}Content-Length: 8000000\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
    finally:
        server.should_exit = True
        thread.join(timeout=120)


def post_all_then_read(port: int, body: bytes, *, chunked: bool) -> tuple[str, str]:
    """Send the whole body before reading; return the status line and the headers."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(f"POST /generate HTTP/1.1\r\nHost: t\r\n{length}\r\n\r\n".encode())
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    status, _, headers = answer.decode().partition("\r\n")
    return status, headers
