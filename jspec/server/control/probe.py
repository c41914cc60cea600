"""The progress check of /health_generate."""

from __future__ import annotations

import asyncio
import uuid

from jspec.errors import EngineClosedError
from jspec.messages.request import Request, SamplingParams
from jspec.serving.engine import Engine

PROBE_SECONDS = 20.0
POLL_SECONDS = 0.02


async def makes_progress(engine: Engine) -> bool:
    """Return True if running requests, or else a request of one token, make progress. A busy engine
    gets no probe, which would queue: any step within PROBE_SECONDS counts."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            if not await _is_stepping(engine):
                await _emit_one(engine)
    except (TimeoutError, EngineClosedError):
        return False
    return not engine.is_closed


async def _is_stepping(engine: Engine) -> bool:
    before = engine.stats.num_steps
    while engine.stats.num_running and not engine.is_closed:
        await asyncio.sleep(POLL_SECONDS)
        if engine.stats.num_steps > before:
            return True
    return False


async def _emit_one(engine: Engine) -> None:
    request = Request(
        request_id=f"health-{uuid.uuid4().hex}",
        prompt_ids=(0,),
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        seed=0,
    )
    (stream,) = await engine.submit((request,))
    try:
        async for _ in stream:
            pass
    finally:
        await stream.aclose()
