"""Targets of a measurement, and a remote server as one; offline.py has the local engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Protocol

from jspec.cli.measurement.backends import Backend
from jspec.cli.measurement.client import send
from jspec.cli.measurement.connections import Connections
from jspec.cli.measurement.figures import Seen
from jspec.cli.measurement.load import Job
from jspec.errors import JspecError

POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"


class UnreachableError(JspecError):
    """Raised for a server that does not answer like an inference server."""


class Target(Protocol):
    @property
    def name(self) -> str: ...

    async def send(self, job: Job, seen: Seen) -> None: ...

    async def before(self) -> None: ...

    async def after(self, seen: Seen) -> None: ...


class ServerTarget:
    """A server, whose acceptance comes from its answers or its metrics."""

    def __init__(
        self, name: str, url: str, backend: Backend, *, headers: Mapping[str, str], flush: bool
    ) -> None:
        self.name = name
        self._url = url
        self._connections = Connections(url, headers=headers)
        self._backend = backend
        self._flush = flush
        self._counts: dict[str, float] = {}

    async def find(self) -> tuple[str | None, dict[str, Any]]:
        """Return the model's name, and /server_info. Raises UnreachableError."""
        try:
            models = await self._connections.get_json("/v1/models")
            info = await self._connections.get_json("/server_info")
        except (OSError, RuntimeError, EOFError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UnreachableError(
                f"no answer from {self._url}: {why}; expected a server that runs"
            ) from error
        cards = models.get("data") or []
        if not models and not info:
            raise UnreachableError(
                f"{self._url} has neither /v1/models nor /server_info, or wants an --api-key; "
                f"expected an inference server"
            )
        name = cards[0].get("id") if cards and isinstance(cards[0], dict) else None
        return name, info

    async def before(self) -> None:
        if self._flush:
            try:
                async with aclosing(self._connections.post("/flush_cache", b"{}")) as lines:
                    async for _ in lines:
                        pass
            except (OSError, RuntimeError) as error:
                raise UnreachableError(f"{self._url}/flush_cache: {error}") from error
        self._counts = await self._read_counts()

    async def after(self, seen: Seen) -> None:
        """Add vLLM's acceptance counters if the answers have none."""
        if seen.histogram or not self._counts:
            return
        now = await self._read_counts()
        gained = {name: value - self._counts.get(name, 0.0) for name, value in now.items()}
        reached = [gained.pop(DRAFTS, 0.0), *(gained[name] for name in sorted(gained, key=int))]
        # reached[d]: verifications that accepted at least d drafts; differences count exactly d.
        steps = zip(reached, [*reached[1:], 0.0], strict=True)
        seen.add_histogram([int(here - further) for here, further in steps])

    async def _read_counts(self) -> dict[str, float]:
        """Return DRAFTS, and accepted drafts by position; empty for a server without them."""
        try:
            text = (await self._connections.get("/metrics")).decode(errors="replace")
        except (OSError, RuntimeError, EOFError):
            return {}
        found: dict[str, float] = {}
        for line in text.splitlines():
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            if name in (POSITIONS, DRAFTS):
                key = labels.partition('position="')[2].partition('"')[0] or DRAFTS
                found[key] = found.get(key, 0.0) + float(value)
        return found

    async def send(self, job: Job, seen: Seen) -> None:
        await send(self._connections, job, seen, backend=self._backend)

    def close(self) -> None:
        self._connections.close()
