"""Aborts of requests that are on their way to the engine: a grammar may compile for seconds before
the engine knows any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jspec.messages.request import Request
from jspec.serving.loop_thread import EngineStream


class Submitting(Protocol):
    """What is asked of an engine."""

    async def submit(
        self, requests: Sequence[Request], /, *, max_unread: int | None = None
    ) -> tuple[EngineStream, ...]: ...

    async def abort(self, request_id: str, /) -> int: ...

    async def abort_all(self) -> int: ...


class EarlyAborts:
    """Submits and aborts, so that an abort in between is done once the engine has the request."""

    def __init__(self, engine: Submitting) -> None:
        self._engine = engine
        self._is_aborted: dict[str, bool] = {}  # of what is on its way

    async def submit(self, requests: Sequence[Request], **options: Any) -> tuple[EngineStream, ...]:
        """As the engine's."""
        names = dict.fromkeys((request.request_id for request in requests), False)
        self._is_aborted |= names  # a name may stand there twice, which the engine refuses
        aborted: list[str] = []
        try:
            streams = await self._engine.submit(requests, **options)
        finally:
            aborted += [name for name in names if self._is_aborted.pop(name, False)]
        for name in aborted:
            await self._engine.abort(name)
        return streams

    async def abort(self, name: str) -> int:
        """1 if it is there or on its way, else 0."""
        is_early = name in self._is_aborted
        if is_early:  # before the engine is asked: it may have it by then
            self._is_aborted[name] = True
        return max(await self._engine.abort(name), int(is_early))

    async def abort_all(self) -> int:
        """How many were there or on their way."""
        early = len(self._is_aborted)
        self._is_aborted = dict.fromkeys(self._is_aborted, True)
        return early + await self._engine.abort_all()
