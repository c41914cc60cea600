"""Connections that send too slowly, and too many of them: uvicorn's protocol with bounds.

uvicorn waits for ever for the first byte, and for the rest, of a request's head.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LOGGER = logging.getLogger("jspec.server")
MAX_CONNECTIONS = 4096
OWN_FILES = 128  # file descriptors that are no connections
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)


def most_connections() -> int:
    """As many as this process may have files open for, and at most MAX_CONNECTIONS."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(min(soft - OWN_FILES, MAX_CONNECTIONS), 1)


def bounded_protocol(*, head_seconds: float, max_connections: int) -> type[H11Protocol]:
    """uvicorn's protocol for a server that waits head_seconds for the whole head of a request,
    from the connection's start or from the first byte after the answer before, and that closes
    connections beyond max_connections."""

    class BoundedProtocol(H11Protocol):
        """One connection."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                LOGGER.warning("more than %d connections: one was closed", max_connections)
                transport.write(_TOO_MANY)
                transport.close()
                return
            self._timer = self.loop.call_later(head_seconds, self._on_timeout)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._timer is None:  # the head of a further request has begun
                self._timer = self.loop.call_later(head_seconds, self._on_timeout)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _on_timeout(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                self.transport.write(_TIMEOUT)
                self.transport.close()

    return BoundedProtocol
