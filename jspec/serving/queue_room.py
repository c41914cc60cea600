"""Submission of a list's requests to a shared queue as space becomes free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jspec.errors import QueueFullError
from jspec.messages.request import Request
from jspec.serving.loop_thread import EngineStream

Submit = Callable[[Sequence[Request]], Awaitable[tuple[EngineStream, ...]]]
POLL_SECONDS = 0.02


class QueueRoom:
    """Waits while the queue is full; one submission polls at a time, in order.

    It belongs to one event loop. The queue's time limit does not count this wait, and direct
    submitters may overtake it.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._turn = asyncio.Lock()

    async def submit(self, requests: Sequence[Request]) -> tuple[EngineStream, ...]:
        """Like `Engine.submit`, but wait instead of raising QueueFullError."""
        async with self._turn:
            while True:
                try:
                    return await self._submit(requests)
                except QueueFullError:
                    await asyncio.sleep(POLL_SECONDS)
