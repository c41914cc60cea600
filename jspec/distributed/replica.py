"""One replica: an engine in its own process, as Ray Serve runs it. It imports no Ray."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from jspec.config.limits import ServeLimits
from jspec.config.resolved_config import ResolvedConfig
from jspec.distributed.continued_stream import Item
from jspec.errors import EngineClosedError, JspecError
from jspec.messages.adapter import Adapter
from jspec.messages.request import Request
from jspec.scheduler.stats import SchedulerStats
from jspec.serving.engine import Engine

STUCK_SECONDS = 120.0  # without a step, while requests run
# After a stream's first chunk, those that arrive within this time are sent as one message.
GATHER_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Properties of an engine that its ingress needs; they are equal for all replicas."""

    limits: ServeLimits
    config: ResolvedConfig
    vocab_size: int
    adapters: Mapping[str, Adapter]  # loaded at the start, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    process_id: int
    stats: SchedulerStats
    server_info: Mapping[str, Any]


class EngineReplica:
    """An engine from arguments of EngineArgs. After the constructor, requests can run."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._engine = Engine(**arguments)
        self._num_steps, self._moved_at = 0, time.monotonic()

    def facts(self) -> Facts:
        engine = self._engine
        return Facts(
            limits=engine.limits,
            config=engine.config,
            vocab_size=engine.vocab_size,
            adapters=dict(engine.lora_adapters),
        )

    async def stream(self, request: Request, *, waits: bool) -> AsyncGenerator[Item]:
        """Run a request: yield () once it is queued, then its chunks; an error is the last item."""
        try:
            (stream,) = await self._engine.submit((request,), wait=waits)
        except JspecError as error:
            yield error
            return
        async with aclosing(stream):
            yield ()
            try:
                async for chunk in stream:
                    yield (chunk, *stream.ready())
                    await asyncio.sleep(GATHER_SECONDS)
            except JspecError as error:
                yield error

    def report(self) -> Report:
        return Report(
            process_id=os.getpid(),
            stats=self._engine.stats,
            server_info=self._engine.get_server_info(),
        )

    async def flush_cache(self) -> bool:
        return await self._engine.async_flush_cache()

    def check_health(self) -> None:
        """Raise EngineClosedError if the engine is closed or stuck, so that Serve replaces it."""
        # An engine whose device failed restarts by itself while its streams wait, so it counts as
        # healthy.
        engine, stats, now = self._engine, self._engine.stats, time.monotonic()
        if engine.is_closed:
            raise EngineClosedError("the engine is closed")
        if stats.num_steps != self._num_steps or not stats.num_running or engine.is_restarting:
            self._num_steps, self._moved_at = stats.num_steps, now
        if now - self._moved_at > STUCK_SECONDS:
            raise EngineClosedError(f"requests run, and no step ended in {STUCK_SECONDS:g} s")

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            engine.shutdown()
