"""Requests of a list, which wait until a queue that others fill, too, has room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jspec.errors import QueueFullError
from jspec.messages.request import Request
from jspec.serving.loop_thread import EngineStream

Submit = Callable[[Sequence[Request]], Awaitable[tuple[EngineStream, ...]]]
POLL_SECONDS = 0.02


class QueueRoom:
    """Who submits to a queue that is full waits, and the others behind it: one asks at a time.
    Belongs to one event loop. No time limit of the queue counts while it waits, and whoever does
    not wait may come before it."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._turn = asyncio.Lock()

    async def submit(self, requests: Sequence[Request]) -> tuple[EngineStream, ...]:
        """As `Engine.submit`, but for QueueFullError."""
        async with self._turn:
            while True:
                try:
                    return await self._submit(requests)
                except QueueFullError:
                    await asyncio.sleep(POLL_SECONDS)
