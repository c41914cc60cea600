"""A bound on the bytes of all incomplete bodies, which clients that stop before the last byte would
exceed. The oldest body is refused for a new one, so slow clients lose."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NUM_BODIES = 8  # of the maximum size


@dataclass(eq=False, slots=True)
class UnfinishedBody:
    limit: asyncio.Timeout  # of its reader, which a refusal ends
    num_bytes: int = 0
    is_refused: bool = False

    def refuse(self) -> None:
        self.is_refused = True
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class BodyBudget:
    """The incomplete bodies of one server, which have at most `max_bytes` in all."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._bodies: dict[UnfinishedBody, None] = {}  # bodies with bytes, oldest first

    @contextmanager
    def open(self, limit: asyncio.Timeout) -> Iterator[UnfinishedBody]:
        body = UnfinishedBody(limit)
        try:
            yield body
        finally:
            self._close(body)

    def add(self, body: UnfinishedBody, num_bytes: int) -> None:
        """Count received bytes. Beyond the maximum, refuse the oldest bodies, perhaps this one."""
        if body.is_refused:  # its reader has not noticed yet
            return
        self._bodies[body] = None
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self._bodies))
            oldest.refuse()
            self._close(oldest)

    def _close(self, body: UnfinishedBody) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self.num_bytes -= body.num_bytes
