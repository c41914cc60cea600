"""Prometheus metrics at a scrape, and the rates of the decode log. It knows no HTTP. Counts and
gauges are read from the scheduler's statistics; latencies are recorded here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jspec.config.limits import ServeLimits
from jspec.messages.request import StreamChunk
from jspec.messages.response import Completion
from jspec.scheduler.stats import SchedulerStats
from jspec.server.control.metric_row import Observed, Snapshot
from jspec.server.control.metric_table import METRICS, WINDOW_SECONDS, ratio

MAX_SAMPLES = 1000  # bounds the window if the clock often stops
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    gen_throughput: float = 0.0  # output tokens per second
    acceptance_length: float = 0.0
    accept_rate: float = 0.0
    has_tokens: bool = False  # False: the rates are meaningless
    has_verifications: bool = False  # False: acceptance is meaningless


class RateMeter:
    """Running totals as rates over the last WINDOW_SECONDS of `clock`, which may stop when idle."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, SchedulerStats]] = deque(maxlen=MAX_SAMPLES)

    def sample(self, stats: SchedulerStats) -> None:
        now = self._clock()
        if self._samples and _is_idle(self._samples[-1][1], stats):
            self._samples.clear()  # start the window with the work
        self._samples.append((now, stats))
        # Keep the oldest sample until the next one is old enough to replace it.
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()

    def rates(self, stats: SchedulerStats) -> Rates:
        if not self._samples:
            return Rates()
        began, then = self._samples[0]
        seconds = self._clock() - began
        new, old = stats.counters, then.counters
        return Rates(
            gen_throughput=ratio(stats.num_emitted - then.num_emitted, seconds),
            acceptance_length=ratio(
                new.full_num_emitted - old.full_num_emitted,
                new.full_verify_ct - old.full_verify_ct,
            ),
            accept_rate=ratio(
                new.num_accepted - old.num_accepted, new.num_proposed - old.num_proposed
            ),
            has_tokens=stats.num_emitted > then.num_emitted,
            has_verifications=new.full_verify_ct > old.full_verify_ct,
        )

    def seconds_until_left(
        self, stats: SchedulerStats, num_sequences: int, *, less: float = 0.0
    ) -> float:
        """Estimate the seconds until that many sequences have ended, minus `less`, within 1..60."""
        # A window in which none ended counts as one ended.
        if not self._samples:
            return MIN_RETRY_SECONDS
        began, then = self._samples[0]
        num_ended = _num_ended(stats) - _num_ended(then)
        seconds = num_sequences * (self._clock() - began) / max(num_ended, 1)
        return min(max(seconds - less, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


def _num_ended(stats: SchedulerStats) -> int:
    return stats.num_finished + stats.num_aborted


def _is_idle(old: SchedulerStats, new: SchedulerStats) -> bool:
    return new.num_running == 0 and new.num_emitted == old.num_emitted


class ServerMetrics(Collector):
    def __init__(
        self,
        *,
        model_name: str,
        limits: ServeLimits,
        read_stats: Callable[[], SchedulerStats],
        read_loras: Callable[[], Sequence[str]],
        max_loras: int,
        meter: RateMeter,
    ) -> None:
        self._labels = {"model_name": model_name}
        self._limits = limits
        self._read_stats, self._read_loras = read_stats, read_loras
        self._max_loras = max_loras
        self._meter = meter
        self._observed = Observed()
        self._balancedness: Mapping[int, float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self, balancedness: Mapping[int, float]) -> bytes:
        """Return the text of a scrape. balancedness: of each layer's experts."""
        self._balancedness = balancedness
        return generate_latest(self._registry)

    def observe(self, completion: Completion, chunk: StreamChunk) -> None:
        """Record the latencies of a new chunk. An interval counts once per token of the chunk."""
        observed, now = self._observed, time.monotonic()
        first, last = completion.first_token, completion.last_token
        if chunk.new_ids:
            if last:
                num_ids = len(chunk.new_ids)
                observed.itl.observe((now - last) / num_ids, count=num_ids)
            else:
                first = now
                observed.ttft.observe(now - completion.started)
            last = now
        if chunk.finish is not None:
            num_ids = len(completion.output_ids) + len(chunk.new_ids)
            observed.num_finished[chunk.finish.kind] += 1
            observed.e2e.observe(now - completion.started)
            observed.prompt_tokens.observe(chunk.prompt_tokens)
            observed.output_tokens.observe(num_ids)
            if num_ids > 1:
                observed.decode.observe(last - first)
                observed.tpot.observe((last - first) / (num_ids - 1))

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        snapshot = Snapshot(
            stats=stats,
            limits=self._limits,
            loras=self._read_loras(),
            max_loras=self._max_loras,
            observed=self._observed,
            balancedness=self._balancedness,
            gen_throughput=self._meter.rates(stats).gen_throughput,
        )
        for row in METRICS:
            yield from row.metrics(snapshot, self._labels)
