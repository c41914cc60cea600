"""A server with more connections than it may have open files."""

from __future__ import annotations

import resource
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from jspec.server.hardening.connections import Handshakes

MAX_FILES = 128
HALF = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
# The server of `jspec serve`, in front of an application that reads a body and answers.
SERVER = """
import logging
import resource
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jspec.server.http.exchange import HANDLERS
from jspec.server.serve import bind, server_config
from jspec.server.server_args import ServerArgs

soft = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
logging.basicConfig(level="INFO", stream=sys.stderr)


async def answer(request: Request) -> Response:
    await request.body()
    return Response("ok")


routes = [Route("/health", answer), Route("/generate", answer, methods=["POST"])]
app = Starlette(routes=routes, exception_handlers=dict(HANDLERS))
args = ServerArgs(port=0, request_timeout=60, ssl_certfile=sys.argv[2] or None)
with bind(args) as bound:

    class Server(uvicorn.Server):
        async def startup(self, sockets: object = None) -> None:
            await super().startup(sockets=sockets)
            print(bound.getsockname()[1], flush=True)

    Server(server_config(app, args, bound)).run(sockets=[bound])
"""


@contextmanager
def serving(
    subprocess_env: dict[str, str], log_path: Path, *, certificate: Path | None = None
) -> Iterator[int]:
    """Start a server in a separate process; return its port. Its output is at log_path in the end.

    certificate: with its key, for TLS.
    """
    command = [sys.executable, "-c", SERVER, str(MAX_FILES), str(certificate or "")]
    with log_path.open("w") as log:  # no pipe, which a server that writes much would wait for
        server = subprocess.Popen(
            command, env=subprocess_env, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert server.stdout is not None
    with server.stdout:
        try:
            yield int(server.stdout.readline())
        finally:
            server.terminate()
            server.wait(timeout=30)


needs_files = pytest.mark.skipif(
    -1 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 512, reason="opens 400 files itself"
)


@needs_files
def test_more_connections_than_open_files_are_answered(
    subprocess_env: dict[str, str], tmp_path: Path
) -> None:
    """Bodies that do not arrive make room, the oldest first; each accepted connection is served."""
    log_path = tmp_path / "log"
    with serving(subprocess_env, log_path) as port, ExitStack() as stack:
        held = []
        for _ in range(3 * MAX_FILES):
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)))
            held[-1].sendall(HALF)
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(HEALTH)
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert held[0].recv(12) == b"HTTP/1.1 503"
        held[-1].sendall(b'"x": 22}')
        assert held[-1].recv(12) == b"HTTP/1.1 200"
    log = log_path.read_text()
    assert "Traceback" not in log
    assert "Errno" not in log
    assert "connections: one was closed" in log


@needs_files
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_handshakes_that_nobody_goes_on_with_make_room(
    subprocess_env: dict[str, str], tmp_path: Path
) -> None:
    """They are no connections yet, but open files."""
    certificate, log_path = tmp_path / "both.pem", tmp_path / "log"
    words = "req -x509 -newkey rsa:2048 -nodes -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem")]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    parts = [(tmp_path / f"{name}.pem").read_text() for name in ("key", "certificate")]
    certificate.write_text("".join(parts))
    context = ssl.create_default_context(cafile=str(tmp_path / "certificate.pem"))
    with (
        serving(subprocess_env, log_path, certificate=certificate) as port,
        ExitStack() as stack,
    ):
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            for _ in range(3 * MAX_FILES)
        ]
        for _ in range(3):
            with context.wrap_socket(
                socket.create_connection(("127.0.0.1", port), 10), server_hostname="127.0.0.1"
            ) as connection:
                connection.sendall(HEALTH)
                assert connection.recv(12) == b"HTTP/1.1 200"
        assert held[0].recv(12) == b""
    log = log_path.read_text()
    assert "Traceback" not in log
    assert "Errno" not in log
    assert "connections: one was closed" in log


def test_the_oldest_handshake_makes_room_where_all_connections_are_too_many() -> None:
    handshakes = Handshakes(3)
    with ExitStack() as stack:
        clients, accepted = [], []

        def begin() -> None:
            for sockets, each in zip((clients, accepted), socket.socketpair(), strict=True):
                sockets.append(stack.enter_context(each))
            clients[-1].settimeout(0.01)
            handshakes.begin(accepted[-1])

        def ended() -> list[int]:
            return [i for i, each in enumerate(clients) if _is_ended(each)]

        for _ in range(3):
            begin()
        assert ended() == []
        handshakes.end(accepted[0].fileno())
        handshakes.num_made = 1
        accepted[1].close()  # which frees its file descriptor
        begin()
        assert ended() == [1]
        begin()
        assert ended() == [1, 2]
        handshakes.num_made = 3  # no handshake but the new one is left
        begin()
        begin()
        assert ended() == [1, 2, 3, 4, 5]


def _is_ended(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
