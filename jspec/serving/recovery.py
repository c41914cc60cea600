"""What happens when the runner fails: how often, and how soon, it is begun anew.

A runner that works again for a while has all its attempts again; one that keeps failing ends the
engine. It knows no request: the scheduler has what each has emitted, and goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from jspec.errors import EngineClosedError, RunnerError, clear_frames

LOGGER = logging.getLogger("jspec.scheduler")
MOST_LOSSES = 2  # a request that ran in so many failures may be what causes them
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """most: restarts in a row. The first is at once, the second after first_pause seconds, each
    later one after twice as many, at most most_pause. After well_seconds without a failure they
    are counted from the beginning."""

    most: int = 5
    first_pause: float = 1.0
    most_pause: float = 30.0
    well_seconds: float = 60.0

    def pause(self, attempt: int) -> float:
        """Seconds before restart `attempt` of a row, from 1 on: 0, 1, 2, 4, ..."""
        if attempt <= 1:
            return 0.0
        return min(self.first_pause * 2.0 ** (attempt - 2), self.most_pause)


class Recovery:
    """Begins a runner anew. `clock` is time.monotonic."""

    def __init__(
        self, limits: RestartLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or RestartLimits()
        self._clock = clock
        self._num_in_row = 0
        self._well_since: float | None = clock()  # None: it does not work
        self.is_running = False

    async def run(
        self,
        error: RunnerError,
        restart: Callable[[], Awaitable[None]],
        *,
        is_closing: Callable[[], bool],
    ) -> None:
        """Returns once the runner works again, or is not wanted any more.

        Raises RunnerError, of the last failure, when it was tried as often as it may, and
        EngineClosedError if the runner says that it cannot be begun anew.
        """
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
                    error = RunnerError(f"the runner could not be begun anew: {failure}")
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
