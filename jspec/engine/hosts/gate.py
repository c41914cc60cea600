"""The port where the other hosts connect before each start of their runner processes."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress

from jspec.config.hosts import HostPlace
from jspec.engine import interrupts
from jspec.engine.hosts.frames import FrameError, FrameSocket
from jspec.engine.hosts.handshake import Identity, RefusedError, receive_guest
from jspec.errors import ConfigError, EngineClosedError, JspecError, RunnerError

log = logging.getLogger("jspec.engine")
GREETING_SECONDS = 10.0  # after which a silent connection is closed
POLL_SECONDS = 0.2


class Gate:
    """Listens at host 0's address for the whole life of its engine. Raises ConfigError."""

    def __init__(self, place: HostPlace, token: bytes, identity: Identity) -> None:
        self.place = place
        self.is_first = True  # no start has succeeded yet
        self._token, self._identity = token, identity
        self._arrived = threading.Condition()
        self._members: dict[int, FrameSocket] = {}
        self._refused: str | None = None
        self._is_closed = False
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
            self._listening = socket.create_server(found[4][:2], family=found[0])
        except OSError as error:
            raise ConfigError(
                f"dist_init_addr is {place.address}: host 0 cannot listen there: "
                f"{error.strerror or error}; expected an address of host 0, and a free port"
            ) from error
        self._listening.settimeout(POLL_SECONDS)

    def gather(self) -> dict[int, FrameSocket]:
        """Wait for all other hosts and return their connections by rank.

        Raises ConfigError for a host that may not follow or comes too late, RunnerError for a late
        one once the engine has run.
        """
        self._members, self._refused = {}, None
        deadline = time.monotonic() + self.place.timeout
        log.info(
            "waiting up to %g s for %d other hosts at %s",
            *(self.place.timeout, self.place.count - 1, self.place.address),
        )
        try:
            while not self._is_complete():
                interrupts.check()
                if self._is_closed:
                    raise EngineClosedError("the engine was closed while it waited for its hosts")
                if time.monotonic() > deadline:
                    self._raise_late()
                self._accept()
        except BaseException as error:
            self.dismiss(self._members, error if isinstance(error, JspecError) else None)
            raise
        return dict(sorted(self._members.items()))

    def dismiss(self, members: dict[int, FrameSocket], error: JspecError | None) -> None:
        """Close connections. The hosts connect again, or end with the error of a first start, or
        without one if the engine is being closed."""
        for member in members.values():
            with suppress(OSError):
                if self._is_closed:
                    member.send("end")
                elif error is not None and self.is_first:
                    member.send("end", error=str(error))
            member.close()

    def close(self) -> None:
        self._is_closed = True
        self._listening.close()

    def _is_complete(self) -> bool:
        with self._arrived:
            if self._refused is not None:
                raise ConfigError(self._refused)
            return len(self._members) == self.place.count - 1

    def _raise_late(self) -> None:
        missing = [rank for rank in range(1, self.place.count) if rank not in self._members]
        text = (
            f"dist_timeout is {self.place.timeout:g}: of {self.place.count} hosts, those of rank "
            f"{', '.join(map(str, missing))} did not come to {self.place.address}; expected the "
            "same command there with their --node-rank"
        )
        raise ConfigError(text) if self.is_first else RunnerError(text)

    def _accept(self) -> None:
        try:
            connected, address = self._listening.accept()
        except TimeoutError:
            return
        except OSError:
            if self._is_closed:
                return
            raise
        arriving = threading.Thread(
            target=self._greet, args=(connected, address[0]), name="jspec-greet-host", daemon=True
        )
        arriving.start()
        with self._arrived:
            self._arrived.wait(POLL_SECONDS)  # most greetings end sooner

    def _greet(self, connected: socket.socket, address: str) -> None:
        channel = FrameSocket(connected)
        try:
            channel.set_timeout(GREETING_SECONDS)
            rank = receive_guest(channel, self._token, self._identity)
            channel.set_timeout(None)
        except RefusedError as refusal:
            text = f"host {refusal.rank} ({address}) {refusal.why}"
            log.error("%s", text)
            with suppress(OSError):
                channel.send("refused", text=text)
            channel.close()
            if self.is_first:
                with self._arrived:
                    self._refused = text
                    self._arrived.notify()
            return
        except (EOFError, OSError, FrameError) as error:
            log.warning("%s connected to %s: %r", address, self.place.address, error)
            channel.close()
            return
        with self._arrived:
            former = self._members.get(rank)
            self._members[rank] = channel
            self._arrived.notify()
        if former is not None:  # the host restarted while others were awaited
            former.close()
