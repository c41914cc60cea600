"""Hosts that follow an engine of a test, in threads or in processes, on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.config.engine_args import EngineArgs
from jspec.engine.hosts.follower import follow
from jspec.engine.hosts.handshake import TOKEN_VARIABLE
from jspec.engine.hosts.slices import place_of

TOKEN = "a secret"
WAIT_SECONDS = 60.0


def free_address() -> str:
    """Return an address of this machine whose port and the next one are free."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return f"127.0.0.1:{port}"


class FollowerThread:
    """A host whose runner process alone is a process."""

    def __init__(self, rank: int, arguments: Mapping[str, Any], *, token: str = TOKEN) -> None:
        self.error: BaseException | None = None
        self._args = EngineArgs.from_mapping({**arguments, "node_rank": rank})
        self._token = token.encode()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        place = place_of(self._args)
        assert place is not None
        try:
            follow(self._args, place, self._token)
        except BaseException as error:
            self.error = error

    def join(self) -> BaseException | None:
        """Wait for its end; return the error."""
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        return self.error


def words_of(value: Any) -> list[str]:
    """Return a flag's words after its name."""
    if value is True:
        return []
    return [str(each) for each in value] if isinstance(value, tuple) else [str(value)]


class FollowerProcess:
    """`jspec serve` on a host of its own."""

    def __init__(self, rank: int, arguments: Mapping[str, Any], log: Path) -> None:
        flags = [
            word
            for name, value in {**arguments, "node_rank": rank}.items()
            for word in (f"--{name.replace('_', '-')}", *words_of(value))
        ]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jspec.cli.main", "serve", *flags],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    TOKEN_VARIABLE: TOKEN,
                    "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # as conftest.py sets it
                },
            )

    @property
    def runner_id(self) -> int:
        """The id of its runner process."""
        own = self.process.pid
        (child,) = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return int(child)
