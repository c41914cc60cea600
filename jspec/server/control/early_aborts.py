"""Aborts of requests that the engine does not know yet: a grammar may compile for seconds first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jspec.messages.request import Request
from jspec.serving.loop_thread import EngineStream


class Submitting(Protocol):
    """The used part of an engine."""

    async def submit(
        self, requests: Sequence[Request], /, *, max_unread: int | None = None
    ) -> tuple[EngineStream, ...]: ...

    async def abort(self, request_id: str, /) -> int: ...

    async def abort_all(self) -> int: ...


class EarlyAborts:
    """Submits and aborts requests; an abort during a submit is applied once the engine has it."""

    def __init__(self, engine: Submitting) -> None:
        self._engine = engine
        self._is_aborted: dict[str, bool] = {}  # requests being submitted

    async def submit(self, requests: Sequence[Request], **options: Any) -> tuple[EngineStream, ...]:
        names = dict.fromkeys((request.request_id for request in requests), False)
        self._is_aborted |= names  # the engine refuses duplicate names
        aborted: list[str] = []
        try:
            streams = await self._engine.submit(requests, **options)
        finally:
            aborted += [name for name in names if self._is_aborted.pop(name, False)]
        for name in aborted:
            await self._engine.abort(name)
        return streams

    async def abort(self, name: str) -> int:
        """Return 1 if the request exists or is being submitted, else 0."""
        is_early = name in self._is_aborted
        if is_early:  # set it first: the engine may get the request during the await
            self._is_aborted[name] = True
        return max(await self._engine.abort(name), int(is_early))

    async def abort_all(self) -> int:
        """Return how many existed or were being submitted."""
        early = len(self._is_aborted)
        self._is_aborted = dict.fromkeys(self._is_aborted, True)
        return early + await self._engine.abort_all()
