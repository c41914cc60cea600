"""Many of one thing, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def run_all(
    items: Sequence[Item], run: Callable[[Item], Awaitable[Result]], *, most: int
) -> list[Result]:
    """run(item) of all, in order, `most` of them at a time. The first error ends the others."""
    room = asyncio.Semaphore(most)

    async def run_one(item: Item) -> Result:
        async with room:
            return await run(item)

    tasks = [asyncio.ensure_future(run_one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
