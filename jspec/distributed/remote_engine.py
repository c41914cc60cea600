"""An engine whose requests run in replicas, for the HTTP application and for batch files.

It has the tokenizer and the templates; a replica gets token ids and returns chunks. So all routes
are those of a server with one engine (jspec/server).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from functools import reduce
from itertools import chain
from typing import Any, NoReturn, Protocol, cast

from jspec.config.engine_args import EngineArgs
from jspec.distributed.continued_stream import Connect, ContinuedStream, EngineLostError, added
from jspec.distributed.replica import Facts, Report
from jspec.engine.weights.loading import resolve_paths
from jspec.errors import EngineClosedError, RequestError
from jspec.messages.adapter import Adapter, no_adapter
from jspec.messages.request import Request, SamplingParams, SpecCounters
from jspec.scheduler.scheduler import ABORTED
from jspec.scheduler.stats import SchedulerStats
from jspec.serving.engine import Engine
from jspec.serving.generation import Generation
from jspec.serving.loop_thread import LoopThread
from jspec.serving.streams.chunk_stream import ChunkStream
from jspec.serving.submission import Preparation

WINDOWS = frozenset({"num_free_window_pages", "num_cached_window_pages"})
BY_LORA = ("running_by_lora", "waiting_by_lora")
REDEPLOY = "a new deployment with the new model_path (`serve deploy`)"
REPORT_SECONDS = 1.0  # between reports of the replicas, which the metrics show


class Replicas(Protocol):
    """All replicas of one deployment."""

    @property
    def connect(self) -> Connect: ...

    async def facts(self) -> Facts:
        """Wait for one of them to start, and return its facts."""
        ...

    async def each(self, method: str) -> list[Any]:
        """Call a method of every live replica. Raises EngineLostError if one does not answer."""
        ...


class Unprepared(Preparation):
    """Prepares nothing, since each replica compiles grammars and programs itself."""

    def __init__(self) -> None: ...

    async def check(self, sampling: SamplingParams) -> None: ...


def _refused(name: str, expected: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RequestError(f"{name} does not reach all replicas; expected {expected}")

    return refuse


class Unprofiled:
    start = stop = staticmethod(_refused("start_profile", "`jspec serve`"))


class RemoteEngine(Engine):
    """An engine over replicas, on the event loop on which `watch` runs.

    arguments: the EngineArgs that the replicas have too.
    """

    def __init__(self, replicas: Replicas, facts: Facts, arguments: Mapping[str, Any]) -> None:
        self.args = EngineArgs.from_mapping(arguments)
        self.config, self._limits = facts.config, facts.limits
        self._adapters = facts.adapters
        self._intake = self._intake_from(resolve_paths(self.args), find_adapter=self._find_adapter)(
            vocab_size=facts.vocab_size,
            context_length=facts.limits.pool.context_length,
            random_seed=facts.config.random_seed,
        )
        self._loop_thread = LoopThread()
        self._preparation = Unprepared()
        self._generation = Generation(self, self._intake, self._preparation)
        self._replicas = replicas
        self._streams: dict[str, ContinuedStream] = {}
        self._reports: Sequence[Report] = ()
        self._started = time.monotonic()
        self._is_closed = False

    @property
    def lora_adapters(self) -> Mapping[str, Adapter]:
        """The adapters that all replicas load at their start (lora_paths)."""
        return self._adapters

    def _find_adapter(self, name: str) -> Adapter:
        return self._adapters.get(name) or no_adapter(name)

    async def watch(self) -> None:
        """Request reports from the replicas, until cancelled."""
        while True:
            with suppress(EngineLostError):  # one is slow: the last reports stay
                self._reports = await self._replicas.each("report")
            await asyncio.sleep(REPORT_SECONDS)

    # Sequences.

    async def submit(
        self, requests: Sequence[Request], *, max_unread: int | None = None, wait: bool = False
    ) -> tuple[ChunkStream, ...]:
        """Like `Engine.submit`. The replicas may refuse the requests one by one, which ends all."""
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        self._forget_finished()
        for request in requests:
            if request.request_id in self._streams:
                raise RequestError(
                    f"request_id is {request.request_id!r}; expected one that is not in use"
                )
        streams = [
            ContinuedStream(each, self._replicas.connect, max_unread=max_unread, waits=wait)
            for each in requests
        ]
        self._streams |= {stream.request_id: stream for stream in streams}
        try:
            for stream in streams:
                await stream.queued()
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return cast(tuple[ChunkStream, ...], tuple(streams))

    def _forget_finished(self) -> None:
        self._streams = {
            name: stream for name, stream in self._streams.items() if not stream.is_over
        }

    async def abort(self, request_id: str) -> bool:
        stream = self._streams.get(request_id)
        return stream is not None and stream.abort(ABORTED)

    async def abort_all(self, *, why: str = ABORTED) -> int:
        return sum(stream.abort(why) for stream in self._streams.values())

    # The engine itself.

    @property
    def stats(self) -> SchedulerStats:
        """The sums of the replicas' last reports."""
        return total_of([report.stats for report in self._reports])

    @property
    def busy_seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_restarting(self) -> bool:
        """True while no replica is alive; requests are accepted and wait."""
        return not self._reports

    @property
    def is_paused(self) -> bool:
        return False

    @property
    def process_id(self) -> None:
        return None

    @property
    def weight_version(self) -> str:
        infos = (report.server_info["weight_version"] for report in self._reports)
        return next(infos, "default")

    @property
    def updated_model_path(self) -> None:
        return None

    async def async_flush_cache(self) -> bool:
        return all(await self._replicas.each("flush_cache"))

    def describe_programs(self) -> tuple[str, ...]:
        return (f"replicas: {len(self._reports)}",)

    def get_server_info(self) -> dict[str, Any]:
        """Return one replica's information, with the process and the state of each."""
        infos = [report.server_info for report in self._reports]
        states = [state for info in infos for state in info["internal_states"]]
        first = infos[0] if infos else self.config.values()
        ids = [report.process_id for report in self._reports]
        return {**first, "replica_process_ids": ids, "internal_states": states}

    trace_requests: Any = _refused("trace_requests", "unset")
    pause_generation: Any = _refused("pause_generation", "autoscaling or `serve shutdown`")
    continue_generation: Any = _refused("continue_generation", "requests to run always")
    async_update_weights_from_disk: Any = _refused("update_weights_from_disk", REDEPLOY)
    async_update_weights_from_tensor: Any = _refused("update_weights_from_tensor", REDEPLOY)
    update_weight_version: Any = _refused("update_weight_version", REDEPLOY)
    async_load_lora_adapter: Any = _refused("load_lora_adapter", "lora_paths at the start")
    async_unload_lora_adapter: Any = _refused("unload_lora_adapter", "lora_paths at the start")
    async_get_weights_by_name: Any = _refused("get_weights_by_name", "`jspec serve`")

    @property
    def profiler(self) -> Any:
        return Unprofiled()

    async def close(self) -> None:
        self._is_closed = True
        for stream in self._streams.values():
            await stream.aclose()

    def shutdown(self) -> None:
        self._is_closed = True
        self._loop_thread.stop()


