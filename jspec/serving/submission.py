"""The way of requests into the queue, and aborts before they reach it.

prepare   compile grammars, and programs that the start left out, in a thread
hold      while a weight update waits for running requests to finish
wait      for space in the queue, if the caller wants it
queue     all requests of a call, or none
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from jspec.engine.plan_runner import PlanRunner
from jspec.engine.programs.program_growth import BuildError
from jspec.engine.programs.program_keys import programs_on_demand
from jspec.errors import QueueFullError
from jspec.messages.request import Request, SamplingParams
from jspec.messages.step_options import PLAIN, StepOption, StepOptions
from jspec.scheduler.scheduler import ABORTED
from jspec.serving.live_weights import LiveWeights
from jspec.serving.loop import EngineLoop
from jspec.serving.loop_thread import LoopThread
from jspec.serving.streams.chunk_stream import ChunkStream
from jspec.text.grammar.grammars import Grammars

POLL_SECONDS = 0.02  # between looks at a full queue


class Preparation:
    """Compiles grammars, and programs that the start left out, in a thread."""

    def __init__(self, grammars: Grammars, runner: PlanRunner) -> None:
        self._grammars, self._runner = grammars, runner
        self._asked, self._asking = PLAIN, threading.Lock()
        self._waiting: list[StepOptions] = []  # options of the calls that wait for programs

    @property
    def building(self) -> StepOptions:
        with self._asking:
            return PLAIN.union(self._waiting)

    async def check(self, sampling: SamplingParams) -> None:
        if sampling.grammar is not None:
            await asyncio.to_thread(self._grammars.compile, sampling.grammar)

    async def run(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests with grammars, once their programs exist. Raises RequestError."""
        if all(r.grammar is not None or not _asks_more(r.sampling) for r in requests):
            return requests
        return await asyncio.to_thread(self._prepared, tuple(requests))

    def _prepared(self, requests: Sequence[Request]) -> list[Request]:
        made: list[Request] = []
        for request in requests:
            source = request.sampling.grammar
            grammar = None if source is None else self._grammars.compile(source)
            budget = request.sampling.max_thinking_tokens
            if request.reasoning is not None and (grammar is not None or budget is not None):
                grammar = self._grammars.after_reasoning(grammar, request.reasoning, budget=budget)
            made.append(replace(request, grammar=grammar))
        # Concurrent calls with new options need programs for their union; the later builds them.
        asked = PLAIN.union(request.sampling.options for request in requests)
        with self._asking:
            new = asked.members - self._asked.members
            self._asked = self._asked.union((asked,))
            asked = self._asked
            self._waiting.append(asked)
        try:
            self._runner.ensure(programs_on_demand(self._runner.limits, asked))
        except BuildError:  # must not block the other kind
            with self._asking:
                self._asked = StepOptions(self._asked.members - new)
            raise
        finally:
            with self._asking:
                self._waiting.remove(asked)
        return made


class Submission:
    def __init__(
        self,
        loop_thread: LoopThread,
        loop: EngineLoop,
        preparation: Preparation,
        weights: LiveWeights,
    ) -> None:
        self._loop_thread, self._loop = loop_thread, loop
        self._preparation, self._weights = preparation, weights
        self._unqueued: dict[str, str | None] = {}  # why a request in preparation was aborted
        self._turn = asyncio.Lock()  # of requests that wait for space

    async def submit(
        self, requests: Sequence[Request], *, max_unread: int | None = None, wait: bool = False
    ) -> tuple[ChunkStream, ...]:
        """Queue all requests or none; return their chunk streams, which the caller must close.

        max_unread: unread chunks after which a request is aborted. wait: wait, in order, for space
        in the queue, which does not count for the queue's time limit. Raises RequestError,
        QueueFullError or EngineClosedError before anything is queued.
        """
        return tuple(await self._loop_thread.call(self._queue(requests, max_unread, wait=wait)))

    async def _queue(
        self, requests: Sequence[Request], max_unread: int | None, *, wait: bool
    ) -> list[ChunkStream]:
        names = [request.request_id for request in requests]
        self._unqueued |= dict.fromkeys(names)
        try:
            prepared = await self._preparation.run(requests)
            async with self._turn if wait else nullcontext():
                while True:
                    await self._weights.may_submit.wait()
                    self._weights.adapters.check([request.lora for request in prepared])
                    try:
                        streams = self._loop.submit(prepared, max_unread=max_unread)
                        break
                    except QueueFullError:
                        if not wait:
                            raise
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            whys = {name: self._unqueued.pop(name, None) for name in names}
        for name, why in whys.items():
            if why is not None:
                self._loop.abort(name, why=why)
        return streams

    async def abort(self, request_id: str) -> bool:
        """End a request, once queued; its stream gets a last chunk. Return False if unknown."""
        return await self._loop_thread.ask(lambda: self._abort((request_id,), ABORTED)) > 0

    async def abort_all(self, *, why: str = ABORTED) -> int:
        return await self._loop_thread.ask(
            lambda: self._abort(dict.fromkeys((*self._loop.request_ids, *self._unqueued)), why)
        )

    def _abort(self, names: Iterable[str], why: str) -> int:
        count = 0
        for name in names:
            is_early = name in self._unqueued
            if is_early:
                self._unqueued[name] = why
            count += self._loop.abort(name, why=why) or is_early
        return count


def _asks_more(sampling: SamplingParams) -> bool:
    return bool(set(sampling.options) & {StepOption.HIDDEN, StepOption.GRAMMAR})
