"""A limit on log lines that clients can cause, so that none of them fills a disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

LOGGER = logging.getLogger("jspec.server")
# For refused requests and closed connections.
REFUSED = logging.getLogger("jspec.server.refused")
MOST_LINES = 20  # per second and logger


class LineLimit(logging.Filter):
    """Drops a logger's lines beyond MOST_LINES per second, and then logs their number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._ends = clock()  # of the current second
        self._num_lines = self._num_dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if now >= self._ends:
            self._report(record.name)
            self._ends, self._num_lines = now + 1.0, 0
        self._num_lines += 1
        if self._num_lines <= MOST_LINES:
            return True
        if not self._num_dropped:  # perhaps no other line follows
            with contextlib.suppress(RuntimeError):  # no loop runs yet, or any more
                asyncio.get_running_loop().call_later(self._ends - now, self._report, record.name)
        self._num_dropped += 1
        return False

    def _report(self, name: str) -> None:
        if self._num_dropped:
            LOGGER.warning("%s: %d more lines were not logged", name, self._num_dropped)
        self._num_dropped = 0


@contextlib.contextmanager
def limited_lines() -> Iterator[None]:
    """Limit the lines about refused requests and closed connections, including uvicorn's."""
    limits = [(logger, LineLimit()) for logger in (REFUSED, logging.getLogger("uvicorn.error"))]
    for logger, limit in limits:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger, limit in limits:
            logger.removeFilter(limit)
