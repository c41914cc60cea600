"""Restarts of a failed runner: number and pauses. A runner that works for a while regains all its
attempts; one that keeps failing ends the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from jspec.errors import EngineClosedError, RunnerError, clear_frames

LOGGER = logging.getLogger("jspec.scheduler")
MOST_LOSSES = 2  # a request that was running in this many failures may be their cause
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limits on consecutive restarts. The first is immediate, then pauses double."""

    most: int = 5  # restarts in a row
    first_pause: float = 1.0  # seconds before the second restart
    most_pause: float = 30.0
    well_seconds: float = 60.0  # without a failure, after which the count restarts

    def pause(self, attempt: int) -> float:
        """Return the seconds before restart `attempt` in a row, from 1 on: 0, 1, 2, 4, ..."""
        if attempt <= 1:
            return 0.0
        return min(self.first_pause * 2.0 ** (attempt - 2), self.most_pause)


class Recovery:
    def __init__(
        self, limits: RestartLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or RestartLimits()
        self._clock = clock
        self._num_in_row = 0
        self._well_since: float | None = clock()  # None: not working
        self.is_running = False

    async def run(
        self,
        error: RunnerError,
        restart: Callable[[], Awaitable[None]],
        *,
        is_closing: Callable[[], bool],
    ) -> None:
        """Return once the runner works again or the engine is closing. Raises RunnerError after the
        last attempt, EngineClosedError if it cannot be restarted."""
        self.is_running = True
        try:
            while not is_closing():
                await self._wait(self._next_pause(error), is_closing)
                if is_closing():
                    return
                began = self._clock()
                try:
                    await restart()
                except EngineClosedError as refusal:
                    if is_closing():
                        return
                    raise EngineClosedError(refusal.message, f"; {error}") from error
                except Exception as failure:
                    if is_closing():
                        return
                    error = RunnerError(f"the runner could not be restarted: {failure}")
                    error.__cause__ = failure
                    clear_frames(failure)
                    LOGGER.error("%s", error)
                else:
                    now = self._well_since = self._clock()
                    LOGGER.warning("the runner works again after %.1f s", now - began)
                    return
        finally:
            self.is_running = False

    def _next_pause(self, error: RunnerError) -> float:
        since, self._well_since = self._well_since, None
        if since is not None and self._clock() - since >= self._limits.well_seconds:
            self._num_in_row = 0
        if self._num_in_row >= self._limits.most:
            raise RunnerError(
                f"the runner failed again after {self._num_in_row} restarts: {error}"
            ) from error
        self._num_in_row += 1
        return self._limits.pause(self._num_in_row)

    async def _wait(self, seconds: float, is_closing: Callable[[], bool]) -> None:
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0 and not is_closing():
            await asyncio.sleep(min(left, POLL_SECONDS))
