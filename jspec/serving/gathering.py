"""Bounded concurrency, and a cancellation-safe call in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def run_all(
    items: AsyncIterator[Item], run: Callable[[Item], Awaitable[None]], *, most: int
) -> None:
    """Await run(item) for each item, taken when it can run, at most `most` at a time. The first
    error cancels the others."""
    taking = asyncio.Lock()

    async def work() -> None:
        while True:
            async with taking:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            await run(item)

    if most == 1:
        await work()  # no task, which would cost a turn of the event loop
        return
    workers = [asyncio.ensure_future(work()) for _ in range(most)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def to_its_end(run: Callable[..., Result], *arguments: Any) -> Result:
    """Run a function in a thread. If cancelled, wait for its end, so that locks stay locked."""
    running = asyncio.ensure_future(asyncio.to_thread(run, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # retrieve it, else asyncio logs it as never retrieved
        raise
