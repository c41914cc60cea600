"""Bounds on connections: uvicorn's protocol with timeouts and a maximum number, also for a
request's head and for a client that reads nothing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import resource
import socket
import struct
import sys
import termios
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jspec.server.hardening.line_limit import REFUSED

MAX_CONNECTIONS = 4096
SPARE_FILES = 32  # file descriptors for other uses, in addition to those open at the start
# asyncio accepts this many per turn of its loop. Excess connections are closed up to three turns
# later, so three turns of connections must fit among the spare files.
ACCEPTS_IN_A_TURN = 4
MAX_WAITING = 2048  # connections that the system queues until they are accepted
_RESET = struct.pack("ii", 1, 0)  # a value of SO_LINGER
# A body of more chunks than this must have this many bytes per chunk on average; clients send
# kilobytes.
SMALLEST_CHUNK, MOST_TINY_CHUNKS = 64, 4096
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)


def most_connections(most_files: int | None = None) -> int:
    """Return how many connections fit into the file limit (default: the system's)."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if most_files is None else most_files
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    own = SPARE_FILES + min(len(os.listdir("/dev/fd")), soft // 2)
    return max(min(soft - own, MAX_CONNECTIONS), 1)


class Handshakes:
    """Accepted connections with incomplete TLS handshakes; the oldest is closed for a new one. With
    established connections, they are at most max_connections."""

    def __init__(self, max_connections: int) -> None:
        self.num_made = 0
        self._max_connections = max_connections
        self._open: dict[int, weakref.ref[socket.socket]] = {}

    def begin(self, connection: socket.socket) -> None:
        for number, known in list(self._open.items()):
            found = known()
            if found is None or found.fileno() != number:  # it was closed before the handshake
                del self._open[number]
        while self._open and len(self._open) + self.num_made >= self._max_connections:
            REFUSED.warning("more than %d connections: one was closed", self._max_connections)
            oldest = self._open.pop(next(iter(self._open)))()
            if oldest is not None:
                with contextlib.suppress(OSError):  # the client has gone
                    oldest.shutdown(socket.SHUT_RDWR)  # asyncio owns it, and then closes it
        self._open[connection.fileno()] = weakref.ref(connection)

    def end(self, number: int) -> None:
        self._open.pop(number, None)


class Listener(socket.socket):
    """A socket that queues more connections than asyncio accepts per turn (its `backlog`)."""

    handshakes: Handshakes | None = None  # informed of each accept

    def listen(self, backlog: int = MAX_WAITING) -> None:
        super().listen(max(backlog, MAX_WAITING))

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if self.handshakes is not None:
            self.handshakes.begin(connection)
        return connection, address


def refuse_half_sent(connections: Iterable[asyncio.Protocol]) -> None:
    for each in connections:
        if isinstance(each, H11Protocol) and _is_half_sent(each):
            if each.conn.our_state is h11.SEND_RESPONSE:  # no part of an answer was sent
                each.transport.write(_UNAVAILABLE)
            each.transport.close()


def _is_half_sent(connection: H11Protocol) -> bool:
    return not connection.transport.is_closing() and connection.conn.their_state is h11.SEND_BODY


class ChunkCounter(h11.Connection):
    """An h11 connection that refuses many tiny chunks, and two lengths for one body."""

    def __init__(self, role: type[h11.SERVER]) -> None:
        super().__init__(role)
        self._num_chunks = self._num_bytes = 0  # of the request's body

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError, to which uvicorn answers 400."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            is_old = event.http_version < b"1.1"
            if b"transfer-encoding" in names and (b"content-length" in names or is_old):
                raise h11.RemoteProtocolError(
                    "Transfer-Encoding with Content-Length or in HTTP/1.0; expected one length"
                )
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            is_tiny = self._num_bytes < SMALLEST_CHUNK * self._num_chunks
            if is_tiny and self._num_chunks > MOST_TINY_CHUNKS:
                raise h11.RemoteProtocolError(
                    f"a body of more than {MOST_TINY_CHUNKS} chunks of less than {SMALLEST_CHUNK} "
                    "bytes on average"
                )
        return event


class BoundedProtocol(H11Protocol):
    head_seconds: float
    max_connections: int
    handshakes: Handshakes
    places: Iterator[int]  # order in which connections started to wait; clocks have ties

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._place = 0
        self._watch: asyncio.TimerHandle | None = None
        self._num_unsent = 0  # bytes that waited for the client at the last check
        self.conn = ChunkCounter(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.handshakes.end(transport.get_extra_info("socket").fileno())
        self.handshakes.num_made = len(self.connections)
        if len(self.connections) > self.max_connections:
            REFUSED.warning("more than %d connections: one was closed", self.max_connections)
            if not self._make_room():
                transport.write(_UNAVAILABLE)
                transport.close()
                return
        self._start_timer()
        self._look()

    def _make_room(self) -> bool:
        """Close the connection that waited longest for a head or body; return False if none did."""
        # If only heads counted, new connections, not read yet, would evict each other.
        waiting = [
            each
            for each in self.connections
            if isinstance(each, BoundedProtocol)
            and (each._timer is not None or _is_half_sent(each))
        ]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda each: each._place)
        if oldest._timer is None:
            refuse_half_sent([oldest])
        else:
            oldest._stop_timer()
            oldest.transport.write(_UNAVAILABLE)
            oldest.transport.close()
        return True

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:  # the head of another request has started
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)
        self.handshakes.num_made = len(self.connections)

    def resume_writing(self) -> None:
        self._num_unsent = 0
        super().resume_writing()

    def shutdown(self) -> None:
        refuse_half_sent([self])
        super().shutdown()

    def _start_timer(self) -> None:
        self._place = next(self.places)
        self._timer = self.loop.call_later(self.head_seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.write(_TIMEOUT)
            self.transport.close()

    def _look(self) -> None:
        """Close the connection if its client has read nothing since the last check."""
        # Nothing is added while writing is paused or closing, so any read lowers the count.
        is_held = self.flow.write_paused or self.transport.is_closing()
        num_unsent = self._count_unsent() if is_held else 0
        if 0 < self._num_unsent <= num_unsent:
            REFUSED.warning("a client read nothing for %g s: closed", self.head_seconds)
            # Reset it, or the system keeps the unsent data as long as the client is connected.
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET
            )
            self.transport.abort()
            return
        self._num_unsent = num_unsent
        self._watch = self.loop.call_later(self.head_seconds, self._look)

    def _count_unsent(self) -> int:
        """Return the bytes that the client has not read, in the transport and Linux's kernel."""
        # Linux takes more from a process only when a third of its buffer is free, and that buffer
        # grows to 4 MiB, so without the kernel's bytes a slow client would seem to read nothing.
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent and sys.platform == "linux":
            connection = self.transport.get_extra_info("socket")
            count = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
            num_unsent += int.from_bytes(count, sys.byteorder)
        return num_unsent


def bounded_protocol(
    *, head_seconds: float, max_connections: int, handshakes: Handshakes | None = None
) -> type[BoundedProtocol]:
    """Make uvicorn's protocol class with limits; head_seconds also limits an unread answer."""
    own: dict[str, Any] = {"head_seconds": head_seconds, "max_connections": max_connections}
    own["handshakes"] = handshakes or Handshakes(max_connections)
    return type("BoundedProtocol", (BoundedProtocol,), {**own, "places": itertools.count()})
