"""Who is measured, and a server somewhere as one; an engine of one's own is in offline.py."""

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
    """A server that does not answer, or not as one."""


class Target(Protocol):
    """What is measured under one name."""

    @property
    def name(self) -> str: ...

    async def send(self, job: Job, seen: Seen) -> None:
        """One request; `seen` gets its times, or its error."""
        ...

    async def before(self) -> None:
        """Just before a run."""
        ...

    async def after(self, seen: Seen) -> None:
        """Just after it."""
        ...


class ServerTarget:
    """A server; acceptance is what its answers or its metrics say of it."""

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
        """The name of its model, and /server_info. Raises UnreachableError."""
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
        """See Target; empties the prefix cache, if that was asked for."""
        if self._flush:
            try:
                async with aclosing(self._connections.post("/flush_cache", b"{}")) as lines:
                    async for _ in lines:
                        pass
            except (OSError, RuntimeError) as error:
                raise UnreachableError(f"{self._url}/flush_cache: {error}") from error
        self._counts = await self._read_counts()

    async def after(self, seen: Seen) -> None:
        """See Target; vLLM's counters say what was accepted where the answers do not."""
        if seen.histogram or not self._counts:
            return
        now = await self._read_counts()
        gained = {name: value - self._counts.get(name, 0.0) for name, value in now.items()}
        reached = [gained.pop(DRAFTS, 0.0), *(gained[name] for name in sorted(gained, key=int))]
        # reached[d]: verifications that accepted a draft of depth d. What went no further stays.
        steps = zip(reached, [*reached[1:], 0.0], strict=True)
        seen.add_histogram([int(here - further) for here, further in steps])

    async def _read_counts(self) -> dict[str, float]:
        """DRAFTS, and by position how many were accepted; empty where a server has none."""
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
        """See Target."""
        await send(self._connections, job, seen, backend=self._backend)

    def close(self) -> None:
        self._connections.close()
