"""Whether an engine makes progress: what /health_generate asks."""

from __future__ import annotations

import asyncio
import uuid

from jspec.errors import EngineClosedError
from jspec.messages.request import Request, SamplingParams
from jspec.serving.engine import Engine

PROBE_SECONDS = 20.0
POLL_SECONDS = 0.02


async def makes_progress(engine: Engine) -> bool:
    """On running requests, else on one token of its own.

    A busy engine is not asked for a token, which would wait behind all others: it is well if it
    ends any step within PROBE_SECONDS, of a prompt that emits nothing yet too.
    """
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            if not await _is_stepping(engine):
                await _emit_one(engine)
    except (TimeoutError, EngineClosedError):
        return False
    return not engine.is_closed


async def _is_stepping(engine: Engine) -> bool:
    """Waits until a step of running requests ends; False once none is running."""
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
