"""Many of one thing, a bounded number of them at a time; and one that is never left half done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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


async def each_of(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Items that are there already, as `run_all` takes them."""
    for item in items:
        yield item


async def to_its_end(run: Callable[..., Result], *arguments: Any) -> Result:
    """run(*arguments) in a thread. If it is cancelled, it first waits for that thread, which knows
    nothing of it: a lock that is held around this call is not free while the thread runs."""
    running = asyncio.ensure_future(asyncio.to_thread(run, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # nobody asks any more
        raise
