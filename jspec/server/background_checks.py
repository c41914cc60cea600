"""Checks a share of the answers again while the server has little to do (`--verify-fraction`).

A chosen request is remembered when it is taken, scored again by the target alone when it has ended
(`engine.rescorer`), and forgotten. Differences by rounding are tie flips; larger ones are faults of
the engine. Whoever serves comes first: a check waits, before each chunk, until nothing is queued
and half of the slots are free.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from jspec.engine.rescorer import Rescored, Rescorer
from jspec.errors import RequestError
from jspec.messages.request import FinishKind, Request
from jspec.messages.response import Completion
from jspec.serving.engine import Engine

LOGGER = logging.getLogger("jspec.server")
MOST_WAITING = 32
MOST_TOKENS = 8192  # of a text: the pools that it needs are the checks' own
# Margins that rounding explains, in units of a logit: measured, bfloat16 makes up to 0.2.
TOLERANCES = {"float32": 0.05}
OTHER_TOLERANCE = 1.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCounts:
    """Since the start. num_skipped: chosen but not checked: too long, too many waiting, written by
    other weights, or under a grammar."""

    num_requests: int = 0
    num_tokens: int = 0
    num_tie_flips: int = 0
    num_faults: int = 0
    num_skipped: int = 0


class _CheckEndedError(Exception):
    """The server stops, or the weights are others than those that wrote the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finished:
    request: Request
    ids: tuple[int, ...]
    weights: int


class BackgroundChecks:
    """fraction: of the requests that are checked, 0 to 1; 0 keeps and costs nothing.

    `watch` and `finish` belong to the server's event loop, as `run` does, whose checks are in a
    thread.
    """

    def __init__(
        self, engine: Engine, fraction: float, *, draw: Callable[[], float] = random.random
    ) -> None:
        self._engine, self._fraction, self._draw = engine, fraction, draw
        self._running: dict[str, tuple[Request, int]] = {}
        self._waiting: deque[_Finished] = deque()
        self._is_ended = False
        self.counts = CheckCounts()

    def watch(self, requests: Iterable[Request], weights: int) -> None:
        """Chooses among requests that were just taken. weights: the engine's weights_serial
        before it had them, so that all that they emit is theirs if it is still the same then."""
        if self._fraction:
            chosen = (each for each in requests if self._draw() < self._fraction)
            self._running.update((each.request_id, (each, weights)) for each in chosen)

    def finish(self, completion: Completion) -> None:
        """A sequence is over; may be told twice. Only whole answers are checked."""
        request, weights = self._running.pop(completion.request_id, (None, 0))
        is_whole = completion.finish is not None and completion.finish.kind is not FinishKind.ABORT
        if request is None or not is_whole or not completion.output_ids:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._count(num_skipped=1)
            return
        self._waiting.append(
            _Finished(request=request, ids=tuple(completion.output_ids), weights=weights)
        )

    async def run(self) -> None:
        """Checks one after the other, until cancelled."""
        if not self._fraction:
            return
        try:
            rescorer = await asyncio.to_thread(self._make_rescorer)
            while True:
                if not self._waiting:
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                each = self._waiting.popleft()
                rescored = await asyncio.to_thread(self._score, rescorer, each)
                if rescored is None or self._engine.weights_serial != each.weights:
                    self._count(num_skipped=1)  # others may have come in the midst of it
                else:
                    self._judge(each, rescored)
        except Exception:
            LOGGER.exception("answers are no longer checked")
        finally:
            self._is_ended = True

    def _make_rescorer(self) -> Rescorer:
        most = min(self._engine.limits.context_length, MOST_TOKENS)
        return Rescorer(self._engine.served, most_tokens=most)

    def _score(self, rescorer: Rescorer, each: _Finished) -> Rescored | None:
        """None where it cannot be told: not any more, or the text is too long or a grammar's."""
        try:
            return rescorer.score(
                each.request, each.ids, before_chunk=lambda: self._wait(each.weights)
            )
        except (_CheckEndedError, RequestError):
            return None
        except RuntimeError as error:  # jax: a weight was replaced between two chunks
            LOGGER.debug("a check ended: %s", error)
            return None

    def _wait(self, weights: int) -> None:
        """Until the engine has little to do."""
        while not self._has_room:
            if self._is_ended or self._engine.is_closed:
                raise _CheckEndedError
            time.sleep(POLL_SECONDS)
        if self._is_ended or self._engine.weights_serial != weights:
            raise _CheckEndedError

    @property
    def _has_room(self) -> bool:
        stats = self._engine.stats
        return stats.num_queued == 0 and 2 * stats.num_running <= self._engine.limits.num_slots

    def _judge(self, each: _Finished, rescored: Rescored) -> None:
        tolerance = TOLERANCES.get(self._engine.config.dtype, OTHER_TOLERANCE)
        faults = [found for found in rescored.differences if found.margin > tolerance]
        for found in faults[:1]:
            LOGGER.warning(
                "request %s: token %d of the answer is %d, and the target chooses %d, margin %.3g "
                "(%d such tokens): a fault of speculation or of the engine",
                *(each.request.request_id, found.index, found.emitted_id, found.chosen_id),
                *(found.margin, len(faults)),
            )
        self._count(
            num_requests=1,
            num_tokens=len(each.ids),
            num_tie_flips=len(rescored.differences) - len(faults),
            num_faults=len(faults),
        )

    def _count(self, **more: int) -> None:
        counts = self.counts
        self.counts = replace(
            counts, **{name: getattr(counts, name) + value for name, value in more.items()}
        )