@asynccontextmanager
async def remote_engine(
    replicas: Replicas, arguments: Mapping[str, Any]
) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(replicas, await replicas.facts(), arguments)
    watching = asyncio.create_task(engine.watch(), name="jspec-watch-replicas")
    try:
        yield engine
    finally:
        watching.cancel()
        await engine.close()


def total_of(found: Sequence[SchedulerStats]) -> SchedulerStats:
    """Return the sums over all replicas, without the shapes, which each replica chooses."""
    names = [field.name for field in fields(SchedulerStats)]
    by_name: dict[str, Any] = {name: [getattr(each, name) for each in found] for name in names}
    sums: dict[str, Any] = {
        name: tuple(map(sum, zip(*values, strict=True))) if name in WINDOWS else sum(values)
        for name, values in by_name.items()
        if name not in {"counters", "shapes", "by_rank", *BY_LORA}
    }
    sums |= {name: sum(by_name[name], start=Counter()) for name in BY_LORA}
    sums["by_rank"] = tuple(chain.from_iterable(by_name["by_rank"]))  # of all replicas, in order
    if not found:
        sums |= {"num_pages": 1, "num_free_pages": 1}  # an empty pool, of which nothing is used
    counters = reduce(added, by_name["counters"], SpecCounters())
    return SchedulerStats(**sums, counters=counters)
