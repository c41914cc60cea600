"""Streaming load on any server that a backend describes; records when each event arrives."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from jspec.cli.measurement.backends import NATIVE, Backend
from jspec.cli.measurement.connections import Connections
from jspec.cli.measurement.figures import Seen, Stopwatch
from jspec.cli.measurement.load import Job, Pattern, Point

Send = Callable[[Job, Seen], Awaitable[None]]


async def send(
    connections: Connections, job: Job, seen: Seen, *, backend: Backend = NATIVE
) -> None:
    """Send one request and read its stream; `seen` gets its times or its error."""
    started = time.perf_counter()
    watch, reader = Stopwatch(started), backend.make_reader()
    try:
        async with aclosing(connections.post(backend.path, job.body)) as lines:
            async for line in lines:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now = time.perf_counter()
                reader.add(json.loads(line[6:]))
                watch.tokens(reader.num_tokens, now)
    except Exception as error:  # a failed request is counted, and the load continues
        seen.errors.append(f"{type(error).__name__}: {error}"[:300])
        return
    first = watch.finish(
        seen,
        new_tokens=job.new_tokens,
        is_exact=job.is_exact,
        prompt_tokens=reader.prompt_tokens,
        index=job.index,
    )
    if first is None:
        return
    seen.add_histogram(reader.histogram)
    if job.name:
        seen.sent[job.name], seen.first[job.name] = started, first


async def run_point(
    url: str, point: Point, pattern: Pattern, *, on_start: Callable[[], None] = lambda: None
) -> tuple[Seen, float]:
    """Warm up, call on_start and run the load. Return the measurements and the run's seconds."""
    warm, measured = pattern.jobs(point)
    connections = Connections(url)

    async def send_one(job: Job, seen: Seen) -> None:
        await send(connections, job, seen)

    try:
        await closed_loop(send_one, warm, len(warm), Seen())
        on_start()
        return await run_load(send_one, point, measured, seed=pattern.seed)
    finally:
        connections.close()


async def run_load(
    send_one: Send, point: Point, jobs: Sequence[Job], *, seed: int
) -> tuple[Seen, float]:
    """Run the jobs. Return the measurements and the seconds from first request to last token."""
    seen, started = Seen(), time.perf_counter()
    if point.rate is None:
        await closed_loop(send_one, jobs, point.clients or 1, seen)
    else:
        await _open_loop(send_one, jobs, point, seed, seen)
    return seen, time.perf_counter() - started


async def closed_loop(send_one: Send, jobs: Sequence[Job], clients: int, seen: Seen) -> None:
    waiting = iter(jobs)

    async def client() -> None:
        for job in waiting:
            await send_one(job, seen)

    await asyncio.gather(*(client() for _ in range(clients)))


async def _open_loop(
    send_one: Send, jobs: Sequence[Job], point: Point, seed: int, seen: Seen
) -> None:
    """Send at the point's rate however slow the server is, up to its limit of open requests."""
    rng, due = random.Random(seed), time.perf_counter()
    room = asyncio.Semaphore(point.clients or len(jobs))
    tasks = []

    async def in_room(job: Job) -> None:
        async with room:
            await send_one(job, seen)

    for job in jobs:
        tasks.append(asyncio.create_task(in_room(job)))
        due += rng.expovariate(point.rate or 1.0)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
    await asyncio.gather(*tasks)
