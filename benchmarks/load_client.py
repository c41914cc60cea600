"""Streaming load on a server's /generate: what is sent, and when each event of the answers came.

It speaks HTTP/1.1 over plain sockets, so that a client costs little beside the server that it
measures, and needs no package. It knows nothing of jspec: any server that streams SGLang's events
will do.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 2**20
WARM_UP_TOKENS = 16
MAX_WARM_UP = 64
MAX_ERRORS_SAID = 3
WORDS = (  # noqa: SIM905 (a list of them would be as many lines)
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "two may first then do any like my now over such our man me even most made after also well did "
    "many before must through years where much your way down should because long each just state"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load: `clients` requests always open, or `rate` requests a second (Poisson)."""

    name: str
    num_requests: int
    clients: int | None = None
    rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> Point:
        """c64 → 64 clients; r12 → 12 requests a second; c64:512, r12:64 → so many requests.

        Without a number: 8 a client and at most 256; 256 at a rate. Raises ValueError.
        """
        load, _, count = text.partition(":")
        try:
            kind, value = load[:1], float(load[1:])
            num_requests = int(count) if count else 256
            if kind not in ("c", "r") or value <= 0 or num_requests < 1:
                raise ValueError
            if kind == "c" and value != int(value):
                raise ValueError
        except ValueError:
            raise ValueError(
                f"point {text!r}; expected cCLIENTS or rRATE, :REQUESTS after it if wanted "
                f"(c64, r12, c64:512)"
            ) from None
        if kind == "r":
            return cls(name=load, num_requests=num_requests, rate=value)
        clients = int(value)
        num_requests = num_requests if count else min(8 * clients, 256)
        return cls(name=load, num_requests=num_requests, clients=clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What the requests look like; lengths are uniform in [jitter, 1] of the longest.

    prompt_len, new_tokens: the longest. vocab_size: ids are below it. is_text: words, about one
    token each, instead of ids. stop: stop strings. trace: a name for each request (`rid`).
    """

    prompt_len: int = 1024
    new_tokens: int = 256
    jitter: float = 0.5
    vocab_size: int = 120_000
    temperature: float = 0.0
    seed: int = 0
    is_text: bool = False
    stop: tuple[str, ...] = ()
    trace: bool = False

    def jobs(self, point: Point) -> tuple[list[Job], list[Job]]:
        """(warm-up, measured): other prompts of the same lengths, short answers; and the load.

        The same generator draws lengths and prompts in the order of the client that the project's
        first figures came from, so the same seed is the same load.
        """
        rng = random.Random(self.seed)
        measured = []
        for index in range(point.num_requests):
            lengths = [
                int(longest * rng.uniform(self.jitter, 1))
                for longest in (self.prompt_len, self.new_tokens)
            ]
            prompt = self._prompt(rng, max(1, lengths[0]))
            measured.append(self._job(prompt, max(2, lengths[1]), f"{point.name}-{index}"))
        num_warm = min(point.clients or MAX_WARM_UP, MAX_WARM_UP, point.num_requests)
        warm = [
            self._job(self._prompt(rng, job.prompt_len), WARM_UP_TOKENS, f"warm-{point.name}-{i}")
            for i, job in enumerate(measured[:num_warm])
        ]
        return warm, measured

    def _prompt(self, rng: random.Random, length: int) -> list[int] | list[str]:
        if self.is_text:
            return [rng.choice(WORDS) for _ in range(length)]
        low = min(100, self.vocab_size // 2)
        return [rng.randrange(low, self.vocab_size) for _ in range(length)]

    def _job(self, prompt: list[int] | list[str], new_tokens: int, name: str) -> Job:
        sampling: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        }
        if self.stop:
            sampling["stop"] = list(self.stop)
        content = {"text": " ".join(map(str, prompt))} if self.is_text else {"input_ids": prompt}
        name = f"{self.seed}-{name}" if self.trace else ""
        named = {"rid": name} if name else {}
        body = {**content, "sampling_params": sampling, "stream": True, **named}
        return Job(
            body=json.dumps(body).encode(),
            prompt_len=len(prompt),
            new_tokens=new_tokens,
            name=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: its body, and how many tokens it wants."""

    body: bytes
    prompt_len: int
    new_tokens: int
    name: str = ""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one or many requests showed; times in seconds of time.perf_counter().

    ttft: start to first token. tpot: mean between tokens after it, one a request. gaps: between
    two events with new tokens. itl: those over the tokens that came, once for each token.
    sent, first: by a traced request's name, when it was sent and when its first token was here.
    """

    num_tokens: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class Connections:
    """Kept-alive connections to one server, taken and given back."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"url is {url!r}; expected http://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or 80
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> AsyncGenerator[bytes]:
        """The lines of the answer, as they come. Raises RuntimeError unless its status is 200."""
        reader, writer = await self._connection()
        is_whole = False
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status, headers = await _read_head(reader)
            parts = _parts(reader, headers)
            if status != 200:
                text = b"".join([part async for part in parts])
                raise RuntimeError(f"status {status}: {text[:100].decode(errors='replace')}")
            rest = b""
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line
            is_whole = True
        finally:
            if is_whole:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, limit=READ_BYTES)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _parts(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body, in the pieces in which it was sent."""
    if "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")


async def send(connections: Connections, job: Job, seen: Seen) -> None:
    """One request, read to its end; `seen` gets its times, or what went wrong."""
    started = last = time.perf_counter()
    first: float | None = None
    num_tokens, gaps, itl, meta = 0, [], [], {"prompt_tokens": 0}
    try:
        async with aclosing(connections.post("/generate", job.body)) as lines:
            async for line in lines:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now = time.perf_counter()
                event = json.loads(line[6:])
                if "meta_info" not in event:
                    raise RuntimeError(str(event)[:100])
                meta = event["meta_info"]
                num_new = meta["completion_tokens"] - num_tokens
                if num_new > 0:
                    if first is None:
                        first = now
                    else:
                        gaps.append(now - last)
                        itl += [(now - last) / num_new] * num_new
                    num_tokens, last = num_tokens + num_new, now
    except Exception as error:  # one request's failure is counted, and the load goes on
        seen.errors.append(f"{type(error).__name__}: {error}"[:200])
        return
    if first is None or num_tokens != job.new_tokens:
        seen.errors.append(f"{num_tokens} tokens came; expected {job.new_tokens}")
        return
    seen.num_tokens += num_tokens
    seen.prompt_tokens.append(meta["prompt_tokens"])
    seen.ttft.append(first - started)
    seen.e2e.append(last - started)
    seen.tpot.append((last - first) / (num_tokens - 1))
    seen.gaps += gaps
    seen.itl += itl
    if job.name:
        seen.sent[job.name], seen.first[job.name] = started, first


async def run_point(
    url: str, point: Point, pattern: Pattern, *, on_start: Callable[[], None] = lambda: None
) -> tuple[Seen, float]:
    """Warms up, calls on_start, and sends the load: what was seen, and the seconds it took."""
    warm, measured = pattern.jobs(point)
    connections, seen = Connections(url), Seen()
    try:
        await _closed_loop(connections, warm, len(warm), Seen())
        on_start()
        started = time.perf_counter()
        if point.rate is None:
            await _closed_loop(connections, measured, point.clients or 1, seen)
        else:
            await _open_loop(connections, measured, point.rate, pattern.seed, seen)
        return seen, time.perf_counter() - started
    finally:
        connections.close()


async def _closed_loop(
    connections: Connections, jobs: Sequence[Job], clients: int, seen: Seen
) -> None:
    waiting = iter(jobs)

    async def client() -> None:
        for job in waiting:
            await send(connections, job, seen)

    await asyncio.gather(*(client() for _ in range(clients)))


async def _open_loop(
    connections: Connections, jobs: Sequence[Job], rate: float, seed: int, seen: Seen
) -> None:
    """However many are open: a slow server has no slower clients."""
    rng, due = random.Random(seed), time.perf_counter()
    tasks = []
    for job in jobs:
        tasks.append(asyncio.create_task(send(connections, job, seen)))
        due += rng.expovariate(rate)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
    await asyncio.gather(*tasks)


def summary(seen: Seen, seconds: float) -> dict[str, Any]:
    """The figures of a point; pairs are p50 and p99, in milliseconds."""
    return {
        "seconds": round(seconds, 3),
        "num_finished": len(seen.e2e),
        "prompt_tokens": sum(seen.prompt_tokens),
        "output_tokens": seen.num_tokens,
        "output_tokens_per_second": round(seen.num_tokens / seconds, 1),
        "ttft_ms": _p50_p99(seen.ttft),
        "tpot_ms": _p50_p99(seen.tpot),
        "itl_ms": _p50_p99(seen.itl),
        "gap_ms": _p50_p99(seen.gaps),
        "e2e_ms": _p50_p99(seen.e2e),
        "num_errors": len(seen.errors),
        "errors": seen.errors[:MAX_ERRORS_SAID],
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest rank from below, as the first figures have it; nan of nothing.

    Worked example: of 200 values the 99th percentile is the 199th smallest, index 198.
    """
    if not values:
        return float("nan")
    return sorted(values)[min(int(percent / 100 * len(values)), len(values) - 1)]


def _p50_p99(seconds: Sequence[float]) -> list[float | None]:
    if not seconds:
        return [None, None]
    return [round(1e3 * percentile(seconds, percent), 2) for percent in (50, 99)]
