"""Device and host traces by jax's profiler."""

from __future__ import annotations

import os
import threading
from errno import EACCES

import jax

from jspec.errors import RequestError


class Profiler:
    """Runs at most one trace per process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._directory: str | None = None

    def start(self, directory: str) -> None:
        """Start a trace, which `stop` writes. Raises RequestError if one runs or on a bad path."""
        with self._lock:
            if self._directory is not None:
                raise RequestError("a profile is being taken; expected /stop_profile before")
            try:
                os.makedirs(directory, exist_ok=True)  # jax would fail only when it stops
                if not os.access(directory, os.W_OK):
                    raise PermissionError(EACCES, os.strerror(EACCES), directory)
                jax.profiler.start_trace(directory)
            except (OSError, RuntimeError, ValueError) as error:
                raise RequestError("no profile can be taken", f": {error}") from error
            self._directory = directory

    def stop(self) -> str:
        """End the trace and return its directory. Raises RequestError if that fails."""
        with self._lock:
            if self._directory is None:
                raise RequestError("no profile is being taken; expected /start_profile before")
            directory, self._directory = self._directory, None
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError, ValueError) as error:
                raise RequestError("no profile can be written", f": {error}") from error
            return directory
