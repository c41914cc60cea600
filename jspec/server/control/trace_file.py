"""The file of --trace-requests."""

from __future__ import annotations

import contextlib
import logging

from jspec.errors import ConfigError, reason_of
from jspec.serving.request_trace import RequestTrace

LOGGER = logging.getLogger("jspec.server")


def open_trace(path: str) -> RequestTrace:
    """Open a trace that appends lines to a file. Raises ConfigError if it cannot be opened."""
    try:
        file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (until the process ends)
    except OSError as error:
        raise ConfigError(
            f"trace_requests is {path!r}: {error.strerror}; expected a file to append to"
        ) from error
    is_full = False

    def write(line: str) -> None:
        """Write a line. A full disk ends the trace but no request."""
        nonlocal is_full
        if is_full:
            return
        try:
            file.write(line)
        except OSError as error:
            is_full = True
            with contextlib.suppress(OSError):  # closing flushes again
                file.close()
            LOGGER.warning("%s: request tracing has stopped: %s", path, reason_of(error))

    return RequestTrace(write)
