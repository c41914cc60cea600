"""Many of one thing, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

Item = TypeVar("Item")


async def run_all(
    items: AsyncIterator[Item], run: Callable[[Item], Awaitable[None]], *, most: int
) -> None:
    """run(item) of each, `most` of them at a time. The first error ends the others.

    An item is taken when there is room for it, and not before: they may be any number.
    """
    taking = asyncio.Lock()

    async def work() -> None:
        while True:
            async with taking:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            await run(item)

    workers = [asyncio.ensure_future(work()) for _ in range(most)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
