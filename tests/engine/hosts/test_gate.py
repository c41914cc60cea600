"""Hosts that do not fit: one clear error on all of them, before anything is built."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from jspec.config.hosts import HostPlace
from jspec.engine.hosts import follower
from jspec.engine.hosts.gate import Gate
from jspec.errors import ConfigError, JspecError, RunnerError
from tests.support.hosts import free_address

IDENTITY = {"jspec": "1.0", "nnodes": 3, "the model's config.json": "abc", "tp_size": 4}
TOKEN = b"a secret"


def place_at(address: str, rank: int, *, timeout: float = 20.0) -> HostPlace:
    host, port = address.split(":")
    return HostPlace(count=3, rank=rank, host=host, port=int(port), timeout=timeout)


class Guest:
    """A host that arrives, then waits for what host 0 says."""

    def __init__(self, place: HostPlace, identity: dict[str, Any], token: bytes = TOKEN) -> None:
        self.error: BaseException | None = None
        self._arguments = place, token, identity
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            channel = follower._arrive(*self._arguments)
            following = follower._Following(channel, None, self._arguments[0])  # type: ignore[arg-type]
            try:
                following.run()
            finally:
                following.end()
        except JspecError as error:
            self.error = error

    def join(self) -> str:
        self._thread.join(20)
        return str(self.error)


@pytest.mark.parametrize(
    ("changed", "token", "expected"),
    [
        ({}, b"other", "host 2 (127.0.0.1) has another token; expected the same JSPEC_DIST_TOKEN"),
        (
            {"jspec": "0.9"},
            TOKEN,
            "host 2 (127.0.0.1) has jspec '0.9'; expected '1.0', as host 0 has",
        ),
        (
            {"the model's config.json": "abd"},
            TOKEN,
            "host 2 (127.0.0.1) has the model's config.json 'abd'; expected 'abc'",
        ),
        ({"tp_size": 2}, TOKEN, "host 2 (127.0.0.1) has tp_size 2; expected 4"),
    ],
)
def test_a_host_that_does_not_fit_ends_the_start_on_all(
    changed: dict[str, Any], token: bytes, expected: str
) -> None:
    address = free_address()
    right = Guest(place_at(address, 1), IDENTITY)  # before host 0, for which it waits
    gate = Gate(place_at(address, 0), TOKEN, IDENTITY)
    try:
        stranger = socket.create_connection(address.split(":"))  # type: ignore[arg-type]
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        while 1 not in gate._members:
            gate._accept()
        wrong = Guest(place_at(address, 2), {**IDENTITY, **changed}, token)
        members, gate._members = gate._members, {}
        with pytest.raises(ConfigError) as error:
            gate.gather()
        gate.dismiss(members, error.value)
        assert str(error.value).startswith(expected)
        assert wrong.join() == str(error.value)
        assert right.join() == str(error.value)
    finally:
        stranger.close()
        gate.close()


def test_a_host_that_is_late_is_named_after_the_stated_time() -> None:
    address = free_address()
    gate = Gate(place_at(address, 0, timeout=0.1), TOKEN, IDENTITY)
    with pytest.raises(ConfigError, match=r"dist_timeout is 0\.1: of 3 hosts, those of rank 1, 2"):
        gate.gather()
    gate.is_first = False  # a restart is tried again
    with pytest.raises(RunnerError, match=r"dist_timeout is 0\.1"):
        gate.gather()
    gate.close()
    with pytest.raises(RunnerError, match=f"host 0 did not answer at {address}"):
        follower._arrive(place_at(address, 1, timeout=0.1), TOKEN, IDENTITY)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="host 0 cannot listen there"):
        Gate(place_at("192.0.2.1:4000", 0), TOKEN, IDENTITY)
